"""The engine of each policy: as configured, and on a rank, where policies may share an engine in turns."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from rlflow.dag.tasks import rank_ranges
from rlflow.databuffer.transport import Transport, from_message, to_message
from rlflow.errors import UserError, about, did_you_mean
from rlflow.models.architecture import architecture_difference
from rlflow.rollout.engine import (
    NO_VERSION,
    Completion,
    GenerationRequest,
    RankInfo,
    RolloutEngine,
    Sampling,
    SyncReport,
    WeightSyncError,
    picture_argument,
)
from rlflow.rollout.engine_subprocess import EngineSubprocess, free_address
from rlflow.values.layout import Layout
from rlflow.values.picture import Picture

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Share:
    """A policy's share of another policy's engine, in place of its own engine. The two policies take turns.

    The engine holds the weights of one policy at a time. A weight sync replaces them.

    Attributes:
        share: The other policy, which has its own engine.
    """

    share: str


@dataclass(frozen=True)
class EngineSettings:
    """The settings of engines in a config, before it is known which policies generate.

    Attributes:
        rollout: Each policy's engine.
        exceptions: Other engines, or shares of another policy's engine, by policy.
    """

    rollout: RolloutEngine
    exceptions: Mapping[str, RolloutEngine | Share] = field(default_factory=dict)

    def check_installed(self) -> None:
        """Refuse to begin if an engine's library is not installed.

        Raises:
            UserError: One is not installed.
        """
        for engine in (self.rollout, *self.exceptions.values()):
            if isinstance(engine, RolloutEngine):
                engine.check_installed()

    def assigned(self, policies: Sequence[str]) -> Engines:
        """Give each policy its engine. The first that uses `rollout` gets it as it is, others copies.

        Args:
            policies: Policies that generate, the first one first.

        Raises:
            UserError: An exception names no policy, or a share names a policy without its own engine.
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
        shared: Policy whose engine another policy uses in turns, by the policy without an engine of its own.
    """

    own: Mapping[str, RolloutEngine]
    shared: Mapping[str, str]

    def __getitem__(self, policy: str) -> RolloutEngine:
        """The engine of `policy`, as configured."""
        return self.own[self.owner(policy)]

    def owner(self, policy: str) -> str:
        """The policy that the engine of `policy` belongs to: itself, or the policy whose engine it shares."""
        return self.shared.get(policy, policy)

    def users(self, owner: str) -> tuple[str, ...]:
        """The policies that generate with the engine of `owner`, `owner` first."""
        return (owner, *(policy for policy, other in self.shared.items() if other == owner))

    def refuse_together(self, node: str, policies: Collection[str]) -> None:
        """Refuse a node that generates with policies that share an engine, since only one can use it at a time.

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
            layouts: Layout of each policy: the ranks that generate with it.

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
            f"`{setting}` names {policy!r}, which is not a policy that generates; those are {known}."
            f"{did_you_mean(policy, policies)}"
        )


def _check_share(
    policy: str, share: Share, policies: Sequence[str], exceptions: Mapping[str, RolloutEngine | Share]
) -> None:
    setting = f"engines.{policy}.share"
    if share.share == policy:
        raise UserError(f"`{setting}` is {policy!r}, the policy itself; name another policy, whose engine it uses")
    _require_policy(setting, share.share, policies)
    further = exceptions.get(share.share)
    if isinstance(further, Share):
        raise UserError(
            f"`{setting}` is {share.share!r}, which has no engine of its own and shares that of `{further.share}`; name"
            " a policy with an engine of its own"
        )


@dataclass(frozen=True)
class RankEngines:
    """The engines on one rank.

    Attributes:
        own: The engines themselves, by the policy that each belongs to; none where no engine is placed.
        by_policy: Engine that each policy that generates on this rank is synced to and generates with.
    """

    own: Mapping[str, RolloutEngine]
    by_policy: Mapping[str, RolloutEngine]

    def check_context(self, prompt: int, response: int) -> None:
        """Refuse lengths that an engine has no room for after its set-up.

        Args:
            prompt: Tokens of the longest prompt.
            response: Tokens of the longest response.

        Raises:
            UserError: They do not fit; names the settings.
        """
        for engine in self.own.values():
            with about(engine):
                engine.check_context(prompt, response)

    def close(self) -> None:
        """Free every engine."""
        for engine in self.own.values():
            engine.close()


def engines_of_rank(
    engines: Engines, layouts: Mapping[str, Layout], transport: Transport, on_cpu: bool, timeout_s: float
) -> RankEngines:
    """The engines on this rank.

    Args:
        engines: Engines of all policies, as configured.
        layouts: Layout of each policy: the ranks that generate with it.
        transport: Transport to the other ranks; has formed the groups of the ranks that share an engine.
        on_cpu: Whether they run on the CPU.
        timeout_s: Seconds that a wait for an engine's own process may take.
    """
    in_processes = policies_with_engine_processes(engines, layouts, transport.world_size, on_cpu)
    own: dict[str, RolloutEngine] = {}
    by_policy: dict[str, RolloutEngine] = {}
    for policy, engine in engines.own.items():
        if transport.rank not in layouts[policy].ranks:
            continue
        here = _in_a_process(engine, layouts[policy], transport, timeout_s) if policy in in_processes else engine
        own[policy] = by_policy[policy] = here
        if len(users := engines.users(policy)) > 1:
            turns: dict[str, TimeSharedEngine] = {}
            by_policy.update({user: TimeSharedEngine(user, here, turns) for user in users})
    return RankEngines(own, by_policy)


def policies_with_engine_processes(
    engines: Engines, layouts: Mapping[str, Layout], world_size: int, on_cpu: bool
) -> Sequence[str]:
    """The policies with engines in processes of their own, on all their ranks; the same list on every rank.

    Such an engine can only be built by all ranks together and is placed on some of them. Or it cannot be in one process
    with an engine named before it.

    Args:
        engines: Engines of all policies, as configured.
        layouts: Layout of each policy: the ranks that generate with it.
        world_size: Ranks of the run.
        on_cpu: Whether they run on the CPU.
    """
    in_processes: list[str] = []
    for policy, engine in engines.own.items():
        inside = [other for name, other in engines.own.items() if name not in in_processes]
        before = inside[: inside.index(engine)]
        on_some = engine.needs_all_ranks and len(layouts[policy].ranks) < world_size
        if on_some or not all(engine.shares_process(other, on_cpu) for other in before):
            in_processes.append(policy)
    return tuple(in_processes)


def _in_a_process(engine: RolloutEngine, layout: Layout, transport: Transport, timeout_s: float) -> RolloutEngine:
    """The engine in a process of its own; it joins the processes of the ranks that share the engine."""
    peers = layout.peers(layout.shard(transport.rank))
    address = to_message(free_address().encode()) if transport.rank == peers[0] else None
    received = transport.broadcast_bytes(address, peers[0], peers)
    return EngineSubprocess(
        engine,
        index=peers.index(transport.rank),
        size=len(peers),
        address=from_message(received).decode(),
        timeout_s=timeout_s,
    )


class TimeSharedEngine(RolloutEngine):
    """A policy's view of an engine that it shares with others: it notices only that they take turns.

    A sync of one policy ends the version of the others. `engine` is set up and closed once for all, and not by this.

    Args:
        policy: Name of the policy, for messages.
        engine: The shared engine.
        turns: Views of the engine by the name of their policy; this view is added.
    """

    def __init__(self, policy: str, engine: RolloutEngine, turns: dict[str, TimeSharedEngine]) -> None:
        self.tensor_parallel_size = engine.tensor_parallel_size
        self._policy = policy
        self._engine = engine
        self._turns = turns
        turns[policy] = self

    def setup(self, model_path: str, rank_info: RankInfo) -> None:
        raise AssertionError("a shared engine is set up by itself")

    def close(self) -> None:
        raise AssertionError("a shared engine is closed by itself")

    def memory_settings(self, on_cpu: bool) -> tuple[str, ...]:
        return self._engine.memory_settings(on_cpu)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        version: int,
        pictures: Sequence[Sequence[Picture]] = (),
    ) -> list[Completion]:
        self._check(version)
        return self._engine.generate(prompts, seeds, sampling, version, **picture_argument(pictures))

    def step(self, new: Mapping[int, GenerationRequest], sampling: Sampling, version: int) -> dict[int, Completion]:
        self._check(version)
        return self._engine.step(new, sampling, version)

    def completions(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        version: int,
        pictures: Sequence[Sequence[Picture]] = (),
    ) -> Iterator[tuple[int, Completion]]:
        self._check(version)
        return self._engine.completions(prompts, seeds, sampling, version, **picture_argument(pictures))

    def abort(self) -> None:
        self._engine.abort()

    def update_weights(self, buckets: Iterable[list[tuple[str, Tensor]]], version: int) -> SyncReport:
        for other in self._turns.values():  # what a sync leaves behind that fails midway is not a version of anyone
            other.policy_version = NO_VERSION
        report = self._engine.update_weights(buckets, version)
        self.policy_version = version
        return report

    def sleep(self, keep_weights: bool = False) -> None:
        """Give the engine's memory back, unless it is another policy's turn: then that policy's `sleep` does so."""
        if any(other.policy_version != NO_VERSION for other in self._turns.values() if other is not self):
            return
        super().sleep(keep_weights)
        self._engine.sleep(keep_weights)

    def wake_up(self) -> None:
        self._engine.wake_up()

    def _check(self, version: int) -> None:
        if version != self.policy_version:
            raise WeightSyncError(
                f"`{self._policy}` must generate with version {version} of its weights, and the engine that it shares"
                f" holds {self._held()}; sync the weights of `{self._policy}` first"
            )

    def _held(self) -> str:
        held = {policy: of.policy_version for policy, of in self._turns.items() if of.policy_version != NO_VERSION}
        return next((f"version {version} of `{policy}`" for policy, version in held.items()), "no version")
