"""Requirements of this machine's GPUs, checked before anything is loaded onto them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from rlflow.errors import UserError

DRIVERS = {12: "525", 13: "580"}  # the oldest NVIDIA driver of each major version of CUDA; it runs all of its minors

FLASH_ATTENTION = (8, 0)  # the lowest compute capability that torch's kernel of packed rows is for


def require_accelerator(accelerator: str) -> None:
    """Refuse a driver that is older than torch's CUDA: `auto` would then mean the CPU.

    Args:
        accelerator: `cpu`, `cuda` or `auto`.

    Raises:
        UserError: There is a driver, and it is too old; or `cuda` is asked for, and there is no GPU.
    """
    if accelerator == "cpu":
        return
    driver, built_for = cuda_of_driver(), torch.version.cuda
    if driver is not None and built_for is not None and driver[0] < int(built_for.split(".")[0]):
        major = int(built_for.split(".")[0])
        needs = f"which needs driver {DRIVERS[major]} or newer" if major in DRIVERS else "which needs a newer one"
        raise UserError(
            f"the NVIDIA driver of this machine is one for CUDA {driver[0]}.{driver[1]}, and torch {torch.__version__}"
            f" was built for CUDA {built_for}, {needs};"
            " install a newer driver, or set `trainer.accelerator: cpu`"
        )
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"`trainer.accelerator` is 'cuda', and torch {torch.__version__} finds no CUDA GPU here; set `cpu`, or"
            " install a build of torch for CUDA on a machine with a GPU (`make setup LOCK=cuda`)"
        )


def accelerators(accelerator: str) -> int:
    """The number of processes of a machine that uses all of its accelerators: its GPUs, or 1 on the CPU.

    Args:
        accelerator: `cpu`, `cuda` or `auto`.
    """
    return 1 if accelerator == "cpu" else max(1, torch.cuda.device_count())


def cuda_of_driver() -> tuple[int, int] | None:
    """The newest CUDA that the installed NVIDIA driver runs, such as (13, 0); None without a driver that says so."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0:  # needs no GPU to be set up
        return None
    return version.value // 1000, version.value % 1000 // 10


def require_known_gpu(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a GPU for which torch's build has no kernels; vLLM's build is for the same GPUs.

    Args:
        device: Device of this rank.
        dtype: Dtype of forward passes; packed ones of 16 bits are by flash attention, and every model is tried by one
            when it is loaded, with `packing: false` too.

    Raises:
        UserError: It is such a GPU.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return
    capability, known = torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()
    found = f"{device} is a {torch.cuda.get_device_name(device)} of compute capability {capability[0]}.{capability[1]}"
    if not runs_on(capability, known):
        raise UserError(
            f"{found}, and torch {torch.__version__} was built for {' '.join(known)}; install builds that know this"
            " GPU, or choose another by CUDA_VISIBLE_DEVICES"
        )
    if dtype in (torch.bfloat16, torch.float16) and capability < FLASH_ATTENTION:
        raise UserError(
            f"{found}, and rows are packed in {str(dtype).removeprefix('torch.')}, by flash attention, which needs"
            f" {FLASH_ATTENTION[0]}.{FLASH_ATTENTION[1]}; set `strategy.init_args.precision: fp32`"
        )


def runs_on(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Whether a GPU runs code that was built for these architectures.

    Machine code (`sm_80`) runs on its own major version from its minor on, code of one GPU (`sm_90a`) on that alone;
    PTX (`compute_120`) runs on all later ones.

    Args:
        capability: Major and minor version of the GPU.
        built_for: Architectures as `torch.cuda.get_arch_list` returns them.
    """
    for architecture in built_for:
        kind, _, number = architecture.partition("_")
        built = int(number.rstrip("af")[:-1]), int(number.rstrip("af")[-1])
        same = built[0] == capability[0] or kind == "compute"
        if built == capability or (not number.endswith("a") and same and built <= capability):
            return True
    return False
