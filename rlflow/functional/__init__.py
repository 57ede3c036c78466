"""The maths of algorithms as pure functions: tensors in, tensors out, nothing of ranks, models or configuration.

`B` is the number of samples, `T` the longest response among them; tensors are `[B]` or `[B, T]`, right-padded.
"""

from rlflow.functional.advantages import (
    group_has_signal,
    group_normalized_advantages,
    opo_advantages,
    rloo_advantages,
)
from rlflow.functional.pass_at_k import pass_at_k
from rlflow.functional.penalties import overlong_penalty, overlong_tokens
from rlflow.functional.policy_gradient import (
    KL,
    Aggregation,
    Bounds,
    Clip,
    Importance,
    ImportanceLevel,
    ImportanceMode,
    KLEstimator,
    aggregate,
    importance_dropped,
    importance_weights,
    kl_estimate,
    log_ratio,
    loss_count,
    loss_sum,
    loss_weights,
    policy_objective,
    ppo_clip_loss,
    ppo_is_clipped,
)
from rlflow.functional.preference import bradley_terry_loss, dpo_loss, preference_accuracy
from rlflow.functional.quantiles import quantiles
from rlflow.functional.returns import (
    at_turns,
    gae,
    last_token_rewards,
    reinforce_returns,
    rewards_to_go,
    value_loss,
)
from rlflow.functional.shapes import beside_tokens
from rlflow.functional.surrogates import (
    cispo_loss,
    cpgd_drift,
    cpgd_loss,
    dppo_tv_mask,
    gmpo_loss,
    gspo_is_clipped,
    gspo_loss,
    off_policy_sequence_mask,
    sapo_loss,
)
from rlflow.functional.whitening import merge_moments, moments, row_moments, standardize, whiten

__all__ = [
    "KL",
    "Aggregation",
    "Bounds",
    "Clip",
    "Importance",
    "ImportanceLevel",
    "ImportanceMode",
    "KLEstimator",
    "aggregate",
    "at_turns",
    "beside_tokens",
    "bradley_terry_loss",
    "cispo_loss",
    "cpgd_drift",
    "cpgd_loss",
    "dpo_loss",
    "dppo_tv_mask",
    "gae",
    "gmpo_loss",
    "group_has_signal",
    "group_normalized_advantages",
    "gspo_is_clipped",
    "gspo_loss",
    "importance_dropped",
    "importance_weights",
    "kl_estimate",
    "last_token_rewards",
    "log_ratio",
    "loss_count",
    "loss_sum",
    "loss_weights",
    "merge_moments",
    "moments",
    "off_policy_sequence_mask",
    "opo_advantages",
    "overlong_penalty",
    "overlong_tokens",
    "pass_at_k",
    "policy_objective",
    "ppo_clip_loss",
    "ppo_is_clipped",
    "preference_accuracy",
    "quantiles",
    "reinforce_returns",
    "rewards_to_go",
    "rloo_advantages",
    "row_moments",
    "sapo_loss",
    "standardize",
    "value_loss",
    "whiten",
]
