"""Computes ratios and shares from the seconds of steps and parts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Seconds = Mapping[str, Sequence[float]]  # by name, of each step


def fastest_parts(median: Mapping[str, float]) -> dict[str, str]:
    """By part, such as `actor_train`, the name of the seconds of its fastest way."""
    names = [name for name in median if name.startswith("part_")]
    parts = {name.removeprefix("part_").rpartition("_")[0] for name in names}
    return {
        part: min((name for name in names if name.rpartition("_")[0] == f"part_{part}"), key=median.__getitem__)
        for part in sorted(parts)
    }


def summary(workload: str, found: Seconds) -> dict[str, Any]:
    """Ratios of medians, None where a side was left out, and what they are made of."""
    median = {name: statistics.median(values) for name, values in found.items()}
    parts = fastest_parts(median)
    steps = range(len(found["rlflow_vllm"]))
    # Each step against its own parts: its number of tokens differs from step to step.
    to_parts = [found["rlflow_vllm"][step] / sum(found[name][step] for name in parts.values()) for step in steps]
    shares = {
        part: statistics.median(found[f"gemm_{part}"][step] / found[name][step] for step in steps)
        for part, name in parts.items()
    }
    same_engine, compiled = median.get("rlflow_transformers"), median.get("rlflow_compiled")
    trl = min((name for name in median if name.startswith("trl_")), key=median.__getitem__, default=None)
    return {
        "benchmark": "step",
        "workload": workload,
        "ratio_to_parts": statistics.median(to_parts),
        "ratio_to_parts_spread": [min(to_parts), max(to_parts)],
        "fastest_ways": {part: name.rpartition("_")[2] for part, name in parts.items()},
        "gemm_shares": shares,
        "gflops_of_gemm": median["gemm_rate"] / 1e9,
        "ms_of_engine_step": 1e3 * median["part_generate_vllm"] / median["engine_steps"],
        "ms_of_its_model": 1e3 * median["model_of_engine_steps"] / median["engine_steps"],
        "trl": trl,
        "ratio_to_trl": trl and median[trl] / median["rlflow_vllm"],
        "ratio_to_trl_compiled": trl and compiled and median[trl] / compiled,
        "ratio_to_trl_same_engine": trl and same_engine and median[trl] / same_engine,
        "median": median,
        "spread": {name: [min(values), max(values)] for name, values in found.items()},
        "steps": {name: len(values) for name, values in found.items()},
    }
