"""Estimates of the memory that a rank's device needs while it loads and trains roles and generates responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlflow.dag.tasks import Exchange, RunNode, SyncWeights, rank_ranges
from rlflow.memory.role_bytes import LoadedRole
from rlflow.memory.workload import Engine, Workload
from rlflow.storage.space import in_bytes
from rlflow.values.layout import Layout


@dataclass(frozen=True)
class Memory:
    """The estimated bytes on the device of a rank; some ranks hold the same and share one estimate.

    Attributes:
        ranks: Ranks to which the estimate applies.
        roles: Models that have weights on such a rank, by role.
        engines: Engines that generate on such a rank, by policy.
        held: Bytes of the values of the step.
        capacity: Bytes of the device that the rank may use.
        together: Policies whose engines are awake at the same time, since one node generates with them, or nodes that
            a filter repeats; the engine of any other policy is awake alone.
    """

    ranks: tuple[int, ...]
    roles: Mapping[str, LoadedRole]
    engines: Mapping[str, Engine]
    held: float
    capacity: float
    together: tuple[tuple[str, ...], ...] = ()

    @property
    def trained(self) -> list[LoadedRole]:
        """The roles that have gradients."""
        return [role for role in self.roles.values() if role.trained]

    @property
    def kept(self) -> float:
        """Bytes that the roles hold all the time: weights and optimizer states."""
        roles = self.roles.values()
        return sum(role.weights_here for role in roles) + sum(role.states_here for role in roles)

    @property
    def asleep(self) -> float:
        """Bytes of all engines while roles are trained."""
        return sum(engine.asleep(self.capacity) for engine in self.engines.values())

    @property
    def awake(self) -> float:
        """Bytes of all engines at the fullest moment: the engines that take most are awake, the others sleep."""
        woken = {name: of.awake(self.capacity) - of.asleep(self.capacity) for name, of in self.engines.items()}
        awake = [*((name,) for name in self.engines), *self.together]
        return self.asleep + max((sum(woken[name] for name in names) for names in awake), default=0.0)

    @property
    def generating(self) -> float:
        """Bytes while responses are generated, at the fullest moment."""
        return self._resting + self.held + self.awake

    @property
    def logits(self) -> float:
        """Bytes of a chunk of logits, `[tokens, vocabulary]` or `[tokens, labels]`, and of their gradients."""
        return max((role.logits(self.capacity) for role in self.roles.values()), default=0.0)

    @property
    def gathered(self) -> float:
        """Bytes of a layer's whole weights while they are gathered; 0 where no role's weights are divided."""
        return max((role.gathered for role in self.roles.values()), default=0.0)

    @property
    def reduced(self) -> float:
        """Bytes that reduce gradients: ZeRO-3's buffers of all roles, and what one role takes for a backward pass."""
        return self._buffers + max((role.reduced for role in self.trained), default=0.0)

    @property
    def training(self) -> float:
        """Bytes while engines sleep and roles train: the larger of one role's passes and of its optimizer's step.

        A backward pass begins with the logits, and reduces gradients after these.
        """
        activations = max((role.activations for role in self.trained), default=0.0)
        stepping = max((role.stepping for role in self.trained), default=0.0)
        backward = activations + max(self.reduced - self._buffers, self.logits) + self.gathered
        gradients = sum(role.gradients_here for role in self.trained)
        return self.kept + self.held + gradients + self._buffers + max(backward, stepping) + self.asleep

    @property
    def loading(self) -> float:
        """Bytes while roles are loaded, one after the other; roles that are loaded stay, in addition to the next."""
        lies = most = 0.0
        for role in self.roles.values():
            most = max(most, lies + role.loading)
            lies += role.loaded
        return most

    def saving(self, buffer: float) -> float:
        """Bytes while roles are saved one after the other.

        Args:
            buffer: Bytes of weights that are gathered at one time.
        """
        gathered = max((role.sync(buffer) - role.resting for role in self.roles.values()), default=0.0)
        return self._resting + gathered + self.asleep

    @property
    def resuming(self) -> float:
        """Bytes while a checkpoint is read, one role after the other."""
        read = max((role.resuming - role.resting for role in self.roles.values()), default=0.0)
        return self._resting + read + self.asleep

    @property
    def spare(self) -> float:
        """Bytes left at the fullest moment; negative if the run does not fit."""
        caches = [engine.cache(self.capacity) for engine in self.engines.values()]
        return min(self.capacity - max(self.generating, self.training), *(caches or [0.0]))

    @property
    def fits(self) -> bool:
        """Whether the run fits on the device, and each engine's weights fit in the engine's share of it."""
        return self.spare >= 0

    @property
    def _buffers(self) -> float:
        return sum(role.buffer for role in self.roles.values())

    @property
    def _resting(self) -> float:
        return sum(role.resting for role in self.roles.values())


def memories(workload: Workload, capacity: float) -> list[Memory]:
    """The memory of all ranks, one `Memory` for all ranks that hold the same; the fullest first.

    Args:
        workload: Workload of all ranks.
        capacity: Bytes of each rank's device.
    """
    lives = [role.layout.ranks for role in workload.roles.values() if role.owns]
    lives += [engine.placed for engine in workload.engines.values()]
    found = [_memory(workload, capacity, ranks) for ranks in ranks_alike(workload.ranks, lives)]
    return sorted(found, key=lambda each: each.spare)


def ranks_alike(count: int, groups: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The ranks below `count`, put together if they are members of the same groups."""
    members = [frozenset(ranks) for ranks in groups]
    found: dict[tuple[bool, ...], list[int]] = {}
    for rank in range(count):
        found.setdefault(tuple(rank in ranks for ranks in members), []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def _memory(workload: Workload, capacity: float, ranks: tuple[int, ...]) -> Memory:
    """The memory of each of these ranks, which all hold the same."""
    rank, roles, engines = ranks[0], workload.roles, workload.engines
    here = {name: engine for name, engine in engines.items() if rank in engine.placed}
    awake = [node.generates for node in workload.graph.order]
    repeated_sampling = workload.plan.dynamic_sampling
    if repeated_sampling is not None and not any(
        isinstance(task, SyncWeights) for task in repeated_sampling.tasks
    ):  # else they take turns
        repeated = [workload.graph.nodes[task.node_id] for task in repeated_sampling.tasks if isinstance(task, RunNode)]
        awake.append(tuple(dict.fromkeys(policy for node in repeated for policy in node.generates)))
    return Memory(
        ranks=ranks,
        roles={name: role for name, role in roles.items() if role.owns and rank in role.layout.ranks},
        engines=here,
        held=_held(workload, rank),
        capacity=capacity,
        together=tuple(
            tuple(policy for policy in policies if policy in here) for policies in awake if len(policies) > 1
        ),
    )


def _held(workload: Workload, rank: int) -> float:
    """Bytes of all values of the step that a rank makes or reads."""
    placed = workload.plan.layouts()
    lives: dict[str, set[Layout]] = {
        node.id: {placed[node.id]} for node in workload.graph.order if node.kind != "train"
    }
    for task in workload.plan.every():
        if isinstance(task, Exchange) and task.value in lives:
            lives[task.value].add(task.target)
    nbytes = 0.0
    for value, layouts in lives.items():
        whole = workload.rows(workload.graph.nodes[value].space) * workload.value_bytes(value)
        nbytes += whole * max((1 / layout.shards for layout in layouts if rank in layout.ranks), default=0.0)
    return nbytes * (1 + workload.plan.max_staleness)


def memory_lines(memory: Memory, every: bool) -> Iterator[str]:
    """The memory of a rank as lines of text, and what to do if the run does not fit:

        memory of a rank: 77.2 kB generating, 152.0 kB training, of 160.0 kB
            actor      weights 7.7 kB, gradients 23.1 kB, optimizer 30.8 kB, activations 34.0 kB
            training   logits 40.0 kB, gathered 0 B, reduced 15.4 kB; values of the step 1.0 kB
            engine     weights 7.7 kB, cache 30.0 kB

    Args:
        memory: Memory of the rank.
        every: Whether all ranks hold the same.
    """
    of = "a rank" if every else rank_ranges(memory.ranks)
    yield (
        f"memory of {of}: {in_bytes(memory.generating)} generating, {in_bytes(memory.training)} training,"
        f" of {in_bytes(memory.capacity)}"
    )
    for name, role in memory.roles.items():
        parts = {"weights": role.weights_here}
        if role.trained:
            parts |= {"gradients": role.gradients_here, "optimizer": role.states_here, "activations": role.activations}
        if role.in_host_memory:
            parts["in host memory"] = role.in_host_memory
        yield f"    {name:<10} {', '.join(f'{part} {in_bytes(nbytes)}' for part, nbytes in parts.items())}"
    yield (
        f"    training   logits {in_bytes(memory.logits)}, gathered {in_bytes(memory.gathered)}, reduced"
        f" {in_bytes(memory.reduced)}; values of the step {in_bytes(memory.held)}"
    )
    for name, engine in memory.engines.items():
        of, cache = f" of {name}" if len(memory.engines) > 1 else "", in_bytes(engine.cache(memory.capacity))
        yield f"    {f'engine{of}':<10} weights {in_bytes(engine.weights)}, cache {cache}"
    if not memory.fits:
        yield f"  ! {does_not_fit(memory)}"


def does_not_fit(memory: Memory) -> str:
    """One line for a run that does not fit: the rank, the bytes it lacks, the largest parts, and what to do.

    Args:
        memory: Memory of a rank on which the run does not fit.
    """
    rank, capacity = memory.ranks[0], memory.capacity
    for name, engine in memory.engines.items():
        if (cache := engine.cache(capacity)) < 0:
            whose = f" for `{name}`" if len(memory.engines) > 1 else ""
            return (
                f"rank {rank}: the share of `rollout`{whose} is {in_bytes(-cache)} short of its weights of"
                f" {in_bytes(engine.weights)}: raise rollout.init_args.gpu_memory_utilization or"
                " tensor_parallel_size"
            )
    of = {name: role.weights_here + role.gradients_here + role.states_here for name, role in memory.roles.items()}
    generates = bool(memory.engines) and memory.generating > capacity
    if generates:
        of["rollout"] = memory.awake
    largest = max(of, key=lambda role: of[role])
    phase, need = ("generating", memory.generating) if generates else ("training", memory.training)
    roles = memory.roles.values()
    divisible = any(role.stage < 3 and len(role.layout.ranks) > 1 for role in roles)  # else all that can be is divided
    divided = "raise strategy.init_args.stage" if divisible else "divide the roles over more ranks"
    recomputed = all(role.checkpointing for role in memory.trained)
    remedy = (
        f"lower gpu_memory_utilization (on the CPU kv_cache_gib, of TransformersEngine max_batch), or {divided}"
        if generates
        else f"{divided}, or lower token_budget{'' if recomputed else ', or set gradient_checkpointing'}"
    )
    if generates and len(memory.engines) > 1:
        first, second, *_ = memory.engines
        remedy += f"; or let policies use one engine in turns (`engines.{second}: {{share: {first}}}`)"
    return (
        f"rank {rank} is out of memory by {in_bytes(need - capacity)} of {in_bytes(capacity)} while"
        f" {phase}; `{largest}` holds {in_bytes(of[largest])}: {remedy}"
    )
