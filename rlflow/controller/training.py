"""`Training` runs a train node: epochs, mini-batches over all ranks, micro-batches on each, one loss denominator."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlflow.controller.run import Run
from rlflow.controller.step import Step
from rlflow.dag.node import Node
from rlflow.dag.tasks import TrainNode
from rlflow.errors import UserError
from rlflow.functional import Episodes, loss_count, loss_sum, loss_weights, tokens_of
from rlflow.metrics import StepMetrics
from rlflow.models.handle import ModelHandle
from rlflow.module import aggregation_of
from rlflow.process import preemption
from rlflow.rollout.sampling import sampling_seed
from rlflow.strategies.role import LossScale
from rlflow.values.batch import Pairs
from rlflow.values.column_kinds import PerSample
from rlflow.values.columns import countable, take_rows
from rlflow.values.each import After
from rlflow.values.host_copy import bring_over, on_device, on_host, remember, rows_at
from rlflow.values.layout import Layout
from rlflow.values.ragged import Ragged

NORMS = 32  # number of last updates with a gradient whose median norm later norms are compared with
FEWEST = 8  # number of norms that are needed before one counts as too large


class StepGivenUp(BaseException):
    """A rank received a signal before the step's first update. All ranks raise this, and no weight has changed.

    It is raised only if every train node runs on all ranks of the run, which then exchange counts before each update.

    Args:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Training:
    """Runs train nodes so that the gradient depends on neither micro-batches, packing, ranks nor ZeRO stage.

    The masked loss of every micro-batch is divided by the token (or sample) count of the whole mini-batch over all
    ranks and micro-batches. Ranks exchange this count before the first backward pass. For example, with `token-mean`, a
    mini-batch has 10 tokens in three micro-batches. Their token losses sum to s1 and s2 on rank 0, and to s3 on rank 1.
    The gradient is that of

        s1 / 10 + s2 / 10 + s3 / 10

    Args:
        run: The run on this rank.
        before_update: Callback with the name of a role, just before its weights change.

    Attributes:
        tried: Number of updates in the last step by role, with those that were skipped or had no token to learn from.
        watch: Decides which updates are skipped, and when too many were.
    """

    def __init__(self, run: Run, before_update: Callable[[str], None]) -> None:
        self._run = run
        self._module = run.module
        self._graph = run.graph
        self._strategy = run.strategy
        self._transport = run.transport
        self._before_update = before_update
        # A step can be given up before its first update only if all ranks of the run exchange counts before each.
        trained = [task for task in run.plan.every() if isinstance(task, TrainNode)]
        self._gives_up = all(len(task.ranks) == run.transport.world_size for task in trained)
        self._at_first_update: Callable[[], None] | None = None
        self.tried: Counter[str] = Counter()
        self.watch = UpdateWatch(run.settings.grad_norm_spike_limit, run.settings.max_skipped)
        if run.replays:
            self.watch = UpdateWatch(most=sys.maxsize)

    def begin(self, at_first_update: Callable[[], None]) -> None:
        """Begin a step; called by `Controller.step`.

        Args:
            at_first_update: Callback before the step's first update on this rank; not called if the step is given up.
        """
        self.tried.clear()
        self._at_first_update = at_first_update

    def begun(self, node: Node, step: int) -> bool:
        """Whether the role is trained at this step, counted from 0: from its handle's `start_step` on."""
        assert node.role is not None
        handle: ModelHandle = getattr(self._module, node.role)
        return step >= handle.start_step

    def run(
        self, node: Node, values: Mapping[str, Any], step: Step, layout: Layout, dropped: Tensor | None = None
    ) -> None:
        """Run all epochs and mini-batches of one train node in one step; called by all ranks of the role.

        Each mini-batch is one update. Ranks exchange counts. For each micro-batch the node's method returns a loss
        `[B, T]` or `[B]`, which is backpropagated. Then gradients are clipped, and the optimizer updates the weights.
        Later epochs shuffle the mini-batches. All ranks make as many micro-batches as the rank that needs most, so that
        their collectives match.

        Args:
            node: The train node.
            values: This rank's rows in `layout`, by the node's parameters.
            step: The step, whose metrics get `<role>/loss`, `<role>/grad_norm` and the like.
            layout: Layout of the rows; its `samples_per_update` is the size of a mini-batch over all ranks.
            dropped: `[B]` bool on the CPU, this rank's rows that count in no loss; None if there are none.

        Raises:
            StepGivenUp: A rank received a signal before the step's first update.
            UserError: The loss has another shape than the mask, or too many updates in a row were skipped.
        """
        assert node.role is not None
        seed, rank = self._run.settings.seed, self._transport.rank
        handle: ModelHandle = getattr(self._module, node.role)
        if handle.lora is not None and handle.lora.dropout > 0:
            torch.manual_seed(sampling_seed(seed, step.number, node.id, (0,), rank))
        self._strategy.roles[node.role].step = step.number - handle.start_step
        bring_over(each for name, value in values.items() for each in countable(value, self._graph.type_of(name)))
        space = step.spaces[node.inside]
        mini_batches = space.held_mini_batches(layout, rank)
        episodes: Episodes | None = None
        if aggregation_of(self._module, handle) == "episode-mean":  # whose rows may be on several ranks
            tokens = tokens_of(on_host(_mask(_scored(values), dropped, per_sample=node.returns == PerSample)))
            of_all = space.gathered(layout, tokens, self._transport, layout.ranks)
            episodes = Episodes.of(of_all, space.episodes).take(space.held(layout, rank))
        self.tried[node.role] += handle.epochs * len(mini_batches)
        for epoch in range(handle.epochs):
            for number in self._order(len(mini_batches), step.number, epoch):
                rows = mini_batches[number]
                self._update(node, handle, values, rows, dropped, episodes, layout, step.metrics, epoch > 0)
        for average in self._graph.changed_by(node)[1:]:
            self._before_update(average)
            self._strategy.move_average(average)

    def _order(self, count: int, step: int, epoch: int) -> list[int]:
        if epoch == 0:
            return list(range(count))
        generator = torch.Generator().manual_seed(sampling_seed(self._run.settings.seed, step, "epoch", (epoch,), 0))
        order: list[int] = torch.randperm(count, generator=generator).tolist()
        return order

    def _update(
        self,
        node: Node,
        handle: ModelHandle,
        values: Mapping[str, Any],
        rows: Tensor,
        dropped: Tensor | None,
        episodes: Episodes | None,
        layout: Layout,
        metrics: StepMetrics,
        again: bool,
    ) -> None:
        assert node.role is not None
        role, longest = node.role, self._module.max_response_length
        mode = aggregation_of(self._module, handle)
        mini = self._take(values, rows)
        scored = _scored(mini)
        out = None if dropped is None else dropped[rows]
        mask = _mask(scored, out, per_sample=node.returns == PerSample)
        of_episodes = None if episodes is None else episodes.take(rows)
        counted = on_host(mask) if out is None else on_host(mask)[~out]  # `constant` counts rows without a token too
        here = (
            int(loss_count(counted, mode, of_episodes)),
            int(on_host(mask).sum()),
            0 if out is None else int(out.sum()),
            len(rows),
            _sequences(scored),
        )
        prompts = [mini[name] for name in mini if self._graph.type_of(name) is Ragged]  # other prompts of the rows
        parts = handle.plan.split(scored, prompts=prompts)
        total, learnt_from, of_dropped, of_all, sequences, most, asked = self._agree(here, len(parts), layout)
        if 0 < of_dropped == of_all and not again:  # counted in one epoch: all drop the same rows
            self.watch.note_dropped(role, metrics)
        if learnt_from == 0:
            return  # on all ranks
        if self._at_first_update is not None:
            if asked and self._gives_up:
                raise StepGivenUp(asked)
            self._at_first_update()
            self._at_first_update = None
        method = getattr(self._module, node.id)
        loss_here: Tensor | float = 0.0  # float64, on the device
        balance_here: Tensor | None = None  # the load-balancing loss of experts, float64, on the device
        if most > len(parts):
            parts = handle.plan.split(scored, most, prompts)
        running = self._run.context.running
        assert running is not None
        for part, micro in enumerate(parts):
            running.rows = rows[micro]
            with handle.training():
                loss = method(**self._take(mini, micro), **dict.fromkeys(node.after, After()))
            counts = rows_at(mask, micro)
            _check_shape(node, loss, counts)
            of_micro = None if of_episodes is None else of_episodes.take(micro)
            share = loss_sum(loss, loss_weights(counts, mode, longest, of_micro)) / total
            loss_here = loss_here + share.detach().double()
            uneven, otherwise, replayed = handle.take_routed()
            if uneven is not None:
                share = share + uneven / sequences
                balance = uneven.detach().double() / sequences
                balance_here = balance if balance_here is None else balance_here + balance
            if replayed:
                metrics.mean(f"{role}/routed_otherwise", otherwise, float(replayed))
            self._strategy.backward(role, share, last=part == most - 1)
        self._before_update(role)
        if layout.is_leader(self._transport.rank):  # shares of all shards add up to the update's loss
            once = 1.0 if self._transport.rank == layout.ranks[0] else 0.0
            metrics.mean(f"{role}/loss", loss_here, once)
            if balance_here is not None:
                metrics.mean(f"{role}/router_aux_loss", balance_here, once)
        largest = self.watch.largest(role)
        norm = self._strategy.step(role, largest)
        for group, rate in self._strategy.roles[role].learning_rates.items():
            metrics.number(f"{role}/lr{group}", rate)
        self.watch.note(role, norm, largest, self._strategy.roles[role].loss_scale, metrics)

    def _take(self, values: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
        return {name: take_rows(value, self._graph.type_of(name), rows) for name, value in values.items()}

    def _agree(self, counts: tuple[int, int, int, int, int], micro_batches: int, layout: Layout) -> tuple[int, ...]:
        """Exchange counts before an update; a collective of the ranks of `layout`.

        `counts` has five numbers for this rank's rows of the mini-batch: the loss's denominator, entries in the mask,
        dropped rows, rows, and sequences. Returns their sums over shards, the largest `micro_batches` of any rank, and
        the signal that a rank received, or 0.
        """
        here = torch.tensor([*counts, micro_batches, preemption.received()])
        every = torch.stack(self._transport.all_gather(here, layout.ranks))  # [ranks, 7]
        summed = every[:: layout.copies, :5].sum(dim=0).tolist()
        return (*summed, *every[:, 5:].amax(dim=0).tolist())


@dataclass
class UpdateWatch:
    """Decides which updates are skipped, and ends the run if too many were; all ranks see the same norms.

    With `grad_norm_spike_limit: 10` and norms of about 0.5 in the last updates, an update with the norm 7 is skipped.

    Attributes:
        times: `trainer.grad_norm_spike_limit`: a norm above this multiple of the median of the role's last norms is too
            large. None to skip only infinite and NaN norms.
        most: `trainer.max_skipped`: this number of skipped updates of a role in a row ends the run.
    """

    times: float | None = None
    most: int = 3
    _skipped: Counter[str] = field(default_factory=Counter)  # number of updates skipped in a row, by role
    _norms: dict[str, deque[float]] = field(default_factory=dict)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Norms with which the next is compared, and number of updates skipped in a row, by role; JSON-able."""
        roles = sorted({*self._norms, *self._skipped})
        return {role: {"norms": [*self._norms.get(role, ())], "skipped": self._skipped[role]} for role in roles}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore what `state_dict` returned."""
        for role, of in state.items():
            self._norms[role] = deque(of["norms"], maxlen=NORMS)
            self._skipped[role] = of["skipped"]

    def largest(self, role: str) -> float:
        """The largest gradient norm that is not skipped; infinite without `times`, or before `FEWEST` norms."""
        norms = self._norms.setdefault(role, deque(maxlen=NORMS))
        if self.times is None or len(norms) < FEWEST:
            return math.inf
        return self.times * statistics.median(norms)

    def note(self, role: str, norm: float, largest: float, scale: LossScale | None, metrics: StepMetrics) -> None:
        """Log an update and count it as made or skipped: skipped if `norm` is above `largest`, infinite or NaN.

        Args:
            role: The role that is trained.
            norm: Norm of the role's whole gradient before clipping, the same on all ranks.
            largest: Value that `largest` returned before the update.
            scale: Loss scale of a float16 role; overflows are not counted while it can fall. None for other roles.
            metrics: Metrics of the step.

        Raises:
            UserError: `most` updates of the role in a row were skipped.
        """
        if scale is not None:
            metrics.number(f"{role}/loss_scale", scale.factor)
        if math.isfinite(norm):
            metrics.number(f"{role}/grad_norm", norm)
            if norm <= largest:
                self._skipped[role] = 0
                if norm > 0:  # it is 0 if all advantages are
                    self._norms.setdefault(role, deque(maxlen=NORMS)).append(norm)
                return
        metrics.number(f"{role}/skipped_updates", 1.0)
        if scale is not None and scale.can_fall:  # the next update has a smaller scale
            return
        how = f"{norm:.3g}, where up to {largest:.3g} is usual," if math.isfinite(norm) else "infinite or NaN"
        remedy = "Lower the learning rate, or look for NaN in rewards and loss"
        self._count(role, f"the gradient of `{role}` was {how}", remedy)

    def note_dropped(self, role: str, metrics: StepMetrics) -> None:
        """Count an update as skipped because a reward failed on all of its samples, so that they were dropped.

        Args:
            role: The role that is trained.
            metrics: Metrics of the step.

        Raises:
            UserError: `most` updates of the role in a row were skipped.
        """
        metrics.number(f"{role}/skipped_updates", 1.0)
        self._count(role, f"the reward of `{role}` failed on all samples", "Correct the reward")

    def _count(self, role: str, what: str, remedy: str) -> None:
        """Count one more update that was skipped in a row; end the run if there are too many."""
        self._skipped[role] += 1
        if self._skipped[role] >= self.most:
            raise UserError(
                f"{what} in {self._skipped[role]} updates in a row, which were skipped; what was saved before is still"
                f" there. {remedy}"
            )


def _check_shape(node: Node, loss: Tensor, mask: Tensor) -> None:
    if loss.shape != mask.shape:
        raise UserError(
            f"train node `{node.id}` returned a loss of shape {list(loss.shape)} for {list(mask.shape)};"
            " return one number per token, or per sample where it is annotated PerSample"
        )


def _scored(values: Mapping[str, Any]) -> Any:
    """The one value that has a loss mask or is `Pairs`, whose rows the loss has; checked with the graph."""
    (found,) = [value for value in values.values() if isinstance(value, Pairs) or _has_mask(value)]
    return found


def _sequences(scored: Any) -> int:
    """Number of sequences that a model reads for these rows: rows with a response token, or two for each pair."""
    return 2 * len(scored.prompt_ids) if isinstance(scored, Pairs) else int((on_host(scored.lengths) > 0).sum())


def _has_mask(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and "loss_mask" in {each.name for each in dataclasses.fields(value)}


def _mask(scored: Any, dropped: Tensor | None, per_sample: bool) -> Tensor:
    """The mask of the loss: tokens `[B, T]`, or samples `[B]` that have a token; for pairs, those not dropped.

    Dropped rows of other values need no mask here, since their `loss_mask` is empty already.
    """
    if isinstance(scored, Pairs):
        counts = torch.ones(len(scored.prompt_ids), dtype=torch.bool) if dropped is None else ~dropped
        return on_device(counts, scored.prompt_ids.lengths.device)
    mask: Tensor = scored.loss_mask
    return remember(mask.any(dim=1), on_host(mask).any(dim=1)) if per_sample else mask
