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
from tests.prefix_rows import forked_rows
from tests.slow import slow_but
from tests.strategies.reference import distance

Family = Callable[[str], Path]
MOE = ("qwen3_moe", "mixtral", "gpt_oss")
SHARING = [name for name in FAMILIES if name not in STATEFUL]


def outcome(
    folder: Path, dtype: torch.dtype, shares: bool, seed: int = 0, **settings: object
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logprobs and entropies `[2, B, T]`, and the gradient of a clipped loss, of entropy and of routers."""
    rows = forked_rows(seed=seed)
    noise = torch.randn(3, *rows.response_ids.shape, generator=torch.Generator().manual_seed(seed + 1))
    handle = CausalLM(str(folder), temperature=0.7, **settings)  # type: ignore[arg-type]
    model = handle.load(folder, dtype, torch.device("cpu"))
    handle.attach(model, ForwardPlan(share_prefixes=shares))
    line = handle.plan.model_input(rows)
    assert (line.prefixes is not None) == shares
    with handle.training():
        logprobs, entropy = handle.score(rows)
        routed, _, _ = handle.take_routed()
    old, advantages, weights = noise.to(logprobs.dtype)
    ratio = (logprobs - (logprobs.detach() + 0.3 * old)).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) + 0.1 * weights * entropy
    loss = loss.masked_fill(torch.arange(loss.shape[1]) >= rows.lengths[:, None], 0).sum()
    (loss if routed is None else loss + routed).backward()
    gradient = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(part is not None for part in gradient.values())
    return torch.stack([logprobs, entropy]).detach(), gradient  # type: ignore[return-value]


@pytest.mark.parametrize("name", slow_but(("gemma2", "gpt_oss"), SHARING))
@pytest.mark.parametrize("way", slow_but(("plain",), ("plain", "checkpointing", "lora")))
def test_in_float64_rows_that_share_prefixes_are_equal_to_whole_rows(name: str, way: str, family: Family) -> None:
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
def test_with_casts_of_transformers_to_float32_shared_prefixes_are_equal_to_1e6(name: str, family: Family) -> None:
    (values, gradient), (whole, expected) = (outcome(family(name), torch.float64, shares) for shares in (True, False))
    torch.testing.assert_close(values, whole, rtol=0, atol=1e-6)
    assert distance(gradient, expected) < 1e-6


@pytest.mark.parametrize("name", slow_but(("qwen3_moe",), SHARING))
def test_in_float32_rows_that_share_prefixes_are_whole_rows_up_to_rounding(name: str, family: Family) -> None:
    (values, gradient), (whole, expected) = (outcome(family(name), torch.float32, shares) for shares in (True, False))
    torch.testing.assert_close(values, whole, rtol=0, atol=1e-5)
    assert distance(gradient, expected) < 1e-5


@pytest.mark.parametrize("name", slow_but(("qwen2",), SHARING))
def test_bfloat16_is_at_most_as_far_from_float32_as_whole_rows_are(name: str, family: Family) -> None:
    # Sums in another order are rounded differently: single ratios are 0.94 to 1.05, and their means about 1.
    ratios = []
    for seed in range(4):
        values, gradient = outcome(family(name), torch.float32, False, seed)
        far = [outcome(family(name), torch.bfloat16, shares, seed) for shares in (True, False)]
        shared, whole = (torch.tensor([(own - values).abs().mean(), distance(of, gradient)]) for own, of in far)
        ratios.append(shared / whole)
    assert bool((torch.stack(ratios).mean(0) < 1.03).all()), ratios
