"""The third-level cache's size: what Linux says of a core comes before what the C library says of all."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from pyg_dist.backend import ops
from pyg_dist.backend.ops import library

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
MIB = 1 << 20


def folder_of(tmp_path: Path, size: str, level: str = "3") -> Path:
    """A core's caches, the third level's in the last place."""
    caches = [("1", "32K"), ("1", "32K"), ("2", "1024K"), (level, size)]
    for k, (number, of_size) in enumerate(caches):
        cache = tmp_path / f"index{k}"
        cache.mkdir()
        (cache / "level").write_text(number + "\n")
        (cache / "size").write_text(of_size + "\n")
    return tmp_path


def of_c_library() -> int:
    """What is said where Linux says nothing."""
    if shutil.which("getconf") is None:
        pytest.skip("there is no getconf")
    said = subprocess.run(["getconf", "LEVEL3_CACHE_SIZE"], capture_output=True, text=True, check=False).stdout.strip()
    return int(said) if said.isdigit() else 0


@pytest.mark.parametrize(
    ("size", "num_bytes"), [("32768K", 32 * MIB), ("300M", 300 * MIB), ("1G", 1024 * MIB), ("16777216", 16 * MIB)]
)
def test_sizes(tmp_path: Path, size: str, num_bytes: int) -> None:
    assert library.last_cache_bytes(folder_of(tmp_path, size)) == num_bytes


@pytest.mark.parametrize("size", ["", "K", "-5K", "0K", "12Q", "99999999999G", "99999999999999999999K"])
def test_a_size_that_is_none(tmp_path: Path, size: str) -> None:
    assert library.last_cache_bytes(folder_of(tmp_path, size)) == of_c_library()


def test_no_third_level_and_no_folder(tmp_path: Path) -> None:
    assert library.last_cache_bytes(tmp_path / "nothing") == of_c_library()
    assert library.last_cache_bytes(folder_of(tmp_path, "32768K", level="4")) == of_c_library()


def test_this_machine() -> None:
    cache = next((c for c in sorted(CACHES.glob("index*")) if (c / "level").read_text() == "3\n"), None)
    if cache is None:
        pytest.skip("Linux names no third level here")
    assert library.last_cache_bytes() == int((cache / "size").read_text().rstrip("K\n")) << 10


@pytest.mark.skipif(library.isa() == "simt", reason="the emulator has one form")
def test_the_first_guess_is_by_blocks_where_rows_overflow_the_cache() -> None:
    size = max(library.last_cache_bytes() or 32 * MIB, 8 * MIB)
    for num_rows, form in ((size // 256, "plain"), (size // 256 + 1, "blocks")):
        num_edges = 4 * (num_rows + 1)
        rowptr, col = torch.tensor([0, num_edges]), torch.empty(num_edges, dtype=torch.int32)
        assert ops.guessed_form(rowptr, col, torch.empty(num_rows, 64)) == form
