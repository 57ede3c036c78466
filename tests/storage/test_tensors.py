"""Files written tensor by tensor are what the safetensors library reads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from rlflow.storage.safetensors_files import NAMES, StoredTensor, TensorFile, sha256, write_tensors


def written(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> str:
    return write_tensors(path, [StoredTensor.of(key, of) for key, of in tensors.items()], tensors.values(), metadata)


def test_the_safetensors_library_reads_every_dtype_and_shape(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {str(dtype): torch.randn(3, 5, generator=generator).mul(9).to(dtype) for dtype in NAMES}
    tensors |= {"0-dim": torch.tensor(2.5), "empty": torch.empty(0, 4), "turned": torch.randn(4, 6).T}
    written(tmp_path / "file", tensors, {"format": "pt", "é": "ü"})
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert found[key].dtype == tensor.dtype
        assert found[key].shape == tensor.shape
        assert torch.equal(found[key].view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)), key
    with safe_open(tmp_path / "file", "pt") as file:
        assert file.metadata() == {"format": "pt", "é": "ü"}


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    digest = written(tmp_path / "file", {"a": torch.arange(1000), "b": torch.ones(7)})
    assert digest == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest() == sha256(tmp_path / "file")


def test_a_tensor_is_asked_for_when_those_before_are_on_their_way(tmp_path: Path) -> None:
    sizes: list[int] = []

    def tensors() -> Iterator[Tensor]:
        for _ in range(3):
            sizes.append((tmp_path / "file").stat().st_size)
            yield torch.ones(1000)

    write_tensors(tmp_path / "file", [StoredTensor(key, (1000,), torch.float32) for key in "abc"], tensors())
    assert [size - sizes[0] for size in sizes] == [0, 4000, 8000]


def test_a_tensor_other_than_the_announced_one_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        write_tensors(tmp_path / "file", [StoredTensor("a", (2,), torch.float32)], [torch.ones(3)])


def test_every_dtype_is_read_by_ranges(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.randn(9).mul(9).to(dtype) for dtype in NAMES} | {"empty": torch.empty(0)}
    written(tmp_path / "file", tensors, {"format": "pt"})
    file = TensorFile(tmp_path / "file")
    for key, tensor in tensors.items():
        for start, end in ((0, len(tensor)), (min(2, len(tensor)), min(5, len(tensor)))):
            found = file.read(key, start, end - start)
            assert found.dtype == tensor.dtype
            assert torch.equal(found.view(torch.uint8), tensor[start:end].view(torch.uint8)), key


def test_a_file_gives_a_range_without_reading_the_whole_tensor(tmp_path: Path) -> None:
    written(tmp_path / "file", {"first": torch.zeros(7), "weight": torch.arange(2.0**20)})
    file, before = TensorFile(tmp_path / "file"), _read_by_this_process()
    assert file.read("weight", 1000, 500).tolist() == list(range(1000, 1500))
    assert _read_by_this_process() - before < 10_000


def _read_by_this_process() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])  # `rchar`, bytes of all reads
