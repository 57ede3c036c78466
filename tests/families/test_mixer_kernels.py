"""Kernels that get the rows of a line from transformers: stubs of the packages, which compute in torch.

The packages themselves are for CUDA, and were never run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from rlflow.models.causal_lm import ScoringModel
from rlflow.models.handle import ForwardPlan
from rlflow.models.mixers import CONVOLUTION, CONVOLUTION_AND_SCAN, DELTA_RULE, SCAN, Kernel, slow_states
from rlflow.testing.derivative import wide_casts
from tests.families.test_mixers import alone, together
from tests.strategies.reference import distance

Function = Callable[..., Any]


def each_row(function: Function, lengths: list[int] | None, dim: int, *inputs: Tensor) -> Any:
    """The results for each row alone, one after another; for the whole line if no rows are given."""
    if lengths is None:
        return function(*inputs)
    rows = zip(*(each.split(lengths, dim) for each in inputs), strict=True)
    return torch.cat([function(*row) for row in rows], dim)


def convolution(own: Function, called: list[str]) -> Function:
    def causal_conv1d_fn(x: Tensor, weight: Any, bias: Any = None, seq_idx: Any = None, activation: Any = None) -> Any:
        called.append("convolution")
        return each_row(lambda row: own(row, weight, bias, activation), lengths_of(seq_idx), 2, x)

    return causal_conv1d_fn


def delta_rule(own: Function, called: list[str]) -> Function:
    def chunk_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Any = None, beta: Any = None, cu_seqlens: Any = None, **more: Any
    ) -> Any:
        called.append("delta rule")
        rule = lambda q, k, v, g, beta: own(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]  # noqa: E731
        lengths = None if cu_seqlens is None else cu_seqlens.diff().tolist()
        return each_row(rule, lengths, 1, q, k, v, g, beta), None

    return chunk_gated_delta_rule


def scan(own: Function, called: list[str]) -> Function:
    def mamba_chunk_scan_combined(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Any = None,
        dt_bias: Any = None,
        seq_idx: Any = None,
        dt_softplus: bool = False,
        dt_limit: Any = (0.0, float("inf")),
    ) -> Any:
        called.append("scan")
        more = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        of_row = lambda x, dt, b, c: own(x, dt, A, b, c, chunk_size, **more)  # noqa: E731
        return each_row(of_row, lengths_of(seq_idx), 1, x, dt, B, C)

    return mamba_chunk_scan_combined


def convolution_and_scan(own: Function, called: list[str]) -> Function:
    def mamba_split_conv1d_scan_combined(zxbcdt: Tensor, *arguments: Any, seq_idx: Any = None) -> None:
        called.append("convolution and scan")
        assert seq_idx is not None  # and the mixer goes on to the two

    return mamba_split_conv1d_scan_combined


def lengths_of(seq_idx: Tensor | None) -> list[int] | None:
    return None if seq_idx is None else seq_idx[0].bincount().tolist()


Stub = tuple[Kernel, str, Callable[[Function, list[str]], Function]]  # a kernel, transformers' name, what replaces it
CONV: Stub = (CONVOLUTION, "causal_conv1d_fn", convolution)
STUBS: dict[str, list[Stub]] = {
    "qwen3_5": [CONV, (DELTA_RULE, "torch_chunk_gated_delta_rule", delta_rule)],
    "falcon_h1": [
        CONV,
        (SCAN, "mamba2_chunk_scan", scan),
        (CONVOLUTION_AND_SCAN, "mamba2_split_conv1d_scan_combined", convolution_and_scan),
    ],
    "lfm2": [CONV],
}


def install(name: str, stubs: list[Stub], patched: pytest.MonkeyPatch) -> list[str]:
    """Make it seem that the packages were there when transformers was imported; returns the functions to call."""
    called: list[str] = []
    modeling = import_module(f"transformers.models.{name}.modeling_{name}")
    for kernel, attribute, stub in stubs:
        own = getattr(modeling, attribute).__wrapped__
        package = kernel.module.split(".")
        for end in range(1, len(package) + 1):
            path = ".".join(package[:end])
            patched.setitem(sys.modules, path, sys.modules.get(path) or ModuleType(path))
        patched.setattr(sys.modules[kernel.module], kernel.name, stub(own, called), raising=False)
        patched.setattr(modeling, attribute, use_kernel_func_from_hub_with_fallback(kernel.name, package[0])(own))
    return called


@pytest.mark.parametrize("name", STUBS)
def test_kernels_of_mixers_receive_a_packed_line_and_the_starts_of_its_rows(
    name: str, family: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, gradient = alone(family(name))
    called = install(name, STUBS[name], monkeypatch)
    with wide_casts():
        logprobs, found, handle = together(family(name), torch.float64, ForwardPlan())
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-10)
    assert distance(found, gradient) < 1e-10
    assert len(set(called)) == len(STUBS[name])
    assert not handle.plan.side_by_side  # so micro-batches are cut as those of any packed line
    assert not handle.plan.share_prefixes


@pytest.mark.parametrize(
    ("name", "packages"),
    [
        ("qwen3_5", "; `pip install causal-conv1d flash-linear-attention` brings kernels"),
        ("falcon_h1", "; `pip install causal-conv1d mamba-ssm` brings kernels"),
        ("kimi_linear", ", and none is known"),
    ],
)
def test_on_cuda_a_line_names_the_packages_that_are_missing(
    name: str, packages: str, family: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = torch.device("cuda")
    model = ScoringModel.load(family(name), torch.float32, torch.device("cpu"))
    assert model.remarks == []
    slow = "torch computes the states of its layers, several times slower than a kernel would"
    assert slow_states(model, cuda) == f"{slow}{packages}"
    if name in STUBS:
        install(name, STUBS[name], monkeypatch)
        assert slow_states(ScoringModel.load(family(name), torch.float32, torch.device("cpu")), cuda) == ""


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1"])
def test_rows_are_side_by_side_where_one_of_them_is_missing(
    name: str, family: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = alone(family(name))
    called = install(name, STUBS[name][1:2], monkeypatch)
    with wide_casts():
        logprobs, _, handle = together(family(name), torch.float64, ForwardPlan())
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-10)
    assert called  # with padded rows, without knowing that they are padded
    assert handle.plan.side_by_side
