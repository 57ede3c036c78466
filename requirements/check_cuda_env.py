"""Checks an environment made from cuda.lock, on a machine that may have no GPU: run by its own Python.

    .venv-cuda/bin/python requirements/check_cuda_env.py        (`make cuda-env` installs it, and runs this)

Versions are those of the lock, and torch's and vLLM's builds are for CUDA; no requirement is broken; every package of
the lock is imported, and those that need NVIDIA's driver are listed with what they say; `rlflow` answers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution, packages_distributions, version
from pathlib import Path

FOLDER = Path(__file__).parent
CUDA = "13.0"
# Loaded one by one, each in a process of its own: what training and generating use, and what they load late.
COMPILED = [
    "deepspeed.ops.adam",
    "deepspeed.runtime.zero.stage3",
    "flashinfer.decode",
    "torch.cuda.nccl",
    "torch.nn.attention.varlen",
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.cumem_allocator",
    "vllm.device_allocator.cumem",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.flashinfer",
    "vllm.v1.worker.gpu_worker",
]
DRIVER = ("libcuda.so", "libnvidia-ml.so", "NVIDIA driver", "No CUDA GPUs", "Found no NVIDIA", "CUDA driver")


def main() -> None:
    """Print what was seen; exit with 1 if anything is wrong that no driver would mend."""
    pins = dict(
        line.split("==")
        for line in (FOLDER / "cuda.lock").read_text().splitlines()
        if line and not line.lstrip().startswith("#")
    )
    problems = [f"{name} is {version(name)}, the lock has {pin}" for name, pin in pins.items() if differs(name, pin)]
    print(f"{len(pins)} packages, {len(problems)} of another version")
    built_for = said("import torch; print(torch.version.cuda, *torch.cuda.get_arch_list())")[1].split()
    print(f"torch {version('torch')}, for CUDA {built_for[0]} and {' '.join(built_for[1:])}")
    if built_for[0] != CUDA:
        problems.append(f"torch is built for CUDA {built_for[0]}, not {CUDA}")
    broken = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    # oss-harmony, which vLLM names, has the module of openai-harmony.
    lacks = [line for line in broken.stdout.splitlines() if "requires openai-harmony, which is not" not in line]
    print(f"pip check: {lacks[-1] if lacks else 'No broken requirements found.'}")
    if broken.returncode and lacks:
        problems.append("requirements are broken")
    modules = sorted({*modules_of(pins), *COMPILED})
    needing = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        imports = list(pool.map(said, (f"import {module}" for module in modules)))
    for module, (code, words) in zip(modules, imports, strict=True):
        if code == 0:
            continue
        lines = words.splitlines() or [f"exit code {code}"]
        naming = [line.strip() for line in lines if any(mark in line for mark in DRIVER)]
        if naming:
            needing[module] = naming[-1]
        else:
            problems.append(f"{module} cannot be imported: {lines[-1]}")
    print(f"{len(modules)} modules, {len(modules) - len(needing)} imported; these need NVIDIA's driver:")
    for module, reason in needing.items():
        print(f"  {module}: {reason}")
    rlflow = str(Path(sys.executable).with_name("rlflow"))
    for command in (["--help"], ["graph", "--config", str(FOLDER.parent / "configs" / "grpo_math_8gpu.yaml")]):
        ran = subprocess.run([rlflow, *command], capture_output=True, text=True, cwd=FOLDER.parent)
        lines = (ran.stdout if ran.returncode == 0 else ran.stderr).strip().splitlines()
        print(f"rlflow {command[0]}: exit code {ran.returncode}, {len(lines)} lines")
        if ran.returncode:
            problems.append(f"rlflow {command[0]}: {lines[-1]}")
    for problem in problems:
        print(f"wrong: {problem}")
    sys.exit(1 if problems else 0)


def differs(name: str, pin: str) -> bool:
    """Whether another version is installed; `+cu130` names a build, not a version."""
    return version(name).split("+")[0] != pin.split("+")[0]


def modules_of(pins: dict[str, str]) -> list[str]:
    """The importable names of the lock's packages, one of each package: the first that holds Python code."""
    names: dict[str, list[str]] = {}
    for module, packages in packages_distributions().items():
        for package in packages:
            names.setdefault(package.lower().replace("_", "-"), []).append(module)
    found = []
    for name in pins:
        files = [str(file) for file in distribution(name).files or ()]
        for module in sorted(names.get(name, [])):
            code = any(file == f"{module}.py" or file == f"{module}/__init__.py" for file in files)
            if code and module.isidentifier() and not module.startswith("_"):
                found.append(module)
                break
    return found


def said(code: str) -> tuple[int, str]:
    """Run Python code in a process of its own: its exit code, and what it printed, errors after the rest."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    return ran.returncode, (ran.stdout + (ran.stderr if ran.returncode else "")).strip()


if __name__ == "__main__":
    main()
