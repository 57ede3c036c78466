"""Diagnoses of `rlflow conform` for verl's functions: the table of docs/conform.md.

    pip install --no-deps --target /tmp/verl -r requirements/verl.txt
    PYTHONPATH=/tmp/verl python -m benchmarks.verl_losses

The functions are called as they are; those that ask for verl's own `ActorConfig` are given one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import verl
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.utils.torch_functional import masked_whiten
from verl.workers.config import ActorConfig

from rlflow.commands.conform import lines
from rlflow.conform.diagnosis import Kind, conform


def configured(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of verl with its own configuration, as one function of tensors."""

    def of_tensors(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        clip_low: float,
        clip_high: float,
    ) -> Tensor:
        clip = {"clip_ratio_low": clip_low, "clip_ratio_high": clip_high}
        config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **clip)
        found: Tensor = loss(old_log_prob, log_prob, advantages, response_mask, config=config)[0]
        return found

    return of_tensors


EXAMINED: tuple[tuple[str, Kind, str, dict[str, Any]], ...] = (
    ("compute_policy_loss_vanilla", "loss", "grpo", {}),
    ("compute_policy_loss_gspo", "loss", "gspo", {}),
    ("compute_policy_loss_cispo", "loss", "cispo", {}),
    ("compute_policy_loss_sapo", "loss", "sapo", {}),
    ("compute_policy_loss_geo_mean", "loss", "gmpo", {}),
    ("compute_grpo_outcome_advantage", "advantages", "grpo", {}),
    ("compute_grpo_vectorized_outcome_advantage", "advantages", "grpo", {}),
    ("compute_rloo_outcome_advantage", "advantages", "rloo", {}),
    ("compute_rloo_vectorized_outcome_advantage", "advantages", "rloo", {}),
    ("compute_opo_outcome_advantage", "advantages", "opo", {}),
    ("compute_gae_advantage_return", "advantages", "ppo", {}),
    ("compute_reinforce_plus_plus_outcome_advantage", "advantages", "reinforce_plus_plus", {}),
    *(
        ("agg_loss", "aggregation", "grpo", {"settings": {"loss_agg_mode": mode}, "micro": "sum", "ranks": "mean"})
        for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
    ),
)


def main() -> None:
    """Print what is said of each function."""
    print(f"verl {verl.__version__}, torch {torch.__version__}")
    for name, kind, algorithm, options in EXAMINED:
        function = getattr(core_algos, name)
        of_config = name.removeprefix("compute_policy_loss_") in ("gspo", "cispo", "sapo")
        found = conform(kind, configured(function) if of_config else function, algorithm, name=name, **options)
        setting = f" {options['settings']['loss_agg_mode']}" if options else ""
        print("\n".join([f"{name}{setting} compared with {algorithm}", *lines(found)]))
    print("\n".join(["masked_whiten", *lines(conform("normalization", masked_whiten))]))


if __name__ == "__main__":
    main()
