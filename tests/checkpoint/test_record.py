"""States in files of a machine's memory: they come back, also where they lie over older ones, and damage is found."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from bits import assert_all_same_bits
from torch import Tensor

from pyg_dist.checkpoint.record import HEAD, Record, described, mapped, read_record


def write(file: Path, head: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Record:
    whole = {HEAD: described(head, ['"a thing": [1, null]']), **tensors}
    record = Record(partial(mapped, file), whole, is_copy=False)
    record.write(whole.values())
    return record


def test_records_come_back_and_damaged_ones_are_none(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.tensor(7, dtype=torch.int32), "c": torch.empty(0, 2).bfloat16()}
    tensors["d"] = torch.randn(4, 6, requires_grad=True).t()
    file, rng = tmp_path / "state.0", random.Random(0)
    write(file, {"number": 3}, tensors)
    found = read_record(file)
    assert found is not None
    assert found[0] == {"number": 3, "state": {"a thing": [1, None]}}
    assert found[1].keys() == tensors.keys()
    assert_all_same_bits([found[1][name] for name in tensors], [tensor.detach() for tensor in tensors.values()])
    content = file.read_bytes()
    for _ in range(300):
        place = rng.randrange(len(content))
        file.write_bytes(content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :])
        assert read_record(file) is None
        file.write_bytes(content[:place])
        assert read_record(file) is None


def test_a_record_over_another_one(tmp_path: Path) -> None:
    """Values alone change, or all: then a new one takes the file."""
    file, first = tmp_path / "state.0", {"a": torch.randn(300), "b": torch.arange(3)}
    record = write(file, {"number": 1}, first)
    second = {"a": torch.randn(300), "b": torch.arange(3, 6)}
    head = described({"number": 2}, ['"a thing": {}'])
    assert record.fits({HEAD: head, **second})
    record.write([head, *second.values()])
    found = read_record(file)
    assert found is not None
    assert found[0] == {"number": 2, "state": {"a thing": {}}}
    assert_all_same_bits([found[1]["a"], found[1]["b"]], [*second.values()])
    for other in ({**second, "a": torch.randn(299)}, {**second, "b": torch.arange(3).int()}, {"a": second["a"]}):
        assert not record.fits({HEAD: head, **other})
        write(file, {"number": 3}, other)
        found = read_record(file)
        assert found is not None
        assert_all_same_bits([found[1][name] for name in other], [*other.values()])


def test_a_copy_has_the_same_bytes(tmp_path: Path) -> None:
    content = torch.from_numpy(write(tmp_path / "rows-00001.0", {"number": 3}, {"a": torch.randn(7)}).content)
    copy = Record(partial(mapped, tmp_path / "rows-00001.1"), {"": content}, is_copy=True)
    copy.write([content])
    assert (tmp_path / "rows-00001.1").read_bytes() == (tmp_path / "rows-00001.0").read_bytes()
