"""The code of the README, the tutorials and the how-tos runs, and prints what they say.

- ``python`` blocks of a page are one script. It runs on two ranks, in an empty folder.
- ``text`` blocks of the README and the tutorials are what it prints: the words exactly, the numbers nearly.
- ``diff`` blocks of the README are applied to a stock script, which then computes the same losses on two ranks.
- ``bash`` blocks are scripts: bash parses them, and the files that they name are there.
- Commands, in ``console`` blocks and between backticks, are run if they are ours, or else checked: targets of make,
  folders of tests, extras of pip, scripts.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launching import run_script

from pyg_dist import cli

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
# The contributor's guide shows the form of a handler, which is no script.
SCRIPTS = [page for page in PAGES if page.parent.name in ("tutorials", "how-to") and "```python" in page.read_text()]
# Two ranks that import torch on few cores, beside other tests.
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def printed_by(script: Path, launcher: str, num_ranks: int, *args: str) -> str:
    ended = run_script(launcher, num_ranks, script, *args)
    assert set(ended.codes) == {0}, ended.stdout + ended.stderr
    return ended.stdout


def require_printed(expected: str, printed: str) -> None:
    """Every line of ``expected`` in this order, with the same words, and numbers within two hundredths."""
    lines = iter(printed.splitlines())
    for line in expected.splitlines():
        words, numbers = NUMBER.sub("#", line), NUMBER.findall(line)
        for candidate in lines:
            found = NUMBER.findall(candidate)
            if NUMBER.sub("#", candidate) == words and all(map(is_near, found, numbers)):
                break
        else:
            raise AssertionError(f"Expected the line {line!r} in:\n{printed}")


def is_near(one: str, other: str) -> bool:
    if "." not in other:
        return one == other
    return abs(float(one.replace(",", "")) - float(other.replace(",", ""))) <= 0.02


def script_of(page: Path, folder: Path) -> Path:
    script = folder / "train.py"
    script.write_text("\n".join(blocks(page, "python")))
    return script


@pytest.mark.slow
@pytest.mark.parametrize("page", SCRIPTS, ids=name)
def test_scripts_on_two_ranks(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = printed_by(script_of(page, tmp_path), "ranks", 2)
    if page in TUTORIALS:
        expected = blocks(page, "text")
        assert expected
        require_printed("".join(expected), printed)


def test_first_run_alone_prints_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (page,) = (page for page in TUTORIALS if page.stem == "first-run")
    require_printed(blocks(page, "text")[0], printed_by(script_of(page, tmp_path), "ranks", 1))


def test_every_tutorial_has_a_script() -> None:
    assert len(TUTORIALS) >= 4
    assert set(TUTORIALS) <= set(SCRIPTS)


def test_a_wrong_number_is_noticed() -> None:
    printed = "epoch 10: loss 0.5000\nother\nepoch 20: loss 0.2500\n"
    require_printed("epoch 10: loss 0.5100\nepoch 20: loss 0.2500\n", printed)
    for wrong in ("epoch 10: loss 0.6000\n", "epoch 11: loss 0.5000\n", "epoch 20: loss 0.25\nepoch 10: loss 0.5\n"):
        with pytest.raises(AssertionError, match="Expected the line"):
            require_printed(wrong, printed)


# ---- The README ------------------------------------------------------------------------------------------------------

_DATA = """
import torch
import torch.nn.functional as F
from torch_geometric.datasets import KarateClub
{imports}
dataset, in_channels = KarateClub(), 34
torch.manual_seed(0)
{data}
{model}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    if {is_main}:
        print(f"loss {{loss.item():.6f}}")
"""
_SAGE = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = SAGEConv(in_channels, 16), SAGEConv(16, 4)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

model = Model()
"""


def sides(diff: str) -> tuple[list[str], list[str]]:
    """The lines before and after a change."""
    lines = diff.splitlines()
    return [line[1:] for line in lines if line[0] in " -"], [line[1:] for line in lines if line[0] in " +"]


def readme_script(lines: list[str], is_ours: bool) -> str:
    imports = [line for line in lines if line.startswith("from ")]
    (data,) = (line for line in lines if line.startswith("data = "))
    model = [line for line in lines if line.startswith("model = ")]
    is_main = "__import__('pyg_dist').is_main()" if is_ours else "True"
    text = _DATA.format(imports="\n".join(imports), data=data, model=model[0] if model else _SAGE, is_main=is_main)
    return text.replace("dropout=0.5", "dropout=0.0")  # whose masks are not stock PyG's


@pytest.mark.parametrize("number", [0, 1])
def test_readme_diffs_keep_the_losses(number: int, tmp_path: Path) -> None:
    assert len(blocks(README, "diff")) == 2
    before, after = sides(blocks(README, "diff")[number])
    stock, ours = tmp_path / "stock.py", tmp_path / "ours.py"
    stock.write_text(readme_script(before, False))
    ours.write_text(readme_script(after, True))
    expected = [float(loss) for loss in re.findall(r"loss (\S+)", printed_by(stock, "ranks", 1))]
    got = [float(loss) for loss in re.findall(r"loss (\S+)", printed_by(ours, "ranks", 2))]
    assert len(expected) == 3
    np.testing.assert_allclose(got, expected, rtol=1e-4)


@pytest.mark.slow
def test_readme_demo(tmp_path: Path) -> None:
    printed = printed_by(ROOT / "examples" / "digits.py", "torchrun", 2, "--picture", str(tmp_path / "curves.png"))
    require_printed(blocks(README, "text")[0], printed)


# ---- Commands --------------------------------------------------------------------------------------------------------


def commands(page: Path) -> list[str]:
    text = page.read_text()
    lines = [line for block in blocks(page, "console") for line in block.splitlines() if line]
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    spans = re.findall(r"`((?:make|python|torchrun|mpirun|pip) [^`]+)`", text)
    return [*lines, *spans]


@pytest.fixture(scope="module")
def graph_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("graph") / "GRAPH.npz"
    edges = np.random.default_rng(0).integers(0, 200, (2, 1000))
    np.savez(file, num_nodes=200, edge_index=edges)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands(page: Path, graph_file: Path) -> None:
    for command in commands(page):
        check(command, page, graph_file)


def check(command: str, page: Path, graph_file: Path) -> None:
    store = str(graph_file.with_name(f"store of {page.stem}"))
    parts = str(graph_file.with_name(f"{page.stem}.npy"))
    command = command.replace("GRAPH.npz", str(graph_file)).replace("PARTS.npy", f"'{parts}'")
    words = shlex.split(command.replace("STORE", f"'{store}'"))
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
    where = f"{name(page)}: {command}"
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        for target in words[1:]:
            assert re.search(rf"^{target}:", makefile, re.M), where
        for path in re.findall(r"tests/\S*", variables.pop("ARGS", "")):
            assert (ROOT / path).exists(), where
        assert all(f"{variable} ?=" in makefile for variable in variables), where
    elif words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for extra in re.findall(r"\[([\w,-]+)\]", command):
            assert set(extra.split(",")) <= set(extras), where
    elif words[:3] == ["python", "-m", "pyg_dist"]:
        run(words[3:], where)
    elif words[0] in ("python", "torchrun", "mpirun", "srun"):
        scripts = [word for word in words if word.endswith(".py")]
        assert scripts, where
        assert all(script == "train.py" or (ROOT / script).exists() for script in scripts), where
    else:
        assert words[0] in ("export", "py-spy"), f"no check knows this command; {where}"


def run(arguments: list[str], where: str) -> None:
    """One of our commands, where the graph that it names is there; names in capitals stand for what a reader has."""
    command = [str(ROOT / word) if word.startswith("../shared/") else word for word in arguments]
    if not arguments or arguments[0].isupper():
        return
    graphs = [Path(word) for word in command if word.endswith(".npz")]
    if not all(graph.exists() for graph in graphs) or (arguments[0] in ("partition", "plan") and not graphs):
        return
    if arguments[0] == "bench":  # takes a minute, and writes to the user's cache folder
        arguments = command = ["bench", "--help"]
    printed = io.StringIO()
    status: int | str | None
    with contextlib.redirect_stdout(printed):
        try:
            status = cli.main(command)
        except SystemExit as ended:
            status = ended.code
    assert not status, where
    assert printed.getvalue(), where


SHELL_SCRIPTS = [(page, block) for page in PAGES for block in blocks(page, "bash")]


@pytest.mark.parametrize(("page", "script"), SHELL_SCRIPTS, ids=[name(page) for page, _ in SHELL_SCRIPTS])
def test_bash_parses_scripts(page: Path, script: str) -> None:
    assert complaint(script) == "", name(page)
    named = re.findall(r"(?<![\w/.])(?:tests|examples|benchmarks)/[\w/.]+", script)
    assert [path for path in named if not (ROOT / path).exists()] == [], name(page)


def test_a_wrong_script_is_noticed() -> None:
    assert SHELL_SCRIPTS
    assert "syntax error" in complaint("if true; then srun python train.py\n")


def complaint(script: str) -> str:
    """What bash says of a script that it does not run."""
    parsed = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    return parsed.stderr


def test_wrong_commands_are_noticed(graph_file: Path) -> None:
    for wrong in (
        "make no_such_target",
        "make test ARGS=tests/no_such_folder",
        "pip install '.[no-such-extra]'",
        "torchrun --nproc-per-node 2 examples/no_such_script.py",
        "python -m pyg_dist plan GRAPH.npz --ranks 2 --layout no-such-layout",
        "no-such-tool",
    ):
        with pytest.raises(AssertionError):
            check(wrong, README, graph_file)


@pytest.mark.slow
def test_the_tutorial_on_a_real_graph(shared_data: Path) -> None:
    """What the tutorial on node classification ends with."""
    example = ROOT / "examples" / "full_batch_gcn.py"
    printed = printed_by(example, "ranks", 2, "--data", str(shared_data / "cora.npz"), "--epochs", "20")
    accuracy = float(printed.splitlines()[-1].split()[-1])
    assert accuracy > 0.7
