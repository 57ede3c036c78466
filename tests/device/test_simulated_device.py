"""The simulated device behaves as CUDA does, as far as its tests rely on it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import RankPool

MIXES: dict[str, Callable[[Any, Any], object]] = {  # of a tensor there and one here, `[3]` each
    "stack": lambda there, here: torch.stack([there.sum(), here.sum()]),  # of no dimension, and refused all the same
    "cat": lambda there, here: torch.cat([there, here]),
    "sum": lambda there, here: there + here,
    "in place": lambda there, here: here.add_(there),
    "matmul": lambda there, here: there @ here,
    "where": lambda there, here: torch.where(there > 0, there, here),
    "written to": lambda there, here: here.__setitem__(slice(None), there.sum() * here),
    "index": lambda there, here: here[(there > 0).nonzero()[:, 0]],
    "value of an index": lambda there, here: there.index_put_((torch.arange(3),), here),
    "scatter": lambda there, here: there.scatter_add(0, torch.arange(3), here),
    "searchsorted": lambda there, here: torch.searchsorted(there, here),
    "linear": lambda there, here: nn.functional.linear(there, here[None]),
    "out": lambda there, here: torch.cumsum(there, 0, out=here),
}
NUMBERS: dict[str, Callable[[Any, Any], object]] = {  # which CUDA takes, with a tensor here of no dimension
    "sum": lambda there, here: there + here,
    "where": lambda there, here: torch.where(there > 0, there, here),
    "fill": lambda there, here: there.fill_(here),
    "masked fill": lambda there, here: there.masked_fill(there > 0, here),
    "in place": lambda there, here: there.mul_(here),
}
WAITS: dict[str, tuple[int, Callable[[Any, Any], object]]] = {  # how often the host waits
    "item": (1, lambda there, here: there.sum().item()),
    "bool": (1, lambda there, here: bool(there.any())),
    "tolist": (1, lambda there, here: there.tolist()),
    "to the CPU": (1, lambda there, here: there.cpu()),
    "by a mask": (1, lambda there, here: there[there > 0]),
    "nonzero": (1, lambda there, here: there.nonzero()),
    "unique": (1, lambda there, here: there.unique()),
    "repeats": (1, lambda there, here: there.repeat_interleave(there.long())),
    "repeats of a known sum": (0, lambda there, here: there.repeat_interleave(there.long(), output_size=6)),
    "an index on the CPU": (1, lambda there, here: there[torch.tensor([0, 2])]),
    "from the CPU": (1, lambda there, here: here.to(there.device)),
    "a new tensor": (1, lambda there, here: torch.tensor([1.0], device=there.device)),
    "from the CPU, not blocking": (0, lambda there, here: here.to(there.device, non_blocking=True)),
    "arithmetic": (0, lambda there, here: (there * 2.0 + 1.0).clamp(min=0.5).softmax(0).sum()),
    "a number written": (0, lambda there, here: there.__setitem__(1, 5.0)),
    "factories": (0, lambda there, here: torch.arange(4, device=there.device) + there.new_zeros(4)),
}


def _refused(name: str) -> str:
    from tests.device.simulated_device import DEVICE

    there, here = torch.tensor([1.0, 2.0, 3.0], device=DEVICE), torch.ones(3)
    try:
        MIXES[name](there, here)
    except RuntimeError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize("name", MIXES)
def test_mixing_with_a_tensor_of_the_cpu_is_refused(name: str, device1: RankPool) -> None:
    (told,) = device1.run(_refused, name)
    assert told.startswith("Expected all tensors to be on the same device, but found at least two devices"), told


def _of_number(name: str) -> list[float]:
    from tests.device.simulated_device import DEVICE, Elsewhere

    found: Any = NUMBERS[name](torch.tensor([1.0, 2.0, 3.0], device=DEVICE), torch.tensor(4.0))
    assert type(found) is Elsewhere
    numbers: list[float] = found.tolist()
    return numbers


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_on_the_cpu_is_taken_where_cuda_takes_it(name: str, device1: RankPool) -> None:
    expected: Any = NUMBERS[name](torch.tensor([1.0, 2.0, 3.0]), torch.tensor(4.0))
    assert device1.run(_of_number, name) == [expected.tolist()]


def _waited(name: str) -> int:
    from tests.device.simulated_device import DEVICE, waits

    there = torch.tensor([1.0, 2.0, 3.0], device=DEVICE)
    with waits() as counted:
        WAITS[name][1](there, torch.ones(3))
    return counted.total()


@pytest.mark.parametrize("name", WAITS)
def test_the_host_waits_as_often_as_for_cuda(name: str, device1: RankPool) -> None:
    assert device1.run(_waited, name) == [WAITS[name][0]]


def _trained(device: str) -> list[list[float]]:
    """The weights of a model after three steps of AdamW, its first and last weight tied."""
    from tests.device import simulated_device

    assert simulated_device.NAME == "elsewhere"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model = copy.deepcopy(model.to(device))
    assert model[2].weight is model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    data = torch.arange(8.0).view(2, 4).to(device)
    for _ in range(3):
        model(data).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def test_a_model_trains_there_as_on_the_cpu(device1: RankPool) -> None:
    for there, here in zip(*(device1.run(_trained, device)[0] for device in ("elsewhere", "cpu")), strict=True):
        assert there == pytest.approx(here, abs=1e-6)


def _gathered() -> tuple[bool, list[list[float]], int, str]:
    """The result of a gather, its device, how often the host waited, and the error of a mixed gather."""
    from rlflow.databuffer.transport import Transport
    from tests.device.simulated_device import DEVICE, waits

    mine = torch.full((3,), float(dist.get_rank()))
    with waits() as counted:
        gathered = Transport(DEVICE).all_gather(mine)
    there = Transport(DEVICE).all_gather(mine.to(DEVICE))
    told = ""
    try:
        dist.all_gather([torch.empty(3)] * 2, mine.to(DEVICE))
    except RuntimeError as error:
        told = str(error)
    return all(x.device == DEVICE for x in there), [x.tolist() for x in gathered], counted.total(), told


def test_collectives_run_there_and_what_they_bring_is_one_copy_to_the_host(device2: RankPool) -> None:
    for on_device, gathered, waited, told in device2.run(_gathered):
        assert on_device
        assert gathered == [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
        assert waited == 1  # not one a rank
        assert "at least two devices" in told
