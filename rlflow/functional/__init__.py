"""The maths of algorithms as pure functions from tensors to tensors. They know nothing of ranks, models or configs.

`B` is the number of samples, and `T` is the number of tokens of the longest response. Tensors are `[B]` or `[B, T]`,
right-padded.
"""

from rlflow.functional.advantages import group_has_signal as group_has_signal
from rlflow.functional.advantages import group_normalized_advantages as group_normalized_advantages
from rlflow.functional.advantages import opo_advantages as opo_advantages
from rlflow.functional.advantages import rloo_advantages as rloo_advantages
from rlflow.functional.pass_at_k import bootstrap_interval as bootstrap_interval
from rlflow.functional.pass_at_k import pass_at_k as pass_at_k
from rlflow.functional.policy_gradient import KL as KL
from rlflow.functional.policy_gradient import Aggregation as Aggregation
from rlflow.functional.policy_gradient import Bounds as Bounds
from rlflow.functional.policy_gradient import Clip as Clip
from rlflow.functional.policy_gradient import Episodes as Episodes
from rlflow.functional.policy_gradient import Importance as Importance
from rlflow.functional.policy_gradient import ImportanceLevel as ImportanceLevel
from rlflow.functional.policy_gradient import ImportanceMode as ImportanceMode
from rlflow.functional.policy_gradient import KLEstimator as KLEstimator
from rlflow.functional.policy_gradient import aggregate as aggregate
from rlflow.functional.policy_gradient import expected_logprobs as expected_logprobs
from rlflow.functional.policy_gradient import importance_dropped as importance_dropped
from rlflow.functional.policy_gradient import importance_weights as importance_weights
from rlflow.functional.policy_gradient import kl_estimate as kl_estimate
from rlflow.functional.policy_gradient import log_ratio as log_ratio
from rlflow.functional.policy_gradient import loss_count as loss_count
from rlflow.functional.policy_gradient import loss_sum as loss_sum
from rlflow.functional.policy_gradient import loss_weights as loss_weights
from rlflow.functional.policy_gradient import policy_objective as policy_objective
from rlflow.functional.policy_gradient import ppo_clip_loss as ppo_clip_loss
from rlflow.functional.policy_gradient import ppo_is_clipped as ppo_is_clipped
from rlflow.functional.policy_gradient import tokens_of as tokens_of
from rlflow.functional.preference import bradley_terry_loss as bradley_terry_loss
from rlflow.functional.preference import dpo_loss as dpo_loss
from rlflow.functional.preference import kto_loss as kto_loss
from rlflow.functional.preference import preference_accuracy as preference_accuracy
from rlflow.functional.preference import simpo_loss as simpo_loss
from rlflow.functional.quantiles import quantiles as quantiles
from rlflow.functional.returns import at_turns as at_turns
from rlflow.functional.returns import gae as gae
from rlflow.functional.returns import last_token_rewards as last_token_rewards
from rlflow.functional.returns import overlong_penalty as overlong_penalty
from rlflow.functional.returns import overlong_tokens as overlong_tokens
from rlflow.functional.returns import reinforce_returns as reinforce_returns
from rlflow.functional.returns import rewards_to_go as rewards_to_go
from rlflow.functional.returns import subtree_rewards as subtree_rewards
from rlflow.functional.returns import value_loss as value_loss
from rlflow.functional.shapes import broadcast_to_tokens as broadcast_to_tokens
from rlflow.functional.surrogates import cispo_loss as cispo_loss
from rlflow.functional.surrogates import cpgd_drift as cpgd_drift
from rlflow.functional.surrogates import cpgd_loss as cpgd_loss
from rlflow.functional.surrogates import dppo_tv_mask as dppo_tv_mask
from rlflow.functional.surrogates import gmpo_loss as gmpo_loss
from rlflow.functional.surrogates import gspo_is_clipped as gspo_is_clipped
from rlflow.functional.surrogates import gspo_loss as gspo_loss
from rlflow.functional.surrogates import off_policy_sequence_mask as off_policy_sequence_mask
from rlflow.functional.surrogates import sapo_loss as sapo_loss
from rlflow.functional.whitening import merge_moments as merge_moments
from rlflow.functional.whitening import row_moments as row_moments
from rlflow.functional.whitening import standardize as standardize
