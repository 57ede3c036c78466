"""The maths of algorithms as pure functions: tensors in, tensors out, nothing of ranks, models or configuration.

`B` is the number of samples, `T` the longest response among them; tensors are `[B]` or `[B, T]`, right-padded.
"""

from rlflow.functional.advantages import (
    group_has_signal,
    group_normalized_advantages,
    opo_advantages,
    rloo_advantages,
)
from rlflow.functional.aggregation import Aggregation, aggregate, loss_count, loss_sum, loss_weights
from rlflow.functional.clip import Bounds, Clip
from rlflow.functional.importance import (
    Importance,
    ImportanceLevel,
    ImportanceMode,
    importance_dropped,
    importance_weights,
)
from rlflow.functional.kl import KL, KLEstimator, kl_estimate
from rlflow.functional.objective import policy_objective
from rlflow.functional.pass_at_k import pass_at_k
from rlflow.functional.penalties import overlong_penalty, overlong_tokens
from rlflow.functional.policy_losses import (
    cispo_loss,
    cpgd_drift,
    cpgd_loss,
    gmpo_loss,
    gspo_is_clipped,
    gspo_loss,
    ppo_clip_loss,
    ppo_is_clipped,
)
from rlflow.functional.preference import bradley_terry_loss, dpo_loss, preference_accuracy
from rlflow.functional.quantiles import quantiles
from rlflow.functional.ratios import log_ratio
from rlflow.functional.returns import gae, last_token_rewards, reinforce_returns
from rlflow.functional.shapes import beside_tokens
from rlflow.functional.trust_regions import dppo_tv_mask, off_policy_sequence_mask, sapo_loss
from rlflow.functional.turns import at_turns, rewards_to_go
from rlflow.functional.value_losses import value_loss
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
