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
from rlflow.algorithms.policy_gradient import Clipped
from rlflow.controller.training import Training
from rlflow.models import packing
from rlflow.models.causal_lm import CausalLM
from rlflow.models.packing import ModelInput
from rlflow.module import RLModule
from rlflow.rollout import TransformersEngine
from rlflow.strategies import SingleProcess

STEP = "tests/exactness/test_algorithms.py::test_in_float64_without_deepspeed_the_step_is_the_reference"
GRPO_STEP, PPO_STEP = f"{STEP}[GRPO-small packed]", f"{STEP}[PPO-small packed]"
SEVERAL_IN_A_LINE = f"{STEP}[GRPO-large packed]"
UPDATES = "tests/exactness/test_several_updates.py::test_in_float64_every_update_is_the_reference_s"
GRPO_UPDATES = f"{UPDATES}[GRPO-by the policy itself]"


@dataclass(frozen=True)
class Fault:
    """Something wrong, as somebody might write it.

    Attributes:
        what: The mistake, in the words of the page.
        plant: Puts it in this process.
        test: The test that must notice, as pytest takes it.
        lesson: The config of a training whose gates must notice too; None where the test says enough.
    """

    what: str
    plant: Callable[[], None]
    test: str
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
    """A fault that calls `change(old, self, *arguments)` in the place of a method that is not a node."""
    old = getattr(owner, name)
    return lambda: setattr(owner, name, lambda self, *arguments, **options: change(old, self, *arguments, **options))


def wrong_values(move: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """GAE reads other values than those of its tokens."""
    return around(functional.gae, lambda old, r, v, *more, **named: old(r, move(v), *more, **named))


def _cut_groups(old: Callable[..., Tensor], rewards: Tensor, group: Tensor, *more: Any, **named: Any) -> Tensor:
    same = group[:, None] == group
    place, size = same.tril(-1).sum(dim=1), same.sum(dim=1)
    return old(rewards, 2 * group + (2 * place >= size), *more, **named)


def _one_late(mask: Tensor) -> Tensor:
    return mask.roll(1, dims=1) if mask.dim() == 2 else mask


def _without_first(mask: Tensor) -> Tensor:
    return mask & (torch.arange(mask.shape[1]) > 0) if mask.dim() == 2 else mask


def _reference_follows(old: Callable[..., float], strategy: SingleProcess, name: str, role: Any, most: float) -> float:
    norm = old(strategy, name, role, most)
    if name == "actor" and "reference" in strategy.roles:
        strategy.roles["reference"].model.load_state_dict(role.model.state_dict())
    return norm


def _one_line(old: Callable[..., ModelInput], *given: Any) -> ModelInput:
    packed = old(*given)
    return replace(packed, position_ids=torch.arange(packed.position_ids.numel())[None])


def _joined(old: Callable[..., ModelInput], *given: Any) -> ModelInput:
    packed = old(*given)
    total = packed.input_ids.numel()
    return replace(packed, cu_seqlens=torch.tensor([0, total], dtype=torch.int32), max_seqlen=total)


def _current_as_old() -> None:
    old = Clipped.surrogate

    def surrogate(self: Clipped, logprobs: Tensor, old_logprobs: Tensor, *more: Tensor) -> Tensor:
        return old(self, logprobs, logprobs.detach(), *more)

    Clipped.surrogate = surrogate


def _half_counted(old: Callable[..., Any], *given: Any) -> tuple[int, ...]:
    total, *others = old(*given)
    return (total // 2, *others)


_LOADED: set[int] = set()


def _first_weights(old: Callable[..., None], engine: TransformersEngine, weights: Any) -> None:
    if id(engine) not in _LOADED:
        old(engine, weights)
    _LOADED.add(id(engine))
    for _ in weights:  # the rest are received, and dropped
        pass


def _smaller(old: Callable[..., Tensor], v: Tensor, before: Tensor, returns: Tensor, *clip: Any) -> Tensor:
    return torch.minimum(old(v, before, returns, None), old(v, before, returns, *clip))


def _whiten_all(old: Callable[..., Tensor], module: RLModule, x: Tensor, mask: Tensor, *more: Any) -> Tensor:
    return old(module, x, torch.ones_like(mask), *more)


FAULTS = {
    "values-shifted": Fault(
        "GAE reads, for each token, the value of the token before it",
        wrong_values(lambda v: v.roll(1, dims=1)),
        PPO_STEP,
    ),
    "values-shuffled": Fault(
        "GAE reads the values of another sample",
        wrong_values(lambda v: v.roll(1, dims=0)),
        PPO_STEP,
        "ppo",
    ),
    "sign-flipped": Fault(
        "advantages have the wrong sign",
        around(functional.group_normalized_advantages, lambda old, *given, **named: -old(*given, **named)),
        GRPO_STEP,
        "grpo",
    ),
    "mask-shifted": Fault(
        "the mask of the loss is shifted by one token",
        around(rlflow.controller.training._mask, lambda old, *a, **o: _one_late(old(*a, **o))),
        GRPO_STEP,
    ),
    "mask-short": Fault(
        "the first token of a response is not trained on",
        around(rlflow.controller.training._mask, lambda old, *a, **o: _without_first(old(*a, **o))),
        GRPO_STEP,
    ),
    "group-cut": Fault(
        "each group is split into two groups",
        around(functional.group_normalized_advantages, _cut_groups),
        "tests/functional/test_advantages.py::test_group_normalized_advantages_are_those_of_grpo",
    ),
    "importance-inverted": Fault(
        "the importance weight is rollout / old instead of old / rollout",
        around(
            functional.importance_weights, lambda old, o, rollout, *more, **options: old(rollout, o, *more, **options)
        ),
        "tests/functional/test_importance.py::test_weights_of_tokens_take_the_log_ratio_of_each_token",
    ),
    "reference-trains": Fault(
        "the reference gets the actor's weights after each update",
        in_method(SingleProcess, "_update", _reference_follows),
        "tests/controller/test_roles.py::test_a_reference_stays_what_it_was_at_the_start",
        "grpo_kl",
    ),
    "positions-go-on": Fault(
        "position ids do not start at 0 in each packed sequence, but continue from the previous one",
        around(packing.pack, _one_line),
        "tests/models/test_packing.py::test_packed_rows_follow_one_another_without_their_last_tokens",
    ),
    "sequences-joined": Fault(
        "packed sequences attend to the sequences before them in the line",
        around(packing.pack, _joined),
        SEVERAL_IN_A_LINE,
    ),
    "old-is-current": Fault(
        "the ratio's denominator is the policy in training, so the ratio is always 1",
        _current_as_old,
        GRPO_UPDATES,
    ),
    "whitened-with-padding": Fault(
        "the mean and the standard deviation of whitening include padding",
        in_method(RLModule, "whiten", _whiten_all),
        PPO_STEP,
    ),
    "lam-for-gamma": Fault(
        "GAE swaps gamma and lambda",
        around(functional.gae, lambda old, r, v, m, gamma, lam, *more: old(r, v, m, lam, gamma, *more)),
        "tests/functional/test_returns.py::test_gae_is_that_of_the_paper",
    ),
    "rewards-shuffled": Fault(
        "each sample gets the reward of the sample before it",
        in_method(RLModule, "reward_function", lambda old, *given: old(*given).roll(1)),
        GRPO_STEP,
    ),
    "temperature-forgotten": Fault(
        "the trainer's logprobs are computed without the temperature",
        in_method(CausalLM, "_forward_pass", lambda old, model, rows, _, *more, **o: old(model, rows, 1.0, *more, **o)),
        GRPO_STEP,
    ),
    "denominator-wrong": Fault(
        "the loss is divided by half of the number of tokens",
        in_method(Training, "_agree", _half_counted),
        GRPO_STEP,
    ),
    "engine-stale": Fault(
        "the engine ignores all weights that it receives after the first sync",
        in_method(TransformersEngine, "_load", _first_weights),
        "tests/rollout/test_partial_responses.py::test_each_token_has_the_version_and_logprob_of_the_weights_that_made_it",
    ),
    "kl-sign": Fault(
        "the KL estimate swaps policy and reference",
        around(functional.kl_estimate, lambda old, p, q, *more, **options: old(q, p, *more, **options)),
        "tests/functional/test_kl.py::test_estimators_have_the_known_values",
    ),
    "clip-inverted": Fault(
        "the clipped objective of the policy is the larger of its two terms, not the smaller",
        around(functional.ppo_clip_loss, lambda old, p, o, a, *clips, **named: -old(p, o, -a, *clips, **named)),
        "tests/functional/test_policy_losses.py::test_the_clip_is_one_sided",
    ),
    "value-clip-inverted": Fault(
        "the clipped value loss is the smaller of its two squared errors, not the larger",
        around(functional.value_loss, _smaller),
        "tests/functional/test_value_losses.py::test_a_value_that_moved_far_towards_its_target_has_no_gradient",
    ),
}


if __name__ == "__main__":
    main()
