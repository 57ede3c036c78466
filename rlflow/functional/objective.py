"""What a policy descends: its surrogate, weighed for the engine's gap, with entropy and divergence."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rlflow.functional.importance import Importance


def policy_objective(
    surrogate: Tensor,
    entropy: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    log: Callable[[str, Tensor, Tensor], None],
    importance: Importance | None = None,
    entropy_coef: float = 0.0,
    divergence: Callable[[], Tensor] | None = None,
    kl_coef: float = 0.0,
) -> Tensor:
    """`w_t surrogate_t + kl_coef KL_t - entropy_coef H_t`, with w the importance weights of old over rollout.

    Args:
        surrogate: `[B, T]`, or `[B]` of whole sequences: the mean over a sequence's tokens is then the sequence's.
        entropy: `[B, T]` of the policy.
        old_logprobs: `[B, T]` of the policy at the start of the step.
        rollout_logprobs: `[B, T]` of the engine when it sampled.
        mask: `[B, T]`, True on tokens that count.
        log: Is given `actor/entropy`, `actor/kl` and `actor/importance_dropped`, each with the mask.
        importance: Correction for the gap between the two logprobs; None is off.
        entropy_coef: Weight of the entropy bonus.
        divergence: Makes the KL from the reference, `[B, T]`; None where there is no reference.
        kl_coef: Its weight; 0 where it is logged alone.

    Returns:
        `[B, T]`.
    """
    loss = surrogate[:, None].expand_as(entropy) if surrogate.dim() == 1 else surrogate
    if importance is not None:
        loss = loss * importance.weights(old_logprobs, rollout_logprobs, mask)
        log("actor/importance_dropped", importance.dropped(old_logprobs, rollout_logprobs, mask), mask)
    log("actor/entropy", entropy.detach(), mask)
    if entropy_coef != 0:
        loss = loss - entropy_coef * entropy
    if divergence is None:
        return loss
    kl = divergence()
    log("actor/kl", kl.detach(), mask)
    return loss if kl_coef == 0 else loss + kl_coef * kl
