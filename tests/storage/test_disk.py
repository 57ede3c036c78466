"""Jobs are done one after another in the background; errors are raised where the run waits."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlflow.storage.disk import Disk
from rlflow.storage.safetensors_files import StoredTensor, write_tensors

ENTRIES = [StoredTensor(str(number), (3,), torch.float32) for number in range(20)]


def test_what_a_job_raised_is_raised_by_wait_and_later_jobs_are_not_done() -> None:
    disk, done = Disk(), []
    disk.do(lambda: 1 / 0)
    disk.do(lambda: done.append("after"))
    disk.report(lambda error: done.append(type(error).__name__))
    with pytest.raises(ZeroDivisionError):
        disk.wait()
    assert done == ["ZeroDivisionError"]
    with disk:
        disk.do(lambda: done.append("again"))
    assert done[1:] == ["again"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tensors_are_as_they_were_when_they_were_given(asynchronous: bool, tmp_path: Path) -> None:
    disk, released = Disk(asynchronous), threading.Event()
    if asynchronous:
        disk.do(released.wait)  # nothing is written before all are given
    stream, weight = disk.stream(partial(write_tensors, tmp_path / "file", ENTRIES)), torch.zeros(3)
    for entry in ENTRIES:
        weight += 1
        stream.put(disk.copy(entry.key, weight))
    stream.put(None)
    weight.zero_()
    released.set()
    disk.wait()
    assert {key: of.tolist() for key, of in load_file(tmp_path / "file").items()} == {
        str(number): [number + 1.0] * 3 for number in range(20)
    }


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_asynchronous_disk_writes_nothing_before_it_is_started(asynchronous: bool) -> None:
    disk, done = Disk(asynchronous), threading.Event()
    disk.do(done.set)
    assert done.wait(0.2 if asynchronous else 30) is not asynchronous
    disk.give_up()
    assert done.is_set() is not asynchronous
    disk.start()
    assert done.wait(30)
    disk.wait()


def test_who_gives_tensors_does_not_wait_for_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    disk = Disk()
    stream = disk.stream(partial(write_tensors, tmp_path / "missing/file", ENTRIES))
    for _ in ENTRIES:
        stream.put(torch.zeros(3))
    stream.put(None)
    with pytest.raises(FileNotFoundError):
        disk.wait()


def test_the_copies_of_one_save_are_the_memory_of_the_next() -> None:
    disk = Disk(asynchronous=True)
    first = disk.copy("weight", torch.ones(4))
    assert disk.copy("weight", torch.zeros(4)).data_ptr() == first.data_ptr()
    assert disk.copy("weight", torch.zeros(5)).tolist() == [0.0] * 5
