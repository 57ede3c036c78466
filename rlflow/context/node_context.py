"""`NodeContext`: what the methods of `RLModule` call while a node runs on this rank.

A node calls `self.generate(batch, n=8)`, `self.reward_function(rollout)` or `self.log("actor/kl", kl)`; `RLModule`
passes the call on to the context, which knows the node, this rank's rows and the other ranks.

`B` is the number of rows on this rank, `N` that on all ranks, `T` the tokens of the longest response on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlflow.context.conversations import ConversationRunner, ConverseCall, measure_conversations
from rlflow.context.generation import (
    GenerationHistory,
    callers_of,
    parents_of,
    pictures_of,
    policy_of,
    require_beginning,
    require_own_rows,
)
from rlflow.dag.graph import scores_rows
from rlflow.dag.node import Node
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Transport
from rlflow.environments.environment import Environment
from rlflow.errors import UserError
from rlflow.metrics import MEAN, MetricOptions, Metrics, StepMetrics
from rlflow.models.picture_processor import no_pictures
from rlflow.rewards.early import EarlyScores
from rlflow.rewards.reward import Reward, RewardInput, Scores, TrainerState, scored
from rlflow.rollout.engine import RolloutEngine, Sampling
from rlflow.rollout.sampling import Part, is_unfinished, sample
from rlflow.state.prompt_memory import PromptMemory
from rlflow.values.columns import Parts, to_device
from rlflow.values.host_copy import on_device, on_host
from rlflow.values.layout import Layout
from rlflow.values.path import NO_GROUP, RowPath
from rlflow.values.picture import Picture
from rlflow.values.protocols import WithTexts
from rlflow.values.ragged import Ragged
from rlflow.values.response_settings import ResponseSettings
from rlflow.values.rollout import Rollout
from rlflow.values.truncation import Truncation

AllRows = TypeVar("AllRows", Tensor, Ragged)


@dataclass
class Running:
    """One call of a node on this rank, with its rows; of a train node all its micro-batches in a step.

    Attributes:
        node: The node that runs.
        space: The rows that the node sees, on all ranks.
        layout: Distribution of these rows to the ranks that run the node.
        draw: Number of the draw of prompts that the node runs on, from 0; sampling seeds depend on it.
        versions: Version of the weights that each policy's engine must hold; empty in train nodes and validation.
        metrics: This rank's metrics of the step, to which `log` adds.
        part: Limits of responses in this call, with `trainer.partial_rollout`; None for whole responses.
        calls: The calls of `generate` and `converse` that the node has made.
        returned: Samples whose environment returns the node has asked for, each with these returns `[B]`.
        dropped: `[B]` bool on the CPU, the rows that a reward failed on and dropped; None where there are none.
        cut_off: `[K]` bool on the CPU, which of `K` sampled responses are unfinished; None without
            `trainer.partial_rollout`.
        validates: Whether `validation_step` runs in place of a node of the graph.
        rows: Places of the micro-batch of a train node among the node's rows on this rank; None elsewhere.
    """

    node: Node
    space: RowSpace
    layout: Layout
    draw: int
    versions: Mapping[str, int]
    metrics: StepMetrics
    part: Part | None = None
    calls: GenerationHistory = field(default_factory=GenerationHistory)
    returned: list[tuple[WithTexts, Tensor]] = field(default_factory=list)
    dropped: Tensor | None = None
    cut_off: Tensor | None = None
    validates: bool = False
    rows: Tensor | None = None


@dataclass(eq=False, kw_only=True)
class NodeContext:
    """The services that a node can call while it runs; one object per rank and run, made by `rlflow.run.setup.join`.

    `score`, `all_rows` and `of_each_shard` are collectives: all ranks of the node call them in the same order, ranks
    without rows too. Ranks that share an engine call `generate` and `converse` together. `log`, `returned` and
    `remember` only note what this rank has; ranks exchange it at the end of the step.

    Ranks that share an engine or a sequence hold the same rows; then only the first of them logs. All methods but
    `log`, `kept`, `prompts`, `reward_input` and `scores_of` raise `UserError` in a train node, which sees one
    micro-batch at a time.

    Attributes:
        engines: Rollout engines on this rank, by policy.
        transport: Collectives between ranks.
        device: Device of the tensors that a node gets.
        dtype: Dtype of rewards and rollout logprobs.
        seed: Seed of the run.
        stop_token_ids: Tokens that end every response of a policy, in addition to those of a call.
        decode: Token ids to text, special tokens left out.
        encode: Text of a prompt to token ids, in the chat template if the dataset's prompts are.
        written: Rows of the dataset and a template to token ids of prompts.
        on_scores: Called with the step (from 0), samples and their scores, for `samples.jsonl`.
        rows_of: Ids of prompts `[N]` to their places in the dataset `[N]`.
        album: Numbers of pictures to the pictures.
        writers: Policies of each node that generates, by node.
        longest_prompt: Tokens of the longest prompt that a node may generate from; None for any.
        conversations: Runs conversations; None without a tokenizer.
        prompt_column: Column of the prompt that rewards read, see `RewardInput`.
        trainer_state: A step and a draw (from 0) to the progress of the run, for rewards.
        reward: The module's reward; None if there is none.
        masks: Rows of a mixture to which of them are of each dataset `[B]`, by name; empty for one dataset.
        own_settings: Function from rows to the response settings of their datasets; empty for one dataset.
        scored_as_made: Nodes that generate, and whose responses a node on this rank may score as they were made: the
            reward may begin to score them as they end.
        memories: Record of the numbers that nodes gave to the module's `PromptMemory` objects.
        running: The node that all calls are for; None between nodes.
        on_bar: Metrics that the terminal shows because modules asked for it; the same on all ranks.
        off_loggers: Metrics that no logger records because modules asked for it; the same on all ranks.
    """

    engines: Mapping[str, RolloutEngine]
    transport: Transport
    device: torch.device
    dtype: torch.dtype
    seed: int
    stop_token_ids: Mapping[str, tuple[int, ...]]
    decode: Callable[[Sequence[int]], str]
    encode: Callable[[str], list[int]]
    written: Callable[[Sequence[dict[str, Any]], str], list[list[int]]]
    on_scores: Callable[[int, WithTexts, Scores], None]
    rows_of: Callable[[Tensor], Tensor] = lambda ids: ids
    album: Callable[[Sequence[int]], Sequence[Picture]] = no_pictures
    writers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    longest_prompt: int | None = None
    conversations: ConversationRunner | None = None
    prompt_column: str | None = None
    trainer_state: Callable[[int, int], TrainerState] = lambda step, draw: TrainerState(step)
    reward: Reward | None = None
    masks: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Tensor]] = lambda rows: {}
    own_settings: Callable[[Sequence[Mapping[str, Any]]], Sequence[ResponseSettings]] = lambda rows: []
    scored_as_made: frozenset[str] = frozenset()
    memories: MemoryUpdates = field(init=False)
    running: Running | None = field(default=None, init=False)
    on_bar: set[str] = field(default_factory=set, init=False)
    off_loggers: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.memories = MemoryUpdates(self.transport)
        self._early: dict[tuple[str, int], EarlyScores] = {}  # by the node that generated, and the step
        self._validated: dict[str, bool] = {}  # whether `validation_step` logs a name

    def end_step(self, step: int) -> None:
        """Give up early scores that no node of the step has read."""
        for node, of in list(self._early):
            if of == step:
                self._give_up(node, self._early.pop((node, of)))

    def close(self) -> None:
        """Give up all early scores; at the end of the run."""
        for _, step in list(self._early):
            self.end_step(step)

    @contextmanager
    def within(self, running: Running) -> Iterator[None]:
        """Set `running`, the node that all calls are for, until the block ends."""
        self.running = running
        try:
            yield
        finally:
            self.running = None

    def policy(self, name: str | None) -> str:
        """`name` if the node is marked to generate with this policy; for None the only policy of its `generates`."""
        return policy_of(self._outside_training("generate").node, name)

    def generate(
        self, rows: Any, n: int, sampling: Sampling, longest: int, policy: str, temperature: float | None = None
    ) -> Rollout:
        """Sample `n` responses to each prompt, or `n` continuations of each response, with this rank's engine.

        The seed of a response follows from the run's seed, the draw, the node, the row that is answered and the
        response's number, whichever rank has the row. For `n` 2, paths of two prompts and of the rows that come back:

            rows       4, 7
            returned   4 0, 4 1, 7 0, 7 1

        Args:
            rows: `Batch` or `Pairs`, whose prompts are answered; or a `Rollout`, whose responses are continued.
            n: Responses to each row; a response that has ended, or has `longest` tokens, is copied once instead.
            sampling: Tokens of the response, or of the continuation alone; the policy's temperature; further stop
                tokens.
            longest: Tokens of a continued response in all; not used for prompts.
            policy: Name of the policy, as `policy` gave it.
            temperature: Temperature that the node asks for, which then holds for all datasets; None for none.

        Returns:
            `B * n` rows on the context's device, fewer where responses were copied. With `trainer.partial_rollout` some
            are unfinished; their groups are held back after the node, and continued with the next draw of prompts.

        Raises:
            UserError: The node may not use these rows, or gives one row twice in a call, or generates twice with
                `trainer.partial_rollout`; or a prompt has more than `longest_prompt` tokens.
        """
        now = self._outside_training("generate")
        own = now.space.paths(now.space.held(now.layout, self.transport.rank))
        parents = parents_of(rows, now.node, own)
        if isinstance(rows, Rollout):
            require_own_rows(rows, now.node, policy, self.writers, cut_off=now.part is not None)
        own_settings = self.own_settings(rows.rows) if parents.depth == 1 or isinstance(rows, Rollout) else []
        if own_settings and isinstance(rows, Rollout):  # a row begun by the policy's settings is continued by them
            begun = on_host(rows.temperature).tolist()
            own_settings = [
                each if each.sampling is not None and each.sampling.temperature == by else replace(each, sampling=None)
                for each, by in zip(own_settings, begun, strict=True)
            ]
        if temperature is not None:
            own_settings = [replace(each, sampling=None) for each in own_settings]
        if isinstance(rows, Rollout) and any(each.max_tokens for each in own_settings):
            raise UserError(
                f"node `{now.node.id}` continues responses, and a dataset has a `max_response_length` of its own, at"
                " which they were cut; leave that out"
            )
        callers = callers_of(parents, now.node)
        early = None if isinstance(rows, Rollout) else self._score_early(now)
        rollout = sample(
            self.engines[policy],
            rows,
            parents,
            n,
            replace(
                sampling,
                temperature=sampling.temperature if temperature is None else temperature,
                stop_token_ids=(*self.stop_token_ids[policy], *sampling.stop_token_ids),
            ),
            seed=self.seed,
            draw=now.draw,
            node=now.node.id,
            version=now.versions[policy],
            decode=self.decode,
            dtype=self.dtype,
            part=now.part,
            earlier=now.calls.before(callers),
            longest=longest,
            longest_prompt=self.longest_prompt,
            pictures=pictures_of(rows, self.album),
            of_prompts=own_settings,
            on_end=None if early is None else partial(early.add, messages=[]),
        )
        if temperature is not None:
            rollout = _sampled_at(temperature, rollout)
        if isinstance(rows, Rollout):
            before = dict(zip(callers, on_host(rows.temperature).tolist(), strict=True))
            rollout = _mixed_marked(rollout, before, sampling.temperature)
        now.calls.add(policy, callers, rollout)
        if now.part is not None:
            self._cut_off(now, is_unfinished(rollout, sampling.max_tokens))
        on_device: Rollout = to_device(rollout, self.device)
        return on_device

    def converse(
        self,
        rows: Any,
        environment: Environment,
        n: int,
        sampling: Sampling,
        policy: str,
        players: Mapping[str, tuple[str, float, Truncation]],
        temperature: float | None = None,
    ) -> Rollout:
        """Hold `n` conversations with an environment from each prompt of a `Batch`; log turns, tool calls and times.

        `max_tokens` of `sampling` is for a whole conversation, what the environment writes included. `temperature` is
        that which the node asks for, or None for the one of `sampling`. `players` says who speaks for a seat of a game
        in the policy's place, and how: `{"black": ("rival", 1.0, Truncation(top_k=20))}`.

        Returns:
            `B * n` rows, one for each conversation; in a game `n` for each prompt and each seat of the policy.

        Raises:
            UserError: The same as for `generate`; or an environment failed, and its `on_failure` is `raise`.
        """
        now = self._outside_training("generate")
        require_beginning(rows, now.node, environment, cut_off=now.part is not None)
        own = now.space.paths(now.space.held(now.layout, self.transport.rank))
        parents = parents_of(rows, now.node, own)
        callers = callers_of(parents, now.node)
        assert self.conversations is not None, "the run was prepared without a tokenizer"
        early = self._score_early(now)
        rollout, conversations, times = self.conversations.run(
            {name: self.engines[name] for name in (policy, *(player for player, *_ in players.values()))},
            environment,
            rows.rows,
            parents,
            n,
            sampling if temperature is None else replace(sampling, temperature=temperature),
            ConverseCall(
                now.draw,
                now.node.id,
                policy,
                now.versions,
                now.layout,
                players,
                self.rows_of,
                now.part,
                self.stop_token_ids,
            ),
            now.calls.before(callers),
            None if early is None else early.add,
            rows.pictures,
        )
        if self._speaks(now):
            measure_conversations(now.node.id, conversations, times, now.metrics, cut_off=now.part is not None)
            if (watch := self.transport.watch) is not None:
                for of, number, start, end in times.waits:
                    watch.turn(of, number, start, end, step=now.metrics.step, node=now.node.id)
        if temperature is not None:
            rollout = _sampled_at(temperature, rollout)
        now.calls.add(policy, callers, rollout)
        if now.part is not None:
            self._cut_off(now, torch.tensor([each.ended is None for each in conversations], dtype=torch.bool))
        on_device: Rollout = to_device(rollout, self.device)
        return on_device

    def prompts(self, rows: Sequence[dict[str, Any]], template: str) -> Ragged:
        """Token ids of the prompts that `template` writes from rows of the dataset; see `RLModule.prompts`."""
        prompts: Ragged = to_device(Ragged.from_lists(self.written(rows, template)), self.device)
        return prompts

    def _score_early(self, now: Running) -> EarlyScores | None:
        """The early scores to which this call adds responses as they end; None where the reward scores them later.

        One rollout at a time is scored early, so that no more calls run together than a reward allows.
        """
        place = now.node.id, now.metrics.step
        if place in self._early:  # the node has generated before, and returns other rows than those of one call
            self._give_up(now.node.id, self._early.pop(place))
        if (
            now.node.id not in self.scored_as_made
            or self._early
            or self.reward is None
            or not self.reward.scored_early()
        ):
            return None
        self._early[place] = EarlyScores(self.reward, self.prompt_column)
        return self._early[place]

    def _give_up(self, node: str, early: EarlyScores) -> None:
        """Close early scores that were not used, and score no more responses of this node before all have ended."""
        early.close()
        self.scored_as_made -= {node}

    def _cut_off(self, now: Running, found: Tensor) -> None:
        if now.cut_off is not None:
            raise UserError(
                f"node `{now.node.id}` samples twice, and `trainer.partial_rollout` continues the responses of one"
                " `generate`; sample once in it, or leave `trainer.partial_rollout` out"
            )
        now.cut_off = found

    def score(self, reward: Reward, rollout: WithTexts, name: str) -> tuple[Tensor, Parts]:
        """Score this rank's samples with a reward; a collective of the node's ranks, which compare the parts' names.

        It logs `<name>/mean`, of a mixture `<name>/<dataset>/mean`, `<name>/<part>`, `<name>/errors` and the reward's
        own metrics, and passes scores on for `samples.jsonl`. Samples that the reward fails on and drops are marked on
        all ranks of the node; they count neither in the means of the reward and its parts nor in what the node logs
        afterwards.

        Returns:
            The reward of each sample `[B]`, and its parts by name, `[B]` each. A part is 0 where it does not apply.

        Raises:
            UserError: On all ranks of the node: the reward failed on a sample and its `on_error` is `raise`, or two
                ranks have different parts; or the reward drops samples, and the node does not read `WithTexts` and
                return a value for each row.
        """
        now = self._outside_training("reward_function")
        drops = reward.drops and now.node.makes_value and not now.validates
        if drops and not scores_rows(now.node):
            raise UserError(
                f"node `{now.node.id}` scores responses ({now.node.place}), and {reward} drops samples that it fails"
                " on, which train nodes would not notice; score in a node that reads `rollout: WithTexts` and"
                " returns PerSample, or set `on_error` to raise or zero"
            )
        scores = self._scores(reward, self.reward_input(rollout, now.metrics.step, now.draw), now)
        if drops:
            (path,) = (value for value in vars(rollout).values() if isinstance(value, RowPath))
            mine = on_host(path.numbers)[list(scores.dropped)]
            of_ranks = self.transport.all_gather_ragged(mine.flatten(), now.layout.ranks)
            now.space.drop(torch.cat([each.view(-1, path.depth) for each in of_ranks]))
            here = now.space.held(now.layout, self.transport.rank)
            now.dropped = now.space.dropped[here]  # for what the node logs from here on
        given = next((on_host(returns).tolist() for rows, returns in now.returned if rows is rollout), None)
        self.on_scores(now.metrics.step, rollout, scores if given is None else scores.plus("environment", given))
        totals = torch.tensor(scores.total, dtype=self.dtype)
        kept = self.kept(totals)
        self.log(f"{name}/mean", totals, kept)
        for dataset, of_it in self.masks(rollout.rows).items():
            self.log(f"{name}/{dataset}/mean", totals, of_it if kept is None else of_it & kept)
        parts: dict[str, Tensor] = {}
        for part_name, of_part in scores.parts.items():
            applies = torch.tensor([each is not None for each in of_part], dtype=torch.bool)
            parts[part_name] = torch.tensor([each or 0.0 for each in of_part], dtype=self.dtype)
            self.log(f"{name}/{part_name}", parts[part_name], applies if kept is None else applies & kept)
        if self._speaks(now):
            now.metrics.sum(f"{name}/errors", float(len(scores.failed)))
            for part_name, values in scores.metrics.items():
                now.metrics.mean(f"{name}/{part_name}", float(sum(values)), float(len(values)))
        return on_device(totals, self.device), to_device(Parts(parts), self.device)

    def _scores(self, reward: Reward, responses: RewardInput, now: Running) -> Scores:
        """The scores of this rank's samples. Some may have been scored as they ended."""
        early = self._early.pop((now.node.inside, now.metrics.step), None)
        if early is None:
            return self.scores_of(reward, responses, now.layout.ranks)
        try:
            scores = self.scores_of(reward, replace(responses, begun=early.taken), now.layout.ranks)
        finally:
            if early.unused:
                self._give_up(now.node.inside, early)
        if self.transport.watch is not None:
            for name, start, end in early.spans():
                self.transport.watch.flight(name, start, end)
        return scores

    def reward_input(self, rollout: WithTexts, step: int, draw: int) -> RewardInput:
        """This rank's samples as a reward reads them, at a step and a draw counted from 0; no node needs to run.

        Token ids are computed only if the reward asks for them.
        """

        def token_ids() -> list[list[int]]:
            lengths = on_host(rollout.lengths).tolist()
            return [ids[:length] for ids, length in zip(on_host(rollout.response_ids).tolist(), lengths, strict=True)]

        state = self.trainer_state(step, draw)
        return RewardInput(rollout.texts, rollout.rows, self.prompt_column, rollout.messages, token_ids, state)

    def scores_of(self, reward: Reward, responses: RewardInput, ranks: tuple[int, ...]) -> Scores:
        """Score this rank's samples; a collective of `ranks`, which compare the names of the parts.

        A rank without samples, or whose samples all failed, gets the parts of the others, so that all log the same
        names. No node needs to run.

        Raises:
            UserError: On all of these ranks: scoring failed on one, or two have different parts.
        """
        failure: UserError | None = None
        try:
            scores = reward.settled(scored(reward, responses), responses)
        except UserError as error:
            scores, failure = Scores([]), error
        failed_all = len(scores.failed) == len(scores.total)  # as where there are no samples
        here = {
            "problem": str(failure or ""),
            "parts": None if failed_all and not scores.parts else sorted(scores.parts),
        }
        of_ranks = self.transport.gather_json(here, ranks)
        for rank in of_ranks:
            if rank["problem"]:
                raise UserError(rank["problem"]) from failure
        known = [rank["parts"] for rank in of_ranks if rank["parts"] is not None]
        for names in known:
            if other := sorted(set(names) ^ set(known[0])):
                raise UserError(
                    f"{reward} gave part `{other[0]}` for some samples and not for others; return the same parts for"
                    " every response"
                )
        names = known[0] if known else []
        return replace(scores, parts={name: scores.parts.get(name, [0.0] * len(scores.total)) for name in names})

    def returned(self, rollout: WithTexts, name: str, alone: bool) -> Tensor:
        """`[B]`, what environments gave each conversation, summed over its turns; logged as `<name>/environment`.

        If the module has no reward (`alone`), it is logged as `<name>/mean` too. If the node scores the same object
        after this, `samples.jsonl` has the sum of both.
        """
        now = self._outside_training("environment_returns")
        returns = rollout.returns.sum(dim=1)
        self.log(f"{name}/environment", returns, None)
        now.returned.append((rollout, returns))
        if alone:
            self.log(f"{name}/mean", returns, None)
            self.on_scores(now.metrics.step, rollout, Scores(on_host(returns).tolist()))
        return returns

    def log(
        self, name: str, x: Tensor, mask: Tensor | None, how: MetricOptions = MEAN, batch_size: int | None = None
    ) -> None:
        """Add this rank's entries to a metric over all ranks, which is made when the step's metrics are reduced.

        Of a mean, sum and count are added up separately, so every row has the same weight:

            rank 0 logs [1.0, 3.0] and rank 1 logs [8.0]: (1 + 3 + 8) / 3 = 4.0

        `x` is `[B]`, `[B, T]` or 0-dim. `mask`, shaped as `x`, is nonzero on entries that count; without one all do. Of
        a `[B]` dropped rows never count. A mean of 0-dim counts `batch_size` times, by default once for each row; if
        that is 0, 0-dim is not logged.
        """
        now = self._now()
        if how.by_module and self._validated.setdefault(name, now.validates) != now.validates:
            raise UserError(f"`self.log` has {name!r} in `validation_step` and in a node; take two names")
        times = 1 if x.dim() else self._rows(now) if batch_size is None else batch_size
        if not times or not self._speaks(now):  # 0-dim without rows is NaN, or means nothing
            return
        if x.dim() == 1 and (kept := self.kept(x)) is not None:
            mask = kept if mask is None else mask.bool() & kept
        x, largest = x.detach().double(), how.kind in ("largest", "smallest")
        x = -x if how.kind == "smallest" else x
        counted = x if mask is None else x.where(mask.bool(), -math.inf if largest else 0.0)
        count = float(x.numel()) if mask is None else mask.bool().sum()
        if largest:
            now.metrics.add(name, how, counted.max() if x.numel() else -math.inf, count)
        elif x.dim() or how.kind == "sum":
            now.metrics.add(name, how, counted.sum(), count if how.kind == "mean" else 1.0)
        else:
            now.metrics.add(name, how, counted * times, count * times)

    def learn_names(self, metrics: Metrics) -> None:
        """Note which metrics modules want on the bar and off the loggers; called on all ranks with the same metrics."""
        self.on_bar |= metrics.on_bar()
        self.off_loggers |= metrics.off_loggers()

    def _rows(self, now: Running) -> int:
        """Number of rows that this rank has of the node, or of the micro-batch that a train node is called with."""
        return len(now.space.held(now.layout, self.transport.rank)) if now.rows is None else len(now.rows)

    @property
    def validates(self) -> bool:
        """Whether `validation_step` runs, in place of a node of the graph."""
        return self._now().validates

    def kept(self, x: Tensor) -> Tensor | None:
        """`[B]` bool on the device of `x`, the rows that were not dropped.

        None where the node has no dropped rows, or `x` has another number of rows than the node or its micro-batch.
        """
        now = self._now()
        dropped = now.dropped if now.dropped is None or now.rows is None else now.dropped[now.rows]
        return None if dropped is None or len(x) != len(dropped) else on_device(~dropped, x.device)

    def of_each_shard(self, x: Tensor) -> Tensor:
        """`[shards, ...]`, one tensor for each shard of the node's rows; a collective of the node's ranks.

        `x` has the same shape on all ranks. Where ranks hold the same rows, the tensor of the first is returned.
        """
        now = self._outside_training("a number over all rows")
        return torch.stack(self.transport.all_gather(x, now.layout.ranks)[:: now.layout.copies])

    def all_rows(self, x: AllRows) -> AllRows:
        """The entries of all ranks' rows, the same on every rank; a collective of the node's ranks.

        `x` is `[B, ...]`, with the same shape after B on all ranks, or `Ragged`; the result has `N` rows, in the order
        of their paths. Where rank 0 has the rows 4 0 and 7 1 (sample 1 of prompt 7), and rank 1 the rows 4 1 and 7 0:

            x          [0.1, 0.4] on rank 0, [0.2, 0.3] on rank 1
            returned   [0.1, 0.2, 0.3, 0.4] on both
        """
        now = self._outside_training("all_rows")
        if isinstance(x, Ragged):
            return self._all_ragged(now, x)
        return now.space.gathered(now.layout, x, self.transport, now.layout.ranks)

    def _all_ragged(self, now: Running, x: Ragged) -> Ragged:
        ranks = now.layout.ranks
        lengths = [on_host(each) for each in self.transport.all_gather_ragged(x.lengths, ranks)]
        values = self.transport.all_gather_ragged(x.values, ranks)
        whole = Ragged(torch.cat(values), torch.cat(lengths))
        numbers = torch.arange(len(whole)).split([len(each) for each in lengths])
        return whole.take(now.space.in_order(now.layout, list(numbers)))

    def dataset_rows(self, group: Tensor) -> Tensor:
        """`[B]` int64, the places in the dataset, from 0, of the prompts with the ids `group` `[B]`.

        The number for a dropped row (its group is `NO_GROUP`) has no meaning. It raises `UserError` in validation, and
        if these are groups of rows below samples.
        """
        now = self._outside_training("dataset_rows")
        if now.validates:
            raise UserError(
                "`dataset_rows` was called in validation, whose prompts are not those of the training rows; call it in"
                " a node"
            )
        _require_prompts("dataset_rows", group)
        known = on_host(group).masked_fill(on_host(group) == NO_GROUP, 0)  # of what was dropped nothing counts
        return on_device(self.rows_of(known), group.device)

    def remember(self, memory: str, group: Tensor, x: Tensor) -> None:
        """Note numbers `x` `[B]` of the prompts `group` `[B]` for the `PromptMemory` that the module has as `memory`.

        It learns them on all ranks at the end of the step. Dropped rows, whose group is `NO_GROUP`, are left out. It
        raises `UserError` where `dataset_rows` does.
        """
        now = self._outside_training("a PromptMemory")
        _require_prompts(f"`{memory}`", group)
        if now.validates:
            raise UserError(f"`{memory}` was updated in validation, whose prompts are others; update it in a node")
        if not self._speaks(now):
            return
        known = on_host(group) != NO_GROUP
        places = now.space.held(now.layout, self.transport.rank)[known]
        rows = [part.double() for part in (places, self.rows_of(on_host(group)[known]), x.detach().cpu()[known])]
        place = list(self.writers).index(now.node.id)
        self.memories.add(memory, now.metrics.step, now.draw, place, torch.stack(rows))

    def _now(self) -> Running:
        assert self.running is not None, "no node is running"
        return self.running

    def _speaks(self, now: Running) -> bool:
        return now.layout.is_leader(self.transport.rank)  # of several peers one, so each row counts once

    def _outside_training(self, what: str) -> Running:
        now = self._now()
        if now.node.kind == "train":
            raise UserError(
                f"train node `{now.node.id}` calls for {what}; a train node runs per micro-batch, which other ranks"
                " do not take part in. Compute it in a node without type='train'"
            )
        return now


def _sampled_at(temperature: float, rollout: Rollout) -> Rollout:
    """The rows with the temperature at which a call sampled them; a copy of an ended response keeps its own."""
    grown = rollout.lengths > rollout.inherited
    return replace(rollout, temperature=rollout.temperature.masked_fill(grown, temperature))


def _mixed_marked(made: Rollout, before: Mapping[tuple[int, ...], float], own: float) -> Rollout:
    """The rows; the temperature of a response is NaN if its tokens were sampled at several.

    Args:
        made: Continuations, on the CPU.
        before: Temperatures of the continued rows, by path.
        own: Temperature of the policy, for which 0 stands in a row.
    """
    begun = torch.tensor([before[tuple(path[:-1])] for path in made.path.numbers.tolist()], dtype=torch.float64)
    was, now = (each.masked_fill(each == 0, own) for each in (begun, made.temperature))
    grown = (made.lengths > made.inherited) & (made.inherited > 0)
    return replace(made, temperature=made.temperature.masked_fill(begun.isnan() | (grown & (was != now)), torch.nan))


def _require_prompts(asked: str, group: Tensor) -> None:
    """Refuse groups of rows below samples: only those of prompts are known outside of a step."""
    if bool(((on_host(group) < 0) & (on_host(group) != NO_GROUP)).any()):
        raise UserError(
            f"{asked} was given groups of rows that answer samples, and knows prompts; give `group_of('batch')` of them"
        )


KEYS = 4  # by which what is remembered is ordered: the draw, the node's place in the graph, its call, the row's place
COLUMNS = KEYS + 2  # then the prompt's place in the dataset, and the number itself


class MemoryUpdates:
    """Numbers for `PromptMemory` objects from this rank's nodes, by step, until ranks exchange them at the step's end.

    Args:
        transport: Transport to the other ranks.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        # By step, then by memory, draw and node: `[COLUMNS, B]` float64 of each call.
        self._given: dict[int, dict[tuple[str, int, int], list[Tensor]]] = {}

    def add(self, memory: str, step: int, draw: int, node: int, rows: Tensor) -> None:
        """Note the numbers of one call of `PromptMemory.update`; no other rank takes part.

        Args:
            memory: Name of the memory.
            step: Number of the step.
            draw: Number of the draw of prompts that the node ran on.
            node: The node's place in the order of the graph.
            rows: `[3, B]` float64: each row's place among the rows of all ranks, its prompt's place in the dataset, and
                the number.
        """
        calls = self._given.setdefault(step, {}).setdefault((memory, draw, node), [])
        key = rows.new_tensor([draw, node, len(calls)])[:, None]
        calls.append(torch.cat([key.expand(-1, rows.shape[1]), rows]))

    def learn(self, memories: Mapping[str, PromptMemory], step: int) -> None:
        """Let memories learn the numbers from the nodes of all ranks in a step; a collective of all ranks of the run.

        Numbers are learned by draw, then node, then call of the node, then row: the same on any number of ranks.
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

    def state_dict(self) -> dict[str, Any]:
        """The numbers of steps in progress, JSON-able."""
        given = [
            {"step": step, "key": key, "calls": [rows.tolist() for rows in calls]}
            for step, of_step in self._given.items()
            for key, calls in of_step.items()
        ]
        return {"given": given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Add the numbers that `state_dict` returned; called for each rank's state if this rank gets several."""
        for stored in state["given"]:
            calls = [torch.tensor(rows, dtype=torch.float64).view(COLUMNS, -1) for rows in stored["calls"]]
            memory, draw, node = stored["key"]
            of_step = self._given.setdefault(stored["step"], {})
            of_step.setdefault((memory, draw, node), []).extend(calls)  # several ranks' where there are fewer now
