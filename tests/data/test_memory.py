"""What the C allocator does with memory that a step frees."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest
import torch

from rlflow.data.memory import keep_freed_memory


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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator can be told")
def test_a_freed_tensors_pages_serve_the_next() -> None:
    code = f"from {__name__} import _fewest_faults_of_a_tensor as faults; print(faults())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < 500
