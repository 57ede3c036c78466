"""Faults that are planted to see which test or lesson notices them; the package itself has no code for them.

    python -m benchmarks.learning.faults values-shifted fit --config configs/learn/ppo.yaml
    python -m benchmarks.learning.faults values-shifted pytest -q tests/functional/test_returns.py

plants one in its own process, by putting other functions in the place of some, and runs the command or the tests there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

# All that faults are planted in is imported first, so that each name of a function is found.
import rlflow.algorithms
import rlflow.controller.training
import rlflow.trainer
from rlflow import functional
from rlflow.algorithms import PolicyGradient
from rlflow.models import packing
from rlflow.models.packing import ModelInput
from rlflow.module import RLModule
from rlflow.strategies import SingleProcess

ALGORITHM = "tests/exactness/test_algorithms.py::test_in_float64_without_deepspeed_the_step_is_the_reference"
SAMPLED = "tests/exactness/test_algorithms.py::test_a_step_by_the_policy_that_sampled_is_the_reference"


@dataclass(frozen=True)
class Fault:
    """Something wrong, as somebody might write it.

    Attributes:
        what: What is wrong, as the page says it.
        plant: Puts it in this process.
        test: The test that notices, as pytest takes it: a file or a test, then options.
        lesson: The config of a training whose gates must notice too; None where the test says enough.
    """

    what: str
    plant: Callable[[], None]
    test: tuple[str, ...]
    lesson: str | None = None


def main() -> None:
    """Plant a fault, and run something."""
    name, tool, *arguments = sys.argv[1:]
    FAULTS[name].plant()
    if tool == "pytest":
        import pytest

        sys.exit(pytest.main(arguments))
    from rlflow.cli import main as command

    command([tool, *arguments])


def exchange(old: object, new: object) -> None:
    """Put `new` where any module has `old` under some name."""
    places = [
        (module, name)
        for module in list(sys.modules.values())
        for name, value in list(vars(module).items() if hasattr(module, "__dict__") else ())
        if value is old
    ]
    assert places, old
    for module, name in places:
        setattr(module, name, new)


def around(old: Callable[..., Any], change: Callable[..., Any]) -> Callable[[], None]:
    """A fault that calls `change(old, *arguments)` in the place of a function."""

    def plant() -> None:
        exchange(old, lambda *arguments, **options: change(old, *arguments, **options))

    return plant


def in_method(owner: type, name: str, change: Callable[..., Any]) -> Callable[[], None]:
    """A fault that calls `change(old, self, *arguments)` in the place of a method that is no node."""
    old = getattr(owner, name)
    return lambda: setattr(owner, name, lambda self, *arguments, **options: change(old, self, *arguments, **options))


def wrong_values(move: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """GAE reads other values than those of its tokens."""
    return around(functional.gae, lambda old, r, v, *more: old(r, move(v), *more))


def _cut_groups(old: Callable[..., Tensor], rewards: Tensor, group: Tensor, *more: Any) -> Tensor:
    place = torch.stack([(group[:i] == group[i]).sum() for i in range(len(group))])  # in its group
    size = torch.stack([(group == each).sum() for each in group])
    return old(rewards, 2 * group + (2 * place >= size), *more)


def _shifted_mask(old: Callable[..., Tensor], mask: Tensor, *more: Any) -> Tensor:
    return old(mask.roll(1, dims=1) if mask.dim() == 2 else mask, *more)


def _without_first(mask: Tensor) -> Tensor:
    return mask & (torch.arange(mask.shape[1]) > 0) if mask.dim() == 2 else mask


def _reference_follows(old: Callable[..., float], strategy: SingleProcess, name: str, role: Any) -> float:
    norm = old(strategy, name, role)
    if name == "actor" and "reference" in strategy._roles:
        strategy._roles["reference"].model.load_state_dict(role.model.state_dict())
    return norm


def _one_line(old: Callable[..., ModelInput], rows: Any) -> ModelInput:
    packed = old(rows)
    return replace(packed, position_ids=torch.arange(packed.position_ids.numel())[None])


def _joined(old: Callable[..., ModelInput], rows: Any) -> ModelInput:
    packed = old(rows)
    total = packed.input_ids.numel()
    return replace(packed, cu_seqlens=torch.tensor([0, total], dtype=torch.int32), max_seqlen=total)


def _current_as_old() -> None:
    old = PolicyGradient.surrogate

    def surrogate(self: PolicyGradient, logprobs: Tensor, old_logprobs: Tensor, *more: Tensor) -> Tensor:
        return old(self, logprobs, logprobs.detach(), *more)

    PolicyGradient.surrogate = surrogate


def _whiten_all(old: Callable[..., Tensor], module: RLModule, x: Tensor, mask: Tensor, *more: Any) -> Tensor:
    return old(module, x, torch.ones_like(mask), *more)


FAULTS = {
    "values-shifted": Fault(
        "GAE reads the value of the token before",
        wrong_values(lambda v: v.roll(1, dims=1)),
        (f"{ALGORITHM}", "-k", "PPO"),
        "ppo",
    ),
    "values-shuffled": Fault(
        "GAE reads the values of another sample",
        wrong_values(lambda v: v.roll(1, dims=0)),
        (f"{ALGORITHM}", "-k", "PPO"),
        "ppo",
    ),
    "sign-flipped": Fault(
        "advantages have the wrong sign",
        around(functional.group_normalized_advantages, lambda old, *given: -old(*given)),
        (f"{ALGORITHM}", "-k", "GRPO"),
        "grpo",
    ),
    "mask-shifted": Fault(
        "the loss's mask lies one token late",
        around(functional.loss_weights, _shifted_mask),
        ("tests/functional/test_aggregation.py",),
    ),
    "mask-short": Fault(
        "the first token of a response is not trained on",
        around(rlflow.controller.training._mask, lambda old, *a, **o: _without_first(old(*a, **o))),
        (f"{ALGORITHM}", "-k", "GRPO"),
    ),
    "group-cut": Fault(
        "a group is cut in two",
        around(functional.group_normalized_advantages, _cut_groups),
        ("tests/functional/test_advantages.py",),
    ),
    "importance-inverted": Fault(
        "the importance weight is that of rollout over old",
        around(
            functional.importance_weights, lambda old, o, rollout, *more, **options: old(rollout, o, *more, **options)
        ),
        ("tests/functional/test_importance.py",),
    ),
    "reference-trains": Fault(
        "the reference gets the actor's weights after each update",
        in_method(SingleProcess, "_update", _reference_follows),
        ("tests/exactness/test_several_updates.py::test_in_float64_every_update_is_the_reference_s", "-k", "GRPO"),
        "grpo_kl",
    ),
    "positions-go-on": Fault(
        "position ids go on from one packed sequence to the next",
        around(packing.pack, _one_line),
        ("tests/models/test_packing.py",),
    ),
    "sequences-joined": Fault(
        "packed sequences attend to those before them",
        around(packing.pack, _joined),
        (f"{ALGORITHM}", "-k", "GRPO"),
    ),
    "old-is-current": Fault(
        "the ratio is taken to the policy in training, so it is always 1",
        _current_as_old,
        ("tests/exactness/test_several_updates.py::test_in_float64_every_update_is_the_reference_s", "-k", "GRPO"),
        "grpo",
    ),
    "whitened-with-padding": Fault(
        "padding counts when advantages are whitened",
        in_method(RLModule, "whiten", _whiten_all),
        (f"{ALGORITHM}", "-k", "PPO"),
    ),
    "lam-for-gamma": Fault(
        "GAE takes gamma and lambda for one another",
        around(functional.gae, lambda old, r, v, m, gamma, lam, *more: old(r, v, m, lam, gamma, *more)),
        ("tests/functional/test_returns.py",),
    ),
    "kl-sign": Fault(
        "the divergence takes the reference for the policy",
        around(functional.kl_estimate, lambda old, p, q, *more, **options: old(q, p, *more, **options)),
        ("tests/functional/test_kl.py",),
    ),
    "clip-inverted": Fault(
        "the clipped loss takes the larger of the two",
        around(functional.ppo_clip_loss, lambda old, p, o, a, *clips: -old(p, o, -a, *clips)),
        ("tests/functional/test_policy_losses.py",),
    ),
    "value-clip-inverted": Fault(
        "the clipped value loss takes the smaller of the two",
        around(functional.value_loss, lambda old, v, o, r, clip: torch.minimum(old(v, o, r, None), old(v, o, r, clip))),
        ("tests/functional/test_value_losses.py",),
    ),
}


if __name__ == "__main__":
    main()
