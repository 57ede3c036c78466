"""Which engine generates with which policy, as configured; nothing of it is built."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rlflow.dag.tasks import rank_ranges
from rlflow.errors import UserError, did_you_mean
from rlflow.models.architecture import architecture_difference
from rlflow.rollout.engine import RolloutEngine
from rlflow.values.layout import Layout

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Share:
    """Instead of an engine of its own, a policy's share of another policy's.

    Attributes:
        share: The other policy, which has an engine of its own.
        by: How they share it. `turns`: it holds the weights of one of them at a time, and changes by a weight sync.
    """

    share: str
    by: Literal["turns", "adapters"] = "turns"


@dataclass(frozen=True)
class EngineSettings:
    """What a config says of engines, before it is known which policies generate.

    Attributes:
        rollout: Each policy's engine.
        exceptions: By policy, other engines, or shares of another policy's.
    """

    rollout: RolloutEngine
    exceptions: Mapping[str, RolloutEngine | Share] = field(default_factory=dict)

    def check_installed(self) -> None:
        """Refuse to begin without a library that generates.

        Raises:
            UserError: One is not installed.
        """
        for engine in (self.rollout, *self.exceptions.values()):
            if isinstance(engine, RolloutEngine):
                engine.check_installed()

    def assigned(self, policies: Sequence[str]) -> Engines:
        """Give each policy its engine. The first that uses `rollout` gets it as it is, others copies.

        Args:
            policies: All that generate, the first one first.

        Raises:
            UserError: An exception is of no policy, or shares with one that has no engine of its own.
        """
        for policy, exception in self.exceptions.items():
            _require_policy(f"engines.{policy}", policy, policies)
            if isinstance(exception, Share):
                _check_share(policy, exception, policies, self.exceptions)
        own: dict[str, RolloutEngine] = {}
        for policy in policies:
            engine = self.exceptions.get(policy, self.rollout)
            if isinstance(engine, RolloutEngine):
                taken = any(engine is other for other in own.values())
                own[policy] = copy.deepcopy(engine) if taken else engine
        shared = {policy: of.share for policy, of in self.exceptions.items() if isinstance(of, Share)}
        return Engines(own, shared)


@dataclass(frozen=True)
class Engines:
    """The engine of each policy of a run, as configured.

    Attributes:
        own: Engines by the policy that each belongs to, in the order of the policies; no two are one object.
        shared: Of each policy without an engine of its own, the policy whose engine it uses in turns.
    """

    own: Mapping[str, RolloutEngine]
    shared: Mapping[str, str]

    def __getitem__(self, policy: str) -> RolloutEngine:
        """What generates with `policy`, as configured."""
        return self.own[self.owner(policy)]

    def owner(self, policy: str) -> str:
        """The policy to which the engine of `policy` belongs: itself, or the one that it shares with."""
        return self.shared.get(policy, policy)

    def users(self, owner: str) -> tuple[str, ...]:
        """Who generates with the engine of `owner`: it first."""
        return (owner, *(policy for policy, other in self.shared.items() if other == owner))

    def refuse_together(self, node: str, policies: Collection[str]) -> None:
        """Refuse a node that generates with policies of which only one at a time is in the engine.

        Raises:
            UserError: Two of them share an engine in turns.
        """
        seen: dict[str, str] = {}
        for policy in policies:
            first = seen.setdefault(self.owner(policy), policy)
            if first != policy:
                sharing = policy if policy in self.shared else first
                raise UserError(
                    f"node `{node}` generates with `{first}` and `{policy}`, which share an engine in turns, so one of"
                    f" them is in it while a node runs; leave out `engines.{sharing}`, or generate in a node for each"
                )

    def check_shared(self, configs: Mapping[str, PretrainedConfig], layouts: Mapping[str, Layout]) -> None:
        """Refuse policies that cannot share an engine, before a process starts.

        Args:
            configs: The transformers configuration of each policy's model.
            layouts: Where each policy generates.

        Raises:
            UserError: Two that share are of different architectures, or placed on different ranks.
        """
        for policy, owner in self.shared.items():
            if difference := architecture_difference(configs[owner], configs[policy]):
                raise UserError(
                    f"`engines.{policy}` shares the engine of `{owner}`, which is built for one architecture, and"
                    f" {difference}; leave `engines.{policy}` out for an engine of its own"
                )
            if layouts[policy].ranks != layouts[owner].ranks:
                raise UserError(
                    f"`engines.{policy}` shares the engine of `{owner}` on {rank_ranges(layouts[owner].ranks)}, and"
                    f" `placement` has it generate on {rank_ranges(layouts[policy].ranks)}; place both alike, or leave"
                    f" `engines.{policy}` out"
                )


def _require_policy(setting: str, policy: str, policies: Sequence[str]) -> None:
    if policy not in policies:
        known = ", ".join(policies) or "none"
        raise UserError(
            f"`{setting}` names {policy!r}, which is no policy that generates; those are {known}."
            f"{did_you_mean(policy, policies)}"
        )


def _check_share(
    policy: str, share: Share, policies: Sequence[str], exceptions: Mapping[str, RolloutEngine | Share]
) -> None:
    setting = f"engines.{policy}.share"
    if share.share == policy:
        raise UserError(f"`{setting}` is {policy!r}, the policy itself; name the policy whose engine it shall use")
    _require_policy(setting, share.share, policies)
    further = exceptions.get(share.share)
    if isinstance(further, Share):
        raise UserError(
            f"`{setting}` is {share.share!r}, which has no engine of its own and shares that of `{further.share}`; name"
            " a policy with an engine of its own"
        )
    if share.by == "adapters":
        raise UserError(
            f"`engines.{policy}.by` is 'adapters', and a weight sync brings whole weights, with adapters merged into"
            " them; set `by: turns`"
        )
