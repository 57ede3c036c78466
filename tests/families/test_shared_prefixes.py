"""Every family's rows that share prefixes have the numbers of the same rows packed whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlflow import CausalLM, LoRA
from rlflow.models.handle import ForwardPlan
from rlflow.models.moe import MoE
from rlflow.testing.derivative import wide_casts
from tests.families.models import FAMILIES, STATEFUL
from tests.forks import forked_rows
from tests.slow import slow_but
from tests.strategies.reference import distance

Family = Callable[[str], Path]
MOE = ("qwen3_moe", "mixtral", "gpt_oss")
SHARING = [name for name in FAMILIES if name not in STATEFUL]
ROWS = forked_rows()
NOISE = torch.randn(3, *ROWS.response_ids.shape, generator=torch.Generator().manual_seed(1))


def outcome(folder: Path, dtype: torch.dtype, shares: bool, **settings: object) -> tuple[Tensor, dict[str, Tensor]]:
    """Logprobs and entropies `[2, B, T]`, and the gradient of a clipped loss, of entropy and of routers."""
    handle = CausalLM(str(folder), temperature=0.7, **settings)  # type: ignore[arg-type]
    model = handle.load(folder, dtype, torch.device("cpu"))
    handle.attach(model, ForwardPlan(share_prefixes=shares))
    line = handle.plan.model_input(ROWS)
    assert (line.prefixes is not None) == shares
    with handle.training():
        logprobs, entropy = handle.score(ROWS)
        routed, _, _ = handle.take_routed()
    old, advantages, weights = NOISE.to(logprobs.dtype)
    ratio = (logprobs - (logprobs.detach() + 0.3 * old)).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) + 0.1 * weights * entropy
    loss = loss.masked_fill(torch.arange(loss.shape[1]) >= ROWS.lengths[:, None], 0).sum()
    (loss if routed is None else loss + routed).backward()
    gradient = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(part is not None for part in gradient.values())
    return torch.stack([logprobs, entropy]).detach(), gradient  # type: ignore[return-value]


@pytest.mark.parametrize("name", slow_but(("gemma2", "gpt_oss"), SHARING))
@pytest.mark.parametrize("way", slow_but(("plain",), ("plain", "checkpointing", "lora")))
def test_in_float64_they_are_equal(name: str, way: str, family: Family) -> None:
    settings: dict[str, object] = {
        "plain": {"moe": MoE(router_aux_loss_coef=0.1)} if name in MOE else {},
        "checkpointing": {"gradient_checkpointing": True},
        "lora": {"lora": LoRA(4)},
    }[way]
    with wide_casts():
        (values, gradient), (whole, expected) = (
            outcome(family(name), torch.float64, shares, **settings) for shares in (True, False)
        )
    torch.testing.assert_close(values, whole, rtol=0, atol=1e-10)
    assert distance(gradient, expected) < 1e-10


@pytest.mark.parametrize("name", slow_but(("qwen2",), SHARING))
def test_with_transformers_casts_to_float32_they_are_equal_to_1e6(name: str, family: Family) -> None:
    (values, gradient), (whole, expected) = (outcome(family(name), torch.float64, shares) for shares in (True, False))
    torch.testing.assert_close(values, whole, rtol=0, atol=1e-6)
    assert distance(gradient, expected) < 1e-6


@pytest.mark.parametrize("name", slow_but(("qwen3_moe",), SHARING))
def test_in_float32_they_are_equal_to_its_precision(name: str, family: Family) -> None:
    (values, gradient), (whole, expected) = (outcome(family(name), torch.float32, shares) for shares in (True, False))
    torch.testing.assert_close(values, whole, rtol=0, atol=1e-5)
    assert distance(gradient, expected) < 1e-5


@pytest.mark.parametrize("name", slow_but(("qwen2",), SHARING))
def test_bfloat16_is_no_farther_from_float32_than_whole_rows_are(name: str, family: Family) -> None:
    values, gradient = outcome(family(name), torch.float32, False)
    far = [outcome(family(name), torch.bfloat16, shares) for shares in (True, False)]
    shared, whole = (float((found - values).abs().mean()) for found, _ in far)
    assert shared < 1.1 * whole
    shared, whole = (distance(found, gradient) for _, found in far)
    assert shared < 1.1 * whole
