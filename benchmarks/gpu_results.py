"""A plugin for pytest: what a test has shown is in the file of results when it ends, and which one runs meanwhile.

    pytest -p gpu_results --results-file FILE --results-part PART --results-name NAME

So a run that is cut, or whose process crashes, keeps what it has (``gpu_all.py``).
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from gpu_measure import Log

MOST_FAILURES = 30
MOST_CHARACTERS = 1_500


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("results")
    for name in ("file", "part", "name"):
        group.addoption(f"--results-{name}", required=True)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # of pytest-xdist, whose workers report to the first process
        part, name = config.getoption("results_part"), config.getoption("results_name")
        log = Log(Path(config.getoption("results_file")), part, is_quiet=True)
        config.pluginmanager.register(Results(log, name))


class Results:
    """Counts and errors so far.

    Args:
        log: where to write them.
        name: under which name.
    """

    def __init__(self, log: Log, name: str) -> None:
        self._log, self._name = log, name
        self._num_passed = 0
        self._failed: dict[str, str] = {}
        self._skipped: Counter[str] = Counter()
        self._running: dict[str, None] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """See pytest."""
        self._running[nodeid] = None
        self._write(None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """See pytest."""
        self._add(report)
        self._num_passed += report.passed and report.when == "call"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """See pytest."""
        self._running.pop(nodeid, None)
        self._write(None)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """See pytest."""
        self._add(report)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """See pytest."""
        self._write(int(exitstatus))

    def _add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped:
            reason: Any = report.longrepr
            self._skipped[reason[2] if isinstance(reason, tuple) else str(reason)] += 1
        elif report.failed and len(self._failed) < MOST_FAILURES:
            self._failed[report.nodeid] = _in_short(report.longreprtext)

    def _write(self, status: int | None) -> None:
        ended = {"status": status} if status is not None else {"running": list(self._running)}
        found = {"passed": self._num_passed, "failed": self._failed, "skipped": dict(self._skipped)}
        self._log.add(self._name, ended | found)


def _in_short(text: str) -> str:
    """The lines that say what is wrong; of a long story the begin and the end."""
    lines = text.splitlines()
    said = [line[1:].strip() for line in lines if line.startswith("E ")] or lines
    short = os.linesep.join(said)
    half = MOST_CHARACTERS // 2
    return short if len(short) <= MOST_CHARACTERS else f"{short[:half]} ... {short[-half:]}"
