"""The numbers of a device's tensors that the host knows, and how often it waits for them."""

from __future__ import annotations

from typing import Any

import torch

from tests.ranks import RankPool


def _moved() -> Any:
    """A tensor on the device; the host has a copy of it."""
    from rlflow.values.host_copy import on_device
    from tests.device.simulated_device import DEVICE

    return on_device(torch.tensor([3, 1, 2]), DEVICE)


def _waits_of_what_went_there() -> tuple[int, list[list[int]]]:
    from rlflow.values.host_copy import joined, on_host, rows_at
    from tests.device.simulated_device import waits

    with waits() as counted:
        there = _moved()
        taken = rows_at(there, torch.tensor([2, 0]))
        both = joined([there, taken])
        found = [on_host(tensor).tolist() for tensor in (there, taken, both)]
    assert [tensor.cpu().tolist() for tensor in (there, taken, both)] == found
    return counted.total(), found


def test_numbers_copied_to_a_device_and_rows_of_them_are_known_without_a_wait(device1: RankPool) -> None:
    ((waited, found),) = device1.run(_waits_of_what_went_there)
    assert found == [[3, 1, 2], [2, 3], [3, 1, 2, 2, 3]]
    assert waited == 0


def _changed() -> list[list[int]]:
    from rlflow.values.host_copy import on_host, remember

    there, viewed, copied = _moved(), _moved(), _moved()
    there += 1
    viewed[1:].zero_()
    here = torch.tensor([3, 1, 2])
    remember(copied, here)
    here.zero_()
    return [on_host(tensor).tolist() for tensor in (there, viewed, copied)]


def test_a_tensor_that_changed_in_place_is_copied_to_the_host_again(device1: RankPool) -> None:
    assert device1.run(_changed) == [[[4, 2, 3], [3, 0, 0], [3, 1, 2]]]


def _brought_over() -> tuple[int, list[Any]]:
    from rlflow.values.host_copy import bring_over, on_host
    from tests.device.simulated_device import DEVICE, waits

    tensors = [
        torch.arange(6, device=DEVICE).view(2, 3).T,
        torch.ones(2, dtype=torch.bool, device=DEVICE),
        torch.zeros(0, 4, dtype=torch.int32, device=DEVICE),
        torch.full((), 2.5, dtype=torch.float64, device=DEVICE),
        torch.tensor([1.0]),
    ]
    with waits() as counted:
        bring_over(tensors)
        bring_over(tensors)
        found = [on_host(tensor) for tensor in tensors]
    assert all(here.dtype == there.dtype for here, there in zip(found, tensors, strict=True))
    return counted.total(), [tensor.tolist() for tensor in found]


def test_tensors_of_all_kinds_come_over_in_one_transfer(device1: RankPool) -> None:
    ((waited, found),) = device1.run(_brought_over)
    assert found == [[[0, 3], [1, 4], [2, 5]], [True, True], [], 2.5, [1.0]]
    assert waited == 1


def _inferred() -> list[list[int]]:
    from rlflow.values.host_copy import on_host

    with torch.inference_mode():
        there = _moved()
        first = on_host(there).tolist()
        there += 1
        return [first, on_host(there).tolist()]


def test_nothing_is_remembered_of_tensors_whose_changes_nobody_counts(device1: RankPool) -> None:
    assert device1.run(_inferred) == [[[3, 1, 2], [4, 2, 3]]]


def _memory_read_there() -> tuple[list[float], bool]:
    from rlflow.state.prompt_memory import PromptMemory
    from tests.device.simulated_device import DEVICE

    memory = PromptMemory()
    memory.learn(torch.tensor([1, 2, 2]), torch.tensor([4.0, 1.0, 3.0], dtype=torch.float64))
    read = [of(torch.tensor([2, 0], device=DEVICE)) for of in (memory.count, memory.mean, memory.std)]
    return [float(x[0].cpu()) for x in read], all(x.device == DEVICE for x in read)


def test_the_memory_of_prompts_answers_on_the_device_of_the_prompts(device1: RankPool) -> None:
    (((count, mean, std), is_there),) = device1.run(_memory_read_there)
    assert (count, mean) == (2, 2)  # of 1 and 3
    assert abs(std - 2**0.5) < 1e-15
    assert is_there
