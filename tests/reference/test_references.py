"""The references and the pure functions against each other and against closed forms."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from rlflow.functional import (
    Importance,
    aggregate,
    group_normalized_advantages,
    importance_weights,
    kl_estimate,
    ppo_clip_loss,
)
from tests.reference.policy_float64 import Folders, Objective, Sample, policy_update
from tests.reference.sft_float64 import Example, sft_update
from tests.reference.update import Step, Update, load_float64

VOCABULARY = 23


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("policy"), seed=0)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("reference"), seed=1)


def write_model(folder: Path, seed: int) -> Path:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,  # far from uniform predictions
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def ragged_samples() -> list[Sample]:
    """Three groups of unequal size, mixed; off policy; one response has a hole in its mask and one no token at all."""
    draw = random.Random(0)
    samples = []
    for group in (5, 9, 5, 2, 9, 5, 2, 9, 9):
        length = draw.randint(1, 9)
        samples.append(
            Sample(
                prompt_ids=draw.choices(range(VOCABULARY), k=2 + group % 4),
                response_ids=draw.choices(range(VOCABULARY), k=length),
                reward=draw.choice([0.0, 0.3, 1.0]),
                group=group,
                rollout_logprobs=[draw.uniform(-6, -1) for _ in range(length)],
                old_logprobs=[draw.uniform(-6, -1) for _ in range(length)],
            )
        )
    samples[3] = dataclasses.replace(samples[3], loss_mask=[False] * len(samples[3].response_ids))
    hole = [position != 1 for position in range(len(samples[8].response_ids))]
    samples[8] = dataclasses.replace(samples[8], loss_mask=hole)
    return samples


def on_policy(samples: list[Sample]) -> list[Sample]:
    return [dataclasses.replace(s, old_logprobs=None, rollout_logprobs=None) for s in samples]


def padded(rows: list[Any], fill: float = 0) -> Tensor:
    width = max(len(row) for row in rows)
    dtype = torch.float64 if isinstance(fill, float) else torch.int64
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype)


def padded_logprobs(model: PreTrainedModel, samples: list[Sample], temperature: float) -> Tensor:
    """`[B, T]` from one forward of the whole batch, prompts padded on the left and responses on the right."""
    prompts, responses = [list(s.prompt_ids) for s in samples], [list(s.response_ids) for s in samples]
    P, T = max(map(len, prompts)), max(map(len, responses))
    ids = torch.tensor(
        [[*[0] * (P - len(p)), *p, *r, *[0] * (T - len(r))] for p, r in zip(prompts, responses, strict=True)]
    )
    attend = torch.tensor(
        [
            [*[0] * (P - len(p)), *[1] * (len(p) + len(r)), *[0] * (T - len(r))]
            for p, r in zip(prompts, responses, strict=True)
        ]
    )
    positions = (attend.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=attend, position_ids=positions, use_cache=False).logits
    scored = (logits[:, P - 1 : -1] / temperature).log_softmax(dim=-1)
    return scored.gather(2, ids[:, P:, None]).squeeze(2)


def functional_gradient(
    policy: Path, reference: Path, samples: list[Sample], objective: Objective
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of the same update, by the pure functions on one padded batch."""
    model = load_float64(policy)
    mask = padded([[int(m) for m in s.mask] for s in samples]).bool()
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    group = torch.tensor([s.group for s in samples])
    advantages = group_normalized_advantages(rewards, group, objective.advantages == "grpo", objective.eps)
    logprobs = padded_logprobs(model, samples, objective.temperature)
    old, weights = logprobs.detach(), torch.ones_like(logprobs)
    if samples[0].old_logprobs is not None:
        old = padded([s.old_logprobs for s in samples], 0.0)
        rollout = padded([s.rollout_logprobs for s in samples], 0.0)
        weights = importance_weights(old, rollout, mask, Importance(high=objective.importance_high))
    loss = weights * ppo_clip_loss(
        logprobs, old, advantages[:, None], objective.clip_low, objective.clip_high, objective.dual_clip
    )
    if objective.kl_coef:
        with torch.no_grad():
            ref = padded_logprobs(load_float64(reference), samples, objective.temperature)
        loss = loss + objective.kl_coef * kl_estimate(logprobs, ref, objective.kl_kind)  # type: ignore[arg-type]
    total = aggregate(loss, mask, objective.loss_aggregation, objective.max_response_length)  # type: ignore[arg-type]
    total.backward()
    return total.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(update: Update, loss: float, gradient: dict[str, Tensor], tolerance: float) -> None:
    """The norm of the difference over all parameters, relative to the gradient's."""
    assert_close(loss, update.loss, rtol=tolerance, atol=tolerance)
    assert gradient.keys() == update.gradient.keys()
    difference = sum((gradient[name] - update.gradient[name]).square().sum() for name in gradient)
    assert torch.as_tensor(difference).sqrt().item() <= tolerance * update.gradient_norm


@pytest.mark.parametrize(
    "objective",
    [
        Objective(),
        Objective(clip_low=0.1, clip_high=0.28, dual_clip=3.0, loss_aggregation="sequence-mean-token-mean"),
        Objective(advantages="dr_grpo", loss_aggregation="constant", max_response_length=12, temperature=0.7),
        Objective(kl_coef=0.1, kl_kind="k1", loss_aggregation="sequence-mean-token-sum"),
        Objective(kl_coef=0.1, kl_kind="k2", importance_high=1.1),
        Objective(kl_coef=0.1, kl_kind="k3", temperature=1.3),
    ],
    ids=["plain", "dual-clip", "dr-grpo", "k1", "k2", "k3"],
)
@pytest.mark.parametrize("samples", [ragged_samples(), on_policy(ragged_samples())], ids=["off-policy", "on-policy"])
def test_the_pure_functions_on_a_padded_batch_give_the_update_of_the_reference(
    policy: Path, reference: Path, samples: list[Sample], objective: Objective
) -> None:
    update = policy_update(policy, samples, objective, folders=Folders(reference=reference))
    assert_same(update, *functional_gradient(policy, reference, samples, objective), tolerance=1e-10)


def test_the_loss_on_policy_is_known_without_a_model(policy: Path) -> None:
    # The ratio is 1, so the loss is minus the mean advantage of tokens: advantages +-1/sqrt(2) of 1 and 3 tokens.
    samples = [Sample([1], [2], 1.0, 0), Sample([1], [3, 4, 5], 0.0, 0)]
    update = policy_update(policy, samples, Objective(eps=0.0))
    assert_close(update.loss, -(0.5**0.5) * (1 - 3) / 4, rtol=1e-14, atol=0)


def test_equal_rewards_have_a_gradient_of_exactly_zero(policy: Path) -> None:
    samples = [dataclasses.replace(s, reward=0.7) for s in on_policy(ragged_samples())]
    assert policy_update(policy, samples).gradient_norm == 0.0


def test_the_gradient_of_sft_is_the_slope_of_its_loss(policy: Path, tmp_path: Path) -> None:
    examples = [Example(s.prompt_ids, s.response_ids, s.mask) for s in ragged_samples()]
    update = sft_update(policy, examples)
    losses = []
    for h in (1e-3, -1e-3):
        model = load_float64(policy)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight += h * update.gradient[name] / update.gradient_norm
        model.save_pretrained(tmp_path / str(h))
        losses.append(sft_update(tmp_path / str(h), examples).loss)
    assert_close((losses[0] - losses[1]) / 2e-3, update.gradient_norm, rtol=1e-4, atol=0)


def test_sft_agrees_with_the_loss_that_transformers_computes(policy: Path) -> None:
    examples = [Example([1, 2, 3], [4, 5, 6, 0])]
    model = load_float64(policy)
    labels = torch.tensor([[-100, -100, -100, 4, 5, 6, 0]])
    loss = model(input_ids=torch.tensor([[1, 2, 3, 4, 5, 6, 0]]), labels=labels).loss
    assert_close(sft_update(policy, examples).loss, loss.item(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("clipping", [0.0, 0.01, 1e6])
def test_the_steps_are_those_of_torch_optim(policy: Path, clipping: float) -> None:
    step = Step(lr=0.05, gradient_clipping=clipping, weight_decay=0.1, eps=1e-6)
    update = sft_update(policy, [Example([1, 2], [3, 4, 0])], step=step)
    for optimizer_of, expected in (
        (lambda p: torch.optim.SGD(p, lr=0.05), update.after_sgd),
        (lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1, eps=1e-6), update.after_adamw),
    ):
        model = load_float64(policy)
        for name, weight in model.named_parameters():
            weight.grad = update.gradient[name].clone()
        if clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer_of(model.parameters()).step()
        for name, weight in model.named_parameters():
            assert_close(weight.detach(), expected[name], rtol=1e-12, atol=1e-15)


def test_tied_weights_have_one_name(policy: Path) -> None:
    names = sft_update(policy, [Example([1], [2])]).gradient
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
