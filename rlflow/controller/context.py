"""What a running node may ask for: samples, scores, metrics, and sums over the rows of all ranks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlflow.dag.node import Node
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Transport
from rlflow.errors import UserError
from rlflow.metrics import StepMetrics
from rlflow.module import AllRows
from rlflow.rewards.reward import Reward, Scores, scored
from rlflow.rollout.engine import RolloutEngine, Sampling
from rlflow.rollout.responses import Part, under_way
from rlflow.rollout.sampling import sample
from rlflow.state.prompt_memory import PromptMemory
from rlflow.values.batch import Batch, Pairs
from rlflow.values.columns import to_device
from rlflow.values.host_copy import on_device, on_host
from rlflow.values.layout import Layout
from rlflow.values.parts import Parts
from rlflow.values.path import RowPath
from rlflow.values.protocols import Written
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Rollout


@dataclass(frozen=True)
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
    """

    node: Node
    space: RowSpace
    layout: Layout
    draw: int
    versions: Mapping[str, int]
    metrics: StepMetrics
    part: Part | None = None
    calls: Counter[tuple[int, ...]] = field(default_factory=Counter)


_NUMBERS = 6  # that are gathered of each row: draw, place of the node, call, its own place, prompt, the number itself


@dataclass(frozen=True)
class Remembered:
    """What one call of a node gave a memory of this rank's rows.

    Attributes:
        memory: Its name.
        node: The node's id.
        draw: At which the node ran.
        call: Which of the node's calls for this memory, from 0.
        rows: `[3, B]` float64: the rows' places in the order of all, their prompts' places in the dataset, the numbers.
    """

    memory: str
    node: str
    draw: int
    call: int
    rows: Tensor

    def keyed(self, place: int) -> Tensor:
        """`[6, B]`: by what the rows are ordered, the node's place in the graph among it; then prompts and numbers."""
        keys = self.rows.new_tensor([self.draw, place, self.call])[:, None].expand(3, self.rows.shape[1])
        return torch.cat([keys, self.rows])


class NodeContext:
    """Implements `rlflow.module.StepContext` for the node that runs on this rank."""

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
        on_scores: Callable[[int, Written, Scores], None],
        rows_of: Callable[[Tensor], Tensor] = lambda ids: ids,
    ) -> None:
        self._engines = engines
        self._transport = transport
        self._device = device
        self._dtype = torch.float64 if dtype == torch.float64 else torch.float32  # of rewards and rollout logprobs
        self._seed = seed
        self._stop_token_ids = stop_token_ids
        self._decode = decode
        self._encode = encode
        self._on_scores = on_scores
        self._rows_of = rows_of
        self._measures = False
        self.remembered: dict[int, list[Remembered]] = {}  # by step
        self.running: Running | None = None
        self.under_way: Tensor | None = None  # [B] bool, which of the node's samples were cut off

    @contextmanager
    def measuring(self, running: Running) -> Iterator[None]:
        """Within it no node of the graph runs, but validation."""
        before = self.running
        self.running, self._measures = running, True
        try:
            yield
        finally:
            self.running, self._measures = before, False

    def generate(self, rows: Any, n: int, sampling: Sampling, policy: str | None) -> Rollout:
        now = self._outside_training("generate")
        policy = _policy_of(now.node, policy)
        engine = self._engines.get(policy)
        assert engine is not None, f"no engine of {policy} is on this rank"
        parents = self._parents(rows, now)
        callers = [tuple(path) for path in parents.numbers.tolist()]
        if len(set(callers)) < len(callers):
            raise UserError(
                f"node `{now.node.id}` generates from one row twice in a call, and both would sample the same; ask for"
                " more responses by `n`, or call `generate` again"
            )
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
            calls=[now.calls[caller] for caller in callers],
        )
        now.calls.update(callers)
        if now.part is not None:
            self._cut_off(now, rollout, sampling)
        on_device: Rollout = to_device(rollout, self._device)
        return on_device

    def encode(self, text: str) -> list[int]:
        return self._encode(text)

    def _parents(self, rows: Any, now: Running) -> RowPath:
        """The paths of the rows that are answered, on the host.

        Raises:
            UserError: They are responses, or rows that the node does not see.
        """
        if not isinstance(rows, Batch | Pairs):
            raise UserError(
                f"node `{now.node.id}` generates from a {type(rows).__name__}, and responses are no prompts; make"
                " prompts of them by `as_prompts`"
            )
        own = now.space.paths(now.space.held(now.layout, self._transport.rank))
        if rows.path is None and len(rows.prompt_ids) == len(own):
            return own
        if rows.path is None:
            raise UserError(
                f"node `{now.node.id}` generates from {len(rows.prompt_ids)} rows without a path where it sees"
                f" {len(own)}; take them from a value that it reads, or give the `Batch` its `path`"
            )
        if rows.path.levels[: len(own.levels)] != own.levels:
            raise UserError(
                f"node `{now.node.id}` sees rows of {' > '.join(own.levels)} and generates from rows of"
                f" {' > '.join(rows.path.levels)}, which descend from others; generate from rows below those it reads"
            )
        return replace(rows.path, numbers=on_host(rows.path.numbers))

    def _cut_off(self, now: Running, rollout: Rollout, sampling: Sampling) -> None:
        if self.under_way is not None:
            raise UserError(
                f"node `{now.node.id}` samples twice, and `trainer.partial_rollout` continues the responses of one"
                " `generate`; sample once in it, or leave `partial_rollout` out"
            )
        self.under_way = under_way(rollout, sampling.max_tokens)

    def score(self, reward: Reward, rollout: Written, name: str) -> tuple[Tensor, Parts]:
        now = self._outside_training("reward_function")
        scores = self._scored_alike(reward, rollout.texts, rollout.rows, now)
        self._on_scores(now.metrics.step, rollout, scores)
        totals = torch.tensor(scores.total, dtype=self._dtype)
        parts = Parts({part: torch.tensor(of_part, dtype=self._dtype) for part, of_part in scores.parts.items()})
        self.log(f"{name}/mean", totals, None)
        for part_name, part in parts.items():
            self.log(f"{name}/{part_name}", part, None)
        if self._speaks(now):
            now.metrics.sum(f"{name}/errors", float(scores.errors))
        return on_device(totals, self._device), to_device(parts, self._device)

    def _scored_alike(
        self, reward: Reward, texts: Sequence[str], rows: Sequence[dict[str, Any]], now: Running
    ) -> Scores:
        """The scores of this rank's samples, with the parts that all ranks have; ranks without samples have them too.

        Raises:
            UserError: On all ranks alike: scoring failed on one, or two have other parts.
        """
        try:
            scores, problem = scored(reward, texts, rows), ""
        except UserError as error:
            scores, problem = Scores([]), str(error)
        failed_all = scores.errors == len(scores.total)  # as where there are no samples
        here = {"problem": problem, "parts": None if failed_all and not scores.parts else sorted(scores.parts)}
        ranks = [json.loads(each) for each in self._transport.gather_bytes(json.dumps(here).encode(), now.layout.ranks)]
        for rank in ranks:
            if rank["problem"]:
                raise UserError(rank["problem"])
        known = [rank["parts"] for rank in ranks if rank["parts"] is not None]
        for names in known:
            if other := sorted(set(names) ^ set(known[0])):
                raise UserError(
                    f"{reward} gave part `{other[0]}` for some samples and not for others; return the same parts for"
                    " every response"
                )
        names = known[0] if known else []
        return replace(scores, parts={name: scores.parts.get(name, [0.0] * len(scores.total)) for name in names})

    def log(self, name: str, x: Tensor, mask: Tensor | None) -> None:
        now = self._now()
        if not self._speaks(now):
            return
        if mask is None:
            now.metrics.mean(name, x.detach().double().sum(), float(x.numel()))
        else:
            now.metrics.mean(name, x.detach().double().where(mask.bool(), 0.0).sum(), mask.bool().sum())

    def of_each_shard(self, x: Tensor) -> Tensor:
        """The tensors of all shards, `[shards, ...]`; of several peers one speaks."""
        now = self._outside_training("a number over all rows")
        return torch.stack(self._transport.all_gather(x, now.layout.ranks)[:: now.layout.copies])

    def all_rows(self, x: AllRows) -> AllRows:
        now = self._outside_training("all_rows")
        if isinstance(x, Ragged):
            return self._all_ragged(now, x)
        if x.dim() != 1:
            raise UserError(
                f"all_rows takes one number a row, `[B]`, or Ragged; node `{now.node.id}` gave {list(x.shape)}"
            )
        return now.space.gathered(now.layout, x, self._transport, now.layout.ranks)

    def _all_ragged(self, now: Running, x: Ragged) -> Ragged:
        ranks = now.layout.ranks
        lengths = [on_host(each) for each in self._transport.all_gather_ragged(x.lengths, ranks)]
        values = self._transport.all_gather_ragged(x.values, ranks)
        whole = Ragged(torch.cat(values), torch.cat(lengths))
        numbers = torch.arange(len(whole)).split([len(each) for each in lengths])
        return whole.take(now.space.in_order(now.layout, list(numbers)))

    def dataset_rows(self, group: Tensor) -> Tensor:
        self._outside_training("dataset_rows")
        if self._measures:
            raise UserError(
                "`dataset_rows` was called in validation, whose prompts are not those of the training rows; call it in"
                " a node"
            )
        _require_prompts("dataset_rows", group)
        return on_device(self._rows_of(on_host(group)), group.device)

    def remember(self, memory: str, group: Tensor, x: Tensor) -> None:
        now = self._outside_training("a PromptMemory")
        _require_prompts(f"`{memory}`", group)
        if self._measures:
            raise UserError(f"`{memory}` was updated in validation, whose prompts are others; update it in a node")
        if not self._speaks(now):
            return
        of_step = self.remembered.setdefault(now.metrics.step, [])
        call = sum((each.memory, each.node, each.draw) == (memory, now.node.id, now.draw) for each in of_step)
        places = now.space.held(now.layout, self._transport.rank)
        rows = [part.double() for part in (places, self._rows_of(on_host(group)), x.detach().cpu())]
        of_step.append(Remembered(memory, now.node.id, now.draw, call, torch.stack(rows)))

    def learn(self, memories: Mapping[str, PromptMemory], nodes: Sequence[str], step: int) -> None:
        """Let memories learn what all ranks' nodes gave in a step; by all ranks.

        The order is that of draws, of nodes, of a node's calls, and of the rows' paths: alike on any number of ranks.

        Args:
            memories: By name.
            nodes: All of the graph, in its order.
            step: Whose nodes they were.
        """
        here = self.remembered.pop(step, [])
        for name, memory in memories.items():
            parts = [each.keyed(nodes.index(each.node)) for each in here if each.memory == name]
            mine = torch.cat([torch.zeros(_NUMBERS, 0, dtype=torch.float64), *parts], dim=1)
            ranks = self._transport.all_gather_ragged(mine.flatten())
            rows = torch.cat([each.cpu().view(_NUMBERS, -1) for each in ranks], dim=1)
            *keys, prompts, x = range(_NUMBERS)
            for key in reversed(keys):
                rows = rows[:, rows[key].argsort(stable=True)]
            memory.learn(rows[prompts].long(), rows[x])

    def of_later_steps(self, step: int) -> list[dict[str, Any]]:
        """What is to be learned of steps after `step`, JSON-able: these are in progress."""
        return [
            {"step": later, **vars(each), "rows": each.rows.tolist()}
            for later, of_step in self.remembered.items()
            for each in of_step
            if later > step
        ]

    def remember_again(self, later_steps: Sequence[Mapping[str, Any]]) -> None:
        """Take back what `of_later_steps` gave."""
        for stored in later_steps:
            given = {name: x for name, x in stored.items() if name != "step"}
            given["rows"] = torch.tensor(stored["rows"], dtype=torch.float64).view(3, -1)
            self.remembered.setdefault(stored["step"], []).append(Remembered(**given))

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


def _policy_of(node: Node, policy: str | None) -> str:
    """The policy that a node generates with.

    Raises:
        UserError: The node does not name it, or names several and it is not said which.
    """
    if node.kind != "rollout":
        marked = f'generates="{policy}"' if policy is not None else "generates=..."
        raise UserError(f"node `{node.id}` generates and is not marked to; write `@node({marked})` ({node.place})")
    if policy is None and len(node.generates) == 1:
        return node.generates[0]
    named = ", ".join(f"'{each}'" for each in node.generates)
    if policy is None:
        calls = " or ".join(f"self.{each}.generate" for each in node.generates)
        raise UserError(f"node `{node.id}` generates with {named}, so `self.generate` does not say which; call {calls}")
    if policy not in node.generates:
        raise UserError(
            f"node `{node.id}` calls `self.{policy}.generate` and is marked to generate with {named}; add {policy!r} to"
            f" its `generates` ({node.place})"
        )
    return policy


def _require_prompts(asked: str, group: Tensor) -> None:
    """Refuse groups of rows below samples: only those of prompts are known outside of a step."""
    if bool((on_host(group) < 0).any()):
        raise UserError(
            f"{asked} was given groups of rows that answer samples, and knows prompts; give `group_of('batch')` of them"
        )
