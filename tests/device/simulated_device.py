"""A simulated device: its tensors hold their numbers on the CPU and behave like a GPU's.

They refuse to mix with the CPU's where CUDA's refuse, and count where the host has to wait for the device. Importing
this changes torch for the whole process (`torch.accelerator` then names this device), so it is for processes of their
own: the tests here run in ranks that import it, and in no other. It has to come before the process's first backward
pass, at which autograd starts a thread for each device.

How: torch's own backend for Python gives a `torch.device` with a guard. `Elsewhere` is a wrapper on that device around
a plain tensor, `held`; every operation on one, and every factory asked for the device, comes to `_run`, which checks
the devices, counts, computes on what is held, and wraps what comes out. Autograd, gloo's collectives and whole models
work so, with nothing unwrapped.

Not modelled: `is_cuda` and what else depends on the name `cuda`, NCCL, streams and events, pinned memory, `resize_`,
`set_`, `.data =`, and waits within the kernels themselves: counts are a floor.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "elsewhere"
_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)
CPU = torch.device("cpu")

Where = tuple[str, str]  # the operation, and the line of rlflow that asked for it
_counted: list[Counter[Where]] = []

_aten = torch.ops.aten
_NEEDS_VALUES = {  # the host needs a value, or the size of the result
    _aten._local_scalar_dense, _aten._unique, _aten._unique2, _aten.allclose, _aten.bincount, _aten.equal,
    _aten.is_nonzero, _aten.item, _aten.masked_select, _aten.nonzero, _aten.repeat_interleave, _aten.unique_consecutive,
    _aten.unique_dim,
}  # fmt: skip
_BY_INDEX = {
    _aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index,
    _aten._unsafe_index_put,
}  # fmt: skip
_COPIES = {_aten.copy_, _aten._to_copy, _aten.copy, _aten._copy_from, _aten._copy_from_and_resize}
_TAKES_A_SCALAR = {_aten.masked_fill, _aten.masked_fill_, _aten.fill, _aten.fill_, _aten.where, _aten.lerp, _aten.lerp_}


@contextmanager
def waits() -> Iterator[Counter[Where]]:
    """Counts within it how often the host waits for the device.

    A copy from the CPU's pageable memory waits too, unless it is asked not to block.
    """
    found: Counter[Where] = Counter()
    _counted.append(found)
    try:
        yield found
    finally:
        _counted.remove(found)


class Elsewhere(Tensor):
    """A tensor of the device.

    Args:
        held: Numbers that it holds, on the CPU.
    """

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=DEVICE, layout=held.layout,
        )  # fmt: skip
        made.held = held
        return made

    def __init__(self, held: Tensor) -> None: ...

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Elsewhere({self.held!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        # Module.to then swaps parameters in place, so that tied ones stay tied.
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: object) -> Elsewhere:
        return Elsewhere(inner["held"])

    def tolist(self) -> Any:  # Tensor's own refuses subclasses
        return self.detach().cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """One operation as the device does it."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        result = func.decompose(*args, **kwargs)  # inference mode hands such operations over whole
        if result is not NotImplemented:
            return result
    packet = func.overloadpacket
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, Elsewhere)]
    here = [tensor for tensor in tensors if not isinstance(tensor, Elsewhere)]
    target = _target(packet, args, kwargs, there)
    if here and there and packet not in _COPIES:
        _refuse_mixing(func, packet, args, kwargs, here)
    _count(packet, args, kwargs, here, there, target)
    result = func(*_held(args), **_settings(kwargs))
    if target == CPU:
        return args[0] if packet is _aten.copy_ else result
    result = tree_map_only(Tensor, lambda x: x if isinstance(x, Elsewhere) else Elsewhere(x), result)
    if not there:
        return result
    result = return_and_correct_aliasing(func, args, kwargs, result)
    for tensor in there:
        if tensor.shape != tensor.held.shape:
            raise RuntimeError(f"{func} resizes {tuple(tensor.shape)} to {tuple(tensor.held.shape)}: not modelled")
    return result


def _target(packet: Any, args: Any, kwargs: Any, there: list[Elsewhere]) -> torch.device:
    """Device of the result."""
    if packet is _aten.copy_:
        return DEVICE if isinstance(args[0], Elsewhere) else CPU
    if kwargs.get("device") is None:
        return DEVICE if there else CPU
    return DEVICE if torch.device(kwargs["device"]).type == NAME else CPU


def _held(arguments: Any) -> Any:
    return tree_map_only(Elsewhere, lambda x: x.held, arguments)


def _settings(kwargs: Any) -> Any:
    """Keyword arguments as the CPU takes them."""
    settings = {name: value for name, value in _held(kwargs).items() if name != "pin_memory"}
    if settings.get("device") is not None:
        settings["device"] = CPU
    if settings.get("generator") is not None and settings["generator"].device.type != "cpu":
        settings["generator"] = None
    return settings


def _count(
    packet: Any, args: Any, kwargs: Any, here: list[Tensor], there: list[Elsewhere], target: torch.device
) -> None:
    if packet in _NEEDS_VALUES and there and kwargs.get("output_size") is None:
        _wait(packet.__name__)
    elif packet in _BY_INDEX and there:
        if any(isinstance(i, Elsewhere) and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
            _wait("index by a mask")  # but for `x[mask] = number`, which cannot be distinguished here
        if any(isinstance(i, Tensor) and not isinstance(i, Elsewhere) for i in args[1]):
            _wait("index on the CPU")  # copied first
    elif packet in (_aten._to_copy, _aten.copy_):
        blocks = not kwargs.get("non_blocking") and not (packet is _aten.copy_ and args[2:] == (True,))
        if there and target == CPU:
            _wait("copy to the CPU")
        elif here and target == DEVICE and blocks:
            _wait("copy from the CPU")


def _wait(operation: str) -> None:
    if _counted:
        where = operation, _line()
        for each in _counted:
            each[where] += 1


def _line() -> str:
    """The innermost line of rlflow's that is being run; of an engine that generates, just that it does."""
    frame, found = sys._getframe(1), ""
    while frame is not None:
        file = frame.f_code.co_filename
        if "/rlflow/" in file and "/site-packages/" not in file:
            place = file.rsplit("/rlflow/", 1)[1]
            if place.startswith("rollout/") and frame.f_code.co_name == "_generate":
                return "generating"
            found = found or f"{place}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return found or "elsewhere than in rlflow"


def _refuse_mixing(func: Any, packet: Any, args: Any, kwargs: Any, here: list[Tensor]) -> None:
    """Raise what CUDA raises, where CUDA raises it."""
    schema = func._schema.arguments
    named = [*zip(schema, args, strict=False), *((a, kwargs[a.name]) for a in schema if a.name in kwargs)]
    written = [x for a, x in named if a.alias_info is not None and a.alias_info.is_write and isinstance(x, Tensor)]
    if packet in _BY_INDEX:  # indices may be on the CPU, and a value of no dimension
        refused = [x for x in args[2:3] if isinstance(x, Tensor) and not isinstance(x, Elsewhere) and x.dim()]
        refused += [x for x in args[:1] if not isinstance(x, Elsewhere)]
    else:
        may_be_scalar = torch.Tag.pointwise in func.tags or packet in _TAKES_A_SCALAR
        refused = [x for x in here if x.dim() or not may_be_scalar]
    refused += [x for x in written if not isinstance(x, Elsewhere)]
    if refused:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE} and cpu!"
            f" ({func}, a tensor of shape {list(refused[0].shape)} on the CPU)"
        )


def _factory(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(func, args, kwargs)


_fallback = torch.library.Library("_", "IMPL")
_fallback.fallback(_factory, "PrivateUse1")

# torch.tensor calls the copies with the fallback switched off, and the other factories would resize their result.
_kernels = torch.library.Library("aten", "IMPL")
for _name in (
    "_to_copy", "copy_", "_copy_from", "arange", "arange.start", "arange.start_step", "linspace", "logspace", "eye",
    "eye.m", "randperm", "randperm.generator", "tril_indices", "triu_indices",
):  # fmt: skip
    _packet, _, _overload = _name.partition(".")
    _operation = getattr(getattr(_aten, _packet), _overload or "default")
    _kernels.impl(_name, lambda *args, _op=_operation, **kwargs: _run(_op, args, kwargs), "PrivateUse1")
