"""The C allocator's treatment of memory that a step frees."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

import psutil
import pytest
import torch

from rlflow.process.freed_memory import keep_freed_memory, return_freed_memory

GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator can be told")


def _fewest_faults_of_a_tensor() -> int:
    """Pages that a 64 MB tensor faults in, after others as large were freed: 16,384 of 4 KB if they were handed back.

    Glibc keeps up to 32 MB by itself. The fewest of several: a freed piece may lack the few bytes that the next one's
    alignment wants, once or twice.
    """
    assert keep_freed_memory()
    faults = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(16 * 2**20)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(faults)


@GLIBC
def test_a_freed_tensors_pages_serve_the_next() -> None:
    """In one of many processes: where the system put the heap below something else, as often as not, it cannot grow."""
    code = f"from {__name__} import _fewest_faults_of_a_tensor as faults; print(faults())"
    faults = 16384
    for _ in range(25):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
        if (faults := int(done.stdout)) < 500:
            break
    assert faults < 500


def _handed_back(told: bool) -> int:
    """MB that the process is smaller by once an 8 MB tensor is freed, after which others were made."""
    assert not told or return_freed_memory()
    torch.ones(4 * 2**20)  # by itself glibc keeps what is smaller than the largest it has freed
    large = torch.ones(2 * 2**20)
    others = [torch.ones(1000) for _ in range(1000)]  # behind it in the heap, if it is there
    before = psutil.Process().memory_info().rss
    del large
    assert others
    return (before - psutil.Process().memory_info().rss) // 10**6


@GLIBC
@pytest.mark.parametrize(("told", "least", "most"), [(False, 0, 1), (True, 7, 9)])
def test_a_freed_tensor_goes_back_to_the_system(told: bool, least: int, most: int) -> None:
    code = f"from {__name__} import _handed_back as handed_back; print(handed_back({told}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert least <= int(done.stdout) <= most
