"""Host copies of device tensors that the host reads to count and cut rows: tokens, lengths, masks.

A transfer between host and device makes the host wait until the device has finished its work. So the host keeps a copy
of such a tensor when it sends the tensor to a device. Rows are taken from tensor and copy alike. A tensor that came
from another rank is copied to the host once, together with others. For a tensor on the CPU the copy is the tensor
itself.

A copy is no longer used after it, or its tensor, was changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

_NAME = "_rlflow_host_copy"  # name of the attribute that holds copy and versions


def on_host(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, copied to the host at most once; it must not be changed."""
    if tensor.is_inference():  # it has no version counter, so a change would not be seen
        return tensor.cpu()
    bring_over([tensor])
    copy: Tensor = tensor if tensor.device.type == "cpu" else getattr(tensor, _NAME)[0]
    return copy


def bring_over(tensors: Iterable[Tensor]) -> None:
    """Copy to the host all tensors that have no copy there yet, in one transfer for each device."""
    lacking: dict[torch.device, dict[int, Tensor]] = {}
    for tensor in tensors:
        if not is_on_host(tensor) and not tensor.is_inference():
            lacking.setdefault(tensor.device, {})[id(tensor)] = tensor
    for of_device in lacking.values():
        parts = list(of_device.values())
        flat = [part.detach().contiguous().view(-1).view(torch.uint8) for part in parts]
        arrived = torch.cat(flat).cpu().split([part.nbytes for part in parts])
        for part, copy in zip(parts, arrived, strict=True):
            remember(part, copy.clone().view(part.dtype).view(part.shape))


def is_on_host(tensor: Tensor) -> bool:
    """Whether the host has the tensor's numbers and need not wait for the device."""
    if tensor.device.type == "cpu":
        return True
    copy, *versions = getattr(tensor, _NAME, (None, None, None))
    return copy is not None and versions == [tensor._version, copy._version]


def remember(tensor: Tensor, copy: Tensor) -> Tensor:
    """Remember `copy` as the copy of `tensor` on the host, and return `tensor`."""
    if tensor.device.type != "cpu" and not tensor.is_inference() and not copy.is_inference():
        setattr(tensor, _NAME, (copy, tensor._version, copy._version))
    return tensor


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; the host does not wait, and keeps a copy of a tensor that is not floating point.

    Args:
        tensor: Tensor in memory that is not pinned: the driver has read it when this returns.
        device: Device to send it to.
    """
    if tensor.device.type != "cpu":
        return tensor.to(device)
    moved = tensor.to(device, non_blocking=True)
    return moved if tensor.is_floating_point() else remember(moved, tensor)


def computed(make: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`make(*tensors)`. Where the host has all of the tensors, it computes the result as well, to have a copy of it."""
    made = make(*tensors)
    if made.device.type != "cpu" and all(map(is_on_host, tensors)):
        remember(made, make(*map(on_host, tensors)))
    return made


def joined(parts: Sequence[Tensor]) -> Tensor:
    """`torch.cat(parts)`."""
    return computed(lambda *each: torch.cat(each), *parts)


def rows_at(tensor: Tensor, index: Tensor) -> Tensor:
    """`tensor[index]`.

    Args:
        tensor: `[B, ...]`.
        index: `[K]` int64, on any device.
    """
    return computed(lambda of, at: of[at], tensor, on_device(index, tensor.device))
