"""Settings by environment: defaults, values, and what makes no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyg_dist.backend.session import settings
from pyg_dist.errors import OptionError


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in settings.SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)
    values = [setting.value() for setting in settings.SETTINGS]
    assert values == [
        *(
            "",
            False,
            float("inf"),
            512.0,
            None,
            1,
            None,
            2.0**20,
            None,
            None,
            False,
            "auto",
            "auto",
            float("inf"),
            None,
            4096.0,
            (32, 32),
        )
    ]
    for setting in settings.SETTINGS:
        monkeypatch.setenv(setting.name, "")
    assert [setting.value() for setting in settings.SETTINGS] == values


@pytest.mark.parametrize(
    ("setting", "given", "value"),
    [
        (settings.PROJECT_FIRST, "1", True),
        (settings.REMEMBER_MIB, "0.5", 0.5),
        (settings.MESSAGE_MIB, "64", 64.0),
        (settings.GRID_SUMS, "all_reduce", "all_reduce"),
        (settings.GRID_BLOCKS, "3", 3),
        (settings.MACHINE, "there/it.json", Path("there/it.json")),
        (settings.LOG, "Info", "info"),
    ],
)
def test_values(monkeypatch: pytest.MonkeyPatch, setting: settings.Setting[object], given: str, value: object) -> None:
    monkeypatch.setenv(setting.name, given)
    assert setting.value() == value


@pytest.mark.parametrize(
    ("setting", "given"),
    [
        (settings.PROJECT_FIRST, "yes"),
        (settings.REMEMBER_MIB, "-1"),
        (settings.REMEMBER_MIB, "nan"),
        (settings.MESSAGE_MIB, "-1"),
        (settings.GRID_SUMS, "ring"),
        (settings.GRID_BLOCKS, "0"),
        (settings.GRID_BLOCKS, "two"),
        (settings.LOG, "loud"),
    ],
)
def test_what_makes_no_sense(monkeypatch: pytest.MonkeyPatch, setting: settings.Setting[object], given: str) -> None:
    monkeypatch.setenv(setting.name, given)
    with pytest.raises(OptionError, match=f"Expected {setting.name} to be .*got '{given}'.: unset it"):
        setting.value()


def test_every_setting_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "generated.py").read_text()  # writes reference/settings.md
    assert all(f'"{setting.name}"' in page for setting in settings.SETTINGS)
