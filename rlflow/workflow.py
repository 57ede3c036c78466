"""Workflows in YAML: a module without nodes of its own, a loss that a config can name, and the binding of nodes."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from jsonargparse import ArgumentParser

from rlflow.dag.methods import marks
from rlflow.dag.node import CUTS, MARK, Call, Mark, NodeConfig, names, node
from rlflow.dotted_path import object_at
from rlflow.errors import UserError, did_you_mean, one_line
from rlflow.functional import (
    KL,
    Aggregation,
    Clip,
    Importance,
    policy_objective,
    ppo_clip_loss,
    ppo_is_clipped,
)
from rlflow.models.causal_lm import CausalLM
from rlflow.module import RLModule, handles
from rlflow.rewards.weighted_sum import RewardLike
from rlflow.values.batch import Batch
from rlflow.values.column_kinds import PerSample, PerToken
from rlflow.values.protocols import Sampled
from rlflow.values.rollout import Rollout


@dataclass(eq=False)
class Workflow(RLModule):
    """A module without nodes and models of its own: `nodes` and `models` of the config are the algorithm.

    Args:
        reward: Reward that scores a response, for nodes that call `reward_function`.
        group_size: Responses to each prompt, which `generate` samples unless a node says otherwise.
        max_response_length: Tokens after which a response is cut.
        stop_token_ids: Tokens that end a response, in addition to those of the model and its tokenizer.
        mask_truncated: Leave responses that were cut out of losses; they stay in their group's baseline.
        loss_aggregation: Reduction of per-token losses to one number.
        max_draws: Batches of prompts that a filter draws at most to fill a step.
    """

    reward: RewardLike | None = None
    group_size: int = 1
    max_response_length: int = 256
    stop_token_ids: tuple[int, ...] = ()
    mask_truncated: bool = False
    loss_aggregation: Aggregation = "token-mean"
    max_draws: int = 10

    def generate(self, batch: Batch, n: int | None = None, temperature: float | None = None) -> Rollout:
        """Sample `n` responses to each prompt, `group_size` by default; see `RLModule.generate`."""
        return super().generate(batch, self.group_size if n is None else n, temperature)


@node(role="actor", type="train")
def policy_loss(
    self: RLModule,
    rollout: Sampled,
    advantages: PerSample | PerToken,
    old_logprobs: PerToken | None = None,
    ref_logprobs: PerToken | None = None,
    clip: Clip = Clip(),
    kl: KL = KL(),
    entropy_coef: float = 0.0,
    importance: Importance | None = Importance(),
) -> PerToken:
    """`w_t surrogate_t + kl.coef KL_t - entropy_coef H_t`, the loss of `rlflow.algorithms.PolicyGradient`, `[B, T]`.

    Args:
        self: The module; its `actor` is trained.
        rollout: The actor's samples.
        advantages: `[B]`, or `[B, T]`.
        old_logprobs: `[B, T]` of the policy at the start of the step. None to use those of the policy in training,
            which are the same if a step makes one update.
        ref_logprobs: `[B, T]` of the reference; None for no KL.
        clip: Range around 1 to which the ratio is clipped.
        kl: Weight and estimator of the divergence from the reference.
        entropy_coef: Weight of the entropy bonus.
        importance: Correction for the difference between rollout and training logprobs; None is off.
    """
    if kl.in_reward or kl.target is not None:
        raise UserError(
            "`kl` of `policy_loss` has `in_reward` or `target`, and this is KL in the loss; give `coef` and `kind`"
            " alone, or make a node of the rewards"
        )
    actor, mask, clips = handles(self)["actor"], rollout.loss_mask, (clip.low, clip.high, clip.dual)
    assert isinstance(actor, CausalLM)
    logprobs, entropy = actor.score(rollout)
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    self.log("actor/clip_fraction", ppo_is_clipped(logprobs, old, advantages, *clips), mask)
    loss, sampled = ppo_clip_loss(logprobs, old, advantages, *clips), rollout.logprobs
    settings = importance, kl.filled(in_reward=False, in_loss="k3-ratio"), entropy_coef
    return policy_objective(loss, logprobs, entropy, old, sampled, ref_logprobs, mask, self.log, *settings)


def bind(module: RLModule) -> None:
    """Give a module the nodes of its config, once it has its models: a call each, or None to remove one.

    Raises:
        UserError: The config names a node that cannot be, or a function that is not there or takes no such parameter.
    """
    declared, cls = marks(type(module)), type(module)
    for name, written in module.config_nodes.items():
        before = vars(module).get(name)
        if not name.isidentifier():
            raise UserError(f"`nodes.{name}` is not a name that a parameter can have; write letters, digits and _")
        if name not in declared and (name in dir(cls) or not isinstance(before, Call | None)):
            raise UserError(f"`nodes.{name}` has the name of something else of {cls.__name__}; rename it")
        if written is None and name not in declared:
            hint = did_you_mean(name, declared) or f" Its nodes are {', '.join(declared) or 'none'}."
            raise UserError(f"`nodes.{name}` is null, and {cls.__name__} has no node of that name to remove.{hint}")
        setattr(module, name, None if written is None else _call(module, name, written, declared.get(name)))


def _call(module: RLModule, name: str, written: NodeConfig | str, declared: Mark | None) -> Call:
    """The call of a node, which stands in the place of one of the class where that has a mark of this name."""
    config = NodeConfig(written) if isinstance(written, str) else written
    description = f"`nodes.{name}` calls {config.call}"
    function = _function(config.call, module, description)
    parameters = inspect.signature(function).parameters
    for given in (*config.inputs, *config.settings):
        if given not in parameters:
            hint = did_you_mean(given, parameters) or f" It takes {', '.join(parameters) or 'nothing'}."
            raise UserError(f"{description}, which has no parameter {given}.{hint}")
    settings = _settings(function, config.settings, f"`nodes.{name}.settings`")
    reads = {each: config.inputs.get(each, each) for each in parameters if each not in settings and each != "self"}
    bound = {"self": module} if "self" in parameters else {}
    mark = Mark(config.role, config.type, names(config.generates), names(config.uses))
    if mark == Mark():
        first = config.call.partition(".")[0]
        mark = getattr(function, MARK, None) or declared or Mark(role=first if first in handles(module) else None)
    returns = None if config.returns is None else CUTS[config.returns]
    return Call(function, mark, reads, settings | bound, frozenset(config.inputs), returns)


def _function(path: str, module: RLModule, description: str) -> Callable[..., Any]:
    """A method of the module (`generate`) or of one of its models (`actor.logprobs`), or a function by its path."""
    first, _, rest = path.partition(".")
    owner = handles(module).get(first) if rest else module
    function: Callable[..., Any]
    if owner is None:
        function = object_at(path, description, handles(module))
    elif (rest or first) in dir(type(owner)):
        function = getattr(owner, rest or first)
    else:
        hint = did_you_mean(rest or first, dir(type(owner))) or " Write a function of your own as file.function."
        raise UserError(f"{description}, and {type(owner).__name__} has no method {rest or first}.{hint}")
    if not inspect.isfunction(inspect.unwrap(getattr(function, "__func__", function))):
        raise UserError(f"{description}, and that is {function!r:.40}, no function of Python; name one that calls it")
    return function


def _settings(function: Callable[..., Any], written: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Settings converted to the types of the function's parameters."""
    parser = ArgumentParser(exit_on_error=False)
    try:
        hints = get_type_hints(function, include_extras=True)
        for name in written:
            parser.add_argument(f"--{name}", type=hints.get(name, Any))
        found = parser.instantiate(parser.parse_object(dict(written)))
    except Exception as error:  # jsonargparse lets some errors of its own through, and types are the user's own code
        raise UserError(f"{key}: {one_line(error)}") from error
    return {name: found[name] for name in written}
