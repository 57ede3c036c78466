"""What a running node may ask for: samples, scores, metrics, and sums over the rows of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlflow.context.conversations import ConversationRunner, ConverseCall, measure_conversations
from rlflow.context.dropped_rows import drop
from rlflow.context.generation import Calls, callers_of, parents_of, policy_of, require_beginning, require_own_rows
from rlflow.context.scoring import reward_input, scored_alike
from rlflow.dag.node import Node
from rlflow.dag.row_spaces import scores_rows
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Transport
from rlflow.environments.environment import Environment
from rlflow.errors import UserError
from rlflow.metrics import StepMetrics
from rlflow.rewards.reward import Reward, RewardInput, Scores, TrainerState
from rlflow.rollout.engine import RolloutEngine, Sampling
from rlflow.rollout.sampling import Part, sample, under_way
from rlflow.state.prompt_memory import PromptMemory
from rlflow.values.columns import Parts, to_device
from rlflow.values.host_copy import on_device, on_host
from rlflow.values.layout import Layout
from rlflow.values.path import NO_GROUP
from rlflow.values.protocols import Written
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Rollout

AllRows = TypeVar("AllRows", Tensor, Ragged)


@dataclass
class Running:
    """The node that runs.

    Attributes:
        node: Itself.
        space: Its rows.
        layout: Where they lie.
        draw: Of prompts, that it runs at.
        version: Of the policy, likewise.
        metrics: What is logged goes here.
        part: How far it samples; None for whole responses.
        calls: Of `generate` that it has made.
        returned: What environments gave for rows, as far as it has asked.
        dropped: `[B]` bool on the CPU, which of its rows were dropped; None where none was.
        cut_off: `[B]` bool, which of the responses that it sampled are unfinished; None where none is cut off.
        validates: Whether this is validation, and no node of the graph.
    """

    node: Node
    space: RowSpace
    layout: Layout
    draw: int
    versions: Mapping[str, int]
    metrics: StepMetrics
    part: Part | None = None
    calls: Calls = field(default_factory=Calls)
    returned: list[tuple[Written, Tensor]] = field(default_factory=list)
    dropped: Tensor | None = None
    cut_off: Tensor | None = None
    validates: bool = False


class NodeContext:
    """What the node that runs on this rank may ask for; all ranks of the node ask alike."""

    def __init__(
        self,
        *,
        engines: Mapping[str, RolloutEngine],
        transport: Transport,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        stop_token_ids: tuple[int, ...],
        decode: Callable[[Sequence[int]], str],
        encode: Callable[[str], list[int]],
        written: Callable[[Sequence[dict[str, Any]], str], list[list[int]]],
        on_scores: Callable[[int, Written, Scores], None],
        rows_of: Callable[[Tensor], Tensor] = lambda ids: ids,
        writers: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        longest_prompt: int | None = None,
        conversations: ConversationRunner | None = None,
        prompt_column: str | None = None,
        trainer_state: Callable[[int], TrainerState] = TrainerState,
    ) -> None:
        self._engines = engines
        self._transport = transport
        self._device = device
        self._dtype = dtype  # of rewards and rollout logprobs
        self._seed = seed
        self._stop_token_ids = stop_token_ids
        self._decode = decode
        self._encode = encode
        self._written = written
        self._on_scores = on_scores
        self._rows_of = rows_of
        self._writers = writers
        self._prompt_column = prompt_column
        self._trainer_state = trainer_state  # of a step
        self.longest_prompt = longest_prompt  # in tokens; None for any
        self.conversations = conversations
        self.memories = MemoryUpdates(transport)
        self.running: Running | None = None

    @contextmanager
    def within(self, running: Running) -> Iterator[None]:
        """Within it this node runs."""
        self.running = running
        try:
            yield
        finally:
            self.running = None

    def policy(self, name: str | None) -> str:
        return policy_of(self._outside_training("generate").node, name)

    def generate(self, rows: Any, n: int, sampling: Sampling, longest: int, policy: str | None) -> Rollout:
        now, policy, engine = self._generating(policy)
        own = now.space.paths(now.space.held(now.layout, self._transport.rank))
        parents = parents_of(rows, now.node, own)
        if isinstance(rows, Rollout):
            require_own_rows(rows, now.node, policy, self._writers, cut_off=now.part is not None)
        callers = callers_of(parents, now.node)
        rollout = sample(
            engine,
            rows,
            parents,
            n,
            replace(sampling, stop_token_ids=(*self._stop_token_ids, *sampling.stop_token_ids)),
            seed=self._seed,
            draw=now.draw,
            node=now.node.id,
            version=now.versions[policy],
            decode=self._decode,
            dtype=self._dtype,
            part=now.part,
            earlier=now.calls.before(callers),
            longest=longest,
            longest_prompt=self.longest_prompt,
        )
        now.calls.add(callers, rollout)
        if now.part is not None:
            self._cut_off(now, under_way(rollout, sampling.max_tokens))
        on_device: Rollout = to_device(rollout, self._device)
        return on_device

    def converse(
        self,
        rows: Any,
        environment: Environment,
        n: int,
        sampling: Sampling,
        policy: str | None,
        players: Mapping[str, tuple[str, float]],
    ) -> Rollout:
        now, policy, engine = self._generating(policy)
        require_beginning(rows, now.node, environment, cut_off=now.part is not None)
        own = now.space.paths(now.space.held(now.layout, self._transport.rank))
        parents = parents_of(rows, now.node, own)
        callers = callers_of(parents, now.node)
        assert self.conversations is not None, "the run was prepared without a tokenizer"
        rollout, conversations, times = self.conversations.run(
            {policy: engine, **{name: self._engines[name] for name, _ in players.values()}},
            environment,
            rows.rows,
            parents,
            n,
            replace(sampling, stop_token_ids=(*self._stop_token_ids, *sampling.stop_token_ids)),
            ConverseCall(now.draw, now.node.id, policy, now.versions, now.layout, players, self._rows_of, now.part),
            now.calls.before(callers),
        )
        if self._speaks(now):
            measure_conversations(now.node.id, conversations, times, now.metrics, cut_off=now.part is not None)
            times.report(self._transport.watch, step=now.metrics.step, node=now.node.id)
        now.calls.add(callers, rollout)
        if now.part is not None:
            self._cut_off(now, torch.tensor([each.ended is None for each in conversations], dtype=torch.bool))
        on_device: Rollout = to_device(rollout, self._device)
        return on_device

    def _generating(self, policy: str | None) -> tuple[Running, str, RolloutEngine]:
        """The node that runs, and the policy that it means with its engine on this rank."""
        now = self._outside_training("generate")
        policy = policy_of(now.node, policy)
        engine = self._engines.get(policy)
        assert engine is not None, f"no engine of {policy} is on this rank"
        return now, policy, engine

    def encode(self, text: str) -> list[int]:
        return self._encode(text)

    def written(self, rows: Sequence[dict[str, Any]], template: str) -> Ragged:
        prompts: Ragged = to_device(Ragged.from_lists(self._written(rows, template)), self._device)
        return prompts

    def _cut_off(self, now: Running, found: Tensor) -> None:
        if now.cut_off is not None:
            raise UserError(
                f"node `{now.node.id}` samples twice, and `trainer.partial_rollout` continues the responses of one"
                " `generate`; sample once in it, or leave `trainer.partial_rollout` out"
            )
        now.cut_off = found

    def score(self, reward: Reward, rollout: Written, name: str) -> tuple[Tensor, Parts]:
        now = self._outside_training("reward_function")
        drops = reward.drops and now.node.makes_value and not now.validates
        if drops and not scores_rows(now.node):
            raise UserError(
                f"node `{now.node.id}` scores responses ({now.node.place}), and {reward} drops samples that it fails"
                " on, which nodes that train would not know of; score in a node that reads `rollout: Written` and"
                " returns PerSample, or set `on_error` to raise or zero"
            )
        responses = self.reward_input(rollout, now.metrics.step)
        scores = scored_alike(reward, responses, now.layout.ranks, self._transport)
        if drops:
            drop(scores.dropped, rollout, now.space, now.layout.ranks, self._transport)
            here = now.space.held(now.layout, self._transport.rank)
            now.dropped = now.space.dropped[here]  # for what the node logs from here on
        given = next((on_host(returns).tolist() for rows, returns in now.returned if rows is rollout), None)
        self._on_scores(now.metrics.step, rollout, scores if given is None else scores.plus("environment", given))
        totals = torch.tensor(scores.total, dtype=self._dtype)
        kept = self.kept(totals)
        self.log(f"{name}/mean", totals, kept)
        parts: dict[str, Tensor] = {}
        for part_name, of_part in scores.parts.items():
            applies = torch.tensor([each is not None for each in of_part], dtype=torch.bool)
            parts[part_name] = torch.tensor([each or 0.0 for each in of_part], dtype=self._dtype)
            self.log(f"{name}/{part_name}", parts[part_name], applies if kept is None else applies & kept)
        if self._speaks(now):
            now.metrics.sum(f"{name}/errors", float(len(scores.failed)))
            for part_name, values in scores.metrics.items():
                now.metrics.mean(f"{name}/{part_name}", float(sum(values)), float(len(values)))
        return on_device(totals, self._device), to_device(Parts(parts), self._device)

    def reward_input(self, rollout: Written, step: int) -> RewardInput:
        """What a reward is given of samples at a step, counted from 0."""
        return reward_input(rollout, self._prompt_column, self._trainer_state(step))

    def returned(self, rollout: Written, name: str, alone: bool) -> Tensor:
        now = self._outside_training("environment_returns")
        returns = rollout.returns.sum(dim=1)
        self.log(f"{name}/environment", returns, None)
        now.returned.append((rollout, returns))
        if alone:
            self.log(f"{name}/mean", returns, None)
            self._on_scores(now.metrics.step, rollout, Scores(on_host(returns).tolist()))
        return returns

    def log(self, name: str, x: Tensor, mask: Tensor | None) -> None:
        now = self._now()
        if not self._speaks(now):
            return
        if mask is None and x.dim() == 1:
            mask = self.kept(x)
        if mask is None:
            now.metrics.mean(name, x.detach().double().sum(), float(x.numel()))
        else:
            now.metrics.mean(name, x.detach().double().where(mask.bool(), 0.0).sum(), mask.bool().sum())

    def kept(self, x: Tensor) -> Tensor | None:
        """`[B]` bool, the rows of `x` that were not dropped; None where none of them was."""
        dropped = self._now().dropped
        return None if dropped is None or len(x) != len(dropped) else on_device(~dropped, x.device)

    def of_each_shard(self, x: Tensor) -> Tensor:
        """The tensors of all shards, `[shards, ...]`; of several peers one speaks."""
        now = self._outside_training("a number over all rows")
        return torch.stack(self._transport.all_gather(x, now.layout.ranks)[:: now.layout.copies])

    def all_rows(self, x: AllRows) -> AllRows:
        """Of all ranks' rows, in the order of their paths; a tensor is `[B, ...]`, with one shape after B."""
        now = self._outside_training("all_rows")
        if isinstance(x, Ragged):
            return self._all_ragged(now, x)
        return now.space.gathered(now.layout, x, self._transport, now.layout.ranks)

    def _all_ragged(self, now: Running, x: Ragged) -> Ragged:
        ranks = now.layout.ranks
        lengths = [on_host(each) for each in self._transport.all_gather_ragged(x.lengths, ranks)]
        values = self._transport.all_gather_ragged(x.values, ranks)
        whole = Ragged(torch.cat(values), torch.cat(lengths))
        numbers = torch.arange(len(whole)).split([len(each) for each in lengths])
        return whole.take(now.space.in_order(now.layout, list(numbers)))

    def dataset_rows(self, group: Tensor) -> Tensor:
        now = self._outside_training("dataset_rows")
        if now.validates:
            raise UserError(
                "`dataset_rows` was called in validation, whose prompts are not those of the training rows; call it in"
                " a node"
            )
        _require_prompts("dataset_rows", group)
        known = on_host(group).masked_fill(on_host(group) == NO_GROUP, 0)  # of what was dropped nothing counts
        return on_device(self._rows_of(known), group.device)

    def remember(self, memory: str, group: Tensor, x: Tensor) -> None:
        now = self._outside_training("a PromptMemory")
        _require_prompts(f"`{memory}`", group)
        if now.validates:
            raise UserError(f"`{memory}` was updated in validation, whose prompts are others; update it in a node")
        if not self._speaks(now):
            return
        known = on_host(group) != NO_GROUP
        places = now.space.held(now.layout, self._transport.rank)[known]
        rows = [part.double() for part in (places, self._rows_of(on_host(group)[known]), x.detach().cpu()[known])]
        place = list(self._writers).index(now.node.id)
        self.memories.add(memory, now.metrics.step, now.draw, place, torch.stack(rows))

    def _now(self) -> Running:
        assert self.running is not None, "no node is running"
        return self.running

    def _speaks(self, now: Running) -> bool:
        return now.layout.publishes(self._transport.rank)  # of several peers one, so each row counts once

    def _outside_training(self, what: str) -> Running:
        now = self._now()
        if now.node.kind == "train":
            raise UserError(
                f"train node `{now.node.id}` calls for {what}; a train node runs per micro-batch, where other ranks"
                " do not meet it. Make it a value of its own in a node without type='train'"
            )
        return now


def _require_prompts(asked: str, group: Tensor) -> None:
    """Refuse groups of rows below samples: only those of prompts are known outside of a step."""
    if bool(((on_host(group) < 0) & (on_host(group) != NO_GROUP)).any()):
        raise UserError(
            f"{asked} was given groups of rows that answer samples, and knows prompts; give `group_of('batch')` of them"
        )


KEYS = 4  # by which what is remembered is ordered: the draw, the node's place in the graph, its call, the row's place
COLUMNS = KEYS + 2  # then the prompt's place in the dataset, and the number itself


class MemoryUpdates:
    """What this rank's nodes gave memories of prompts, by step, until all ranks learn it.

    Args:
        transport: To the other ranks.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        # By step, then by memory, draw and node: `[COLUMNS, B]` float64 of each call.
        self._given: dict[int, dict[tuple[str, int, int], list[Tensor]]] = {}

    def add(self, memory: str, step: int, draw: int, node: int, rows: Tensor) -> None:
        """What a call of a node gave a memory.

        Args:
            memory: Name of the memory.
            step: Number of the step.
            draw: Number of the draw of prompts that the node ran at.
            node: The node's place in the graph.
            rows: `[3, B]` float64: places of the rows in the order of all, places of their prompts in the dataset, and
                the numbers.
        """
        calls = self._given.setdefault(step, {}).setdefault((memory, draw, node), [])
        key = rows.new_tensor([draw, node, len(calls)])[:, None]
        calls.append(torch.cat([key.expand(-1, rows.shape[1]), rows]))

    def learn(self, memories: Mapping[str, PromptMemory], step: int) -> None:
        """Let memories learn what all ranks' nodes gave in a step; by all ranks.

        The order is that of draws, of nodes, of a node's calls, and of the rows' paths: alike on any number of ranks.
        """
        here = self._given.pop(step, {})
        for name, memory in memories.items():
            given = [rows for (of, _, _), calls in here.items() if of == name for rows in calls]
            mine = torch.cat([torch.zeros(COLUMNS, 0, dtype=torch.float64), *given], dim=1)
            ranks = self._transport.all_gather_ragged(mine.flatten())
            rows = torch.cat([each.cpu().view(COLUMNS, -1) for each in ranks], dim=1)
            for key in reversed(range(KEYS)):
                rows = rows[:, rows[key].argsort(stable=True)]
            memory.learn(rows[KEYS].long(), rows[KEYS + 1])

    def of_later_steps(self, step: int) -> list[dict[str, Any]]:
        """What is to be learned of steps after `step`, JSON-able: these are in progress."""
        return [
            {"step": later, "key": key, "calls": [rows.tolist() for rows in calls]}
            for later, given in self._given.items()
            for key, calls in given.items()
            if later > step
        ]

    def restore(self, later_steps: Sequence[Mapping[str, Any]]) -> None:
        """Take back what `of_later_steps` gave."""
        for stored in later_steps:
            calls = [torch.tensor(rows, dtype=torch.float64).view(COLUMNS, -1) for rows in stored["calls"]]
            memory, draw, node = stored["key"]
            of_step = self._given.setdefault(stored["step"], {})
            of_step.setdefault((memory, draw, node), []).extend(calls)  # several ranks' where there are fewer now
