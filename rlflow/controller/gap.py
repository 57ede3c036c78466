"""The gap between rollout and training logprobs: the alarm for stale or wrong weights in the rollout engine."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from rlflow.controller.run import Run
from rlflow.dag.tasks import SyncWeights
from rlflow.errors import UserError
from rlflow.metrics import StepMetrics
from rlflow.models.causal_lm import CausalLM
from rlflow.module import handles
from rlflow.rollout.engine import Completion, Sampling
from rlflow.rollout.sampling import sampling_seed
from rlflow.values.batch import TokenRows
from rlflow.values.columns import to_device
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Rollout

GAP = "sync/logprob_gap"  # the one policy's; with several, each by its name: `sync/logprob_gap/solver`
LARGEST_GAP = "sync/logprob_gap_max"
UNCERTAIN_GAP = "sync/logprob_gap_uncertain"
SPREAD = "sync/logprob_spread"
# Sums over the tokens compared, from which the last two figures are computed and which no logger sees: their number,
# 1 - probability, and both sides' logprobs and squares.
SUMS = tuple(f"sync/{name}" for name in ("tokens", "uncertain", "trainer", "trainer_square", "engine", "engine_square"))

STEPS = 16  # whose gaps are remembered
TIMES = 3.0  # so many times their median is a fault; a healthy gap of an uncertain token stays within 1.5 times
OFF = 0.03  # so far from 1 is a spread that is a fault; it is about the trainer's temperature over the engine's
SMALLEST_VARIANCE = 1e-4  # of logprobs, below which rounding is what spreads them
SMALLEST = {torch.float64: 1e-4, torch.float32: 1e-4}  # gaps of an uncertain token that are no fault; else 1e-3
PROBES = 4  # responses that a probe compares
TOKENS = 8  # of each of them, at most


class LogprobGap:
    """Compares the engine's logprobs of its tokens with the trainer's, at equal weights.

    It watches the followed role's forward passes from the rollout until that role's first update, and takes the first
    over each of this rank's rows; of these, rows that other weights generated do not count.

    Three figures are a fault: a mean above a limit that holds for every model; a gap that is several times that of the
    steps before; and logprobs of the engine that spread more or less than the trainer's. The second and the third see
    what the first cannot in bfloat16, where a healthy gap depends on the model. The second is of uncertain tokens: a
    token of probability p counts 1 - p, for rounding moves a logprob by about that share of what it moves a logit by,
    so that neither entropy nor the certain tokens of a trained policy show in it.

    Args:
        limit: Largest mean |logprob - rollout logprob| over all tokens of a step; above it the run stops. None takes
            the limit of `dtype`, and watches the other two figures too.
        dtype: Dtype of the trainer's numbers.
        policy: Name of the policy, where there are several.
        made_by: The nodes whose rows this policy alone generates; None for all rows.
        engine: Name of the engine's class; a gap is compared only with those of the same class.
    """

    def __init__(
        self,
        limit: float | None,
        dtype: torch.dtype,
        policy: str = "",
        made_by: Collection[str] | None = None,
        engine: str = "",
    ) -> None:
        self._limit = default_gap_limit(dtype) if limit is None else limit
        self._watches_more = limit is None
        self._smallest = SMALLEST.get(dtype, 1e-3)
        self._policy = policy
        self._made_by = made_by
        self._kind = f"{dtype}, {engine}"
        self._metrics: StepMetrics | None = None
        self._version: int | None = None  # while watching
        self._compared = False  # whether a number was taken since `open`
        self._healthy: deque[tuple[float, float]] = deque(maxlen=STEPS)  # gap of uncertain tokens, and how many

    def state_dict(self) -> dict[str, Any]:
        """What the next step is compared with; JSON-able and the same on every rank."""
        return {"of": self._kind, "steps": [list(step) for step in self._healthy]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave, unless it is of another dtype or engine."""
        if state["of"] == self._kind:
            self._healthy.extend((gap, uncertain) for gap, uncertain in state["steps"])

    def open(self, version: int, metrics: StepMetrics) -> None:
        """Begin to compare: from now on the trainer has the weights of `version`, which the engine generates with.

        Args:
            version: Version of the weights.
            metrics: Metrics of the step whose rows are compared.
        """
        self._version, self._metrics, self._compared = version, metrics, False

    def close(self, if_compared: bool = False) -> None:
        """Compare no more: the trainer's weights are about to change; or, `if_compared`, once rows were compared."""
        if self._compared or not if_compared:
            self._version = None

    def observe(self, rows: Any, logprobs: Tensor) -> None:
        """Compare the logprobs `[B, T]` of a forward pass over `rows` with those that came with them."""
        if self._version is None or self._metrics is None or not isinstance(rows, Rollout):
            return
        if self._made_by is not None and rows.path.levels[-1] not in self._made_by:
            return
        self._compared = True
        self.record(self._metrics, logprobs, rows.logprobs, rows.loss_mask & (rows.version == self._version)[:, None])

    def record(self, metrics: StepMetrics, trainer: Tensor, engine: Tensor, mask: Tensor) -> None:
        """Compare logprobs `[B, T]` of equal weights where `mask` is true."""
        ours, theirs = (x.detach().double().where(mask, 0.0) for x in (trainer, engine))
        gap, uncertain = (ours - theirs).abs(), (1 - ours.exp()).sum()  # where masked, the logprob is 0
        metrics.mean(self._named(GAP), gap.sum(), mask.sum())
        metrics.largest(self._named(LARGEST_GAP), gap.max() if gap.numel() else 0.0)
        metrics.mean(self._named(UNCERTAIN_GAP), gap.sum(), uncertain)
        sums = mask.sum().double(), uncertain, ours.sum(), ours.square().sum(), theirs.sum(), theirs.square().sum()
        for name, of_all in zip(SUMS, sums, strict=True):
            metrics.sum(self._named(name), of_all)

    def check(self, reduced: dict[str, float]) -> None:
        """Stop the run if the step's figures are a fault, else remember them.

        Args:
            reduced: The step's metrics, the same on every rank; gets the spread in place of what it is made of.

        Raises:
            UserError: The engine did not generate with the trainer's weights.
        """
        sums = [reduced.pop(self._named(name), 0.0) for name in SUMS]
        found = reduced.get(self._named(GAP))
        if found is None:
            return  # nothing was compared
        tokens, uncertain, *moments = sums
        spread = _spread(tokens, moments)
        if spread is not None:
            reduced[self._named(SPREAD)] = spread
        if not found <= self._limit:  # NaN is a gap too
            self._refuse(f"differ by {found:.3g} on average, more than `trainer.logprob_gap_limit` = {self._limit:g}")
        if not self._watches_more or uncertain < 1:
            return
        if spread is not None and abs(spread - 1) > OFF + 0.5 / math.sqrt(uncertain):
            self._refuse(
                f"differ: the engine's spread {spread:.3g} times as much as the trainer's, as they do where the"
                " temperature is another"
            )
        self._compare(reduced[self._named(UNCERTAIN_GAP)], uncertain)

    def _compare(self, gap: float, uncertain: float) -> None:
        """Compare a gap with those of the steps before; a gap over few tokens varies more."""
        if self._healthy:
            usual = statistics.median(gap for gap, _ in self._healthy)
            before = sum(tokens for _, tokens in self._healthy)
            most = max(self._smallest, usual * (TIMES + 10 / math.sqrt(uncertain) + 10 / math.sqrt(before)))
            if gap > most:
                self._refuse(
                    f"differ by {gap:.3g} for an uncertain token, which is more than {most:.3g}, where they differed by"
                    f" {usual:.3g} in the steps before"
                )
        self._healthy.append((gap, uncertain))

    def _refuse(self, what: str) -> NoReturn:
        of = f" of `{self._policy}`" if self._policy else ""
        raise UserError(
            f"rollout and training logprobs{of} {what}: the rollout engine holds other weights than the trainer, or"
            " computes another model. Check the engine's version and dtype, or set `trainer.logprob_gap_limit`, which"
            " is then the only limit"
        )

    def _named(self, name: str) -> str:
        return f"{name}/{self._policy}" if self._policy else name


def _spread(tokens: float, moments: list[float]) -> float | None:
    """The engine's logprobs' standard deviation over the trainer's; None where the trainer's are all alike."""
    if not tokens:
        return None
    trainer, trainer_square, engine, engine_square = (of_all / tokens for of_all in moments)
    ours, theirs = trainer_square - trainer**2, engine_square - engine**2
    return math.sqrt(theirs / ours) if ours > SMALLEST_VARIANCE and theirs > SMALLEST_VARIANCE else None


def default_gap_limit(dtype: torch.dtype) -> float:
    """1e-3 in float32 and float64, where a healthy gap is 1e-6; 0.05 in bfloat16, where one is 0.005 to 0.02.

    In float16, whose numbers have 3 more bits than bfloat16's, 0.01.
    """
    return {torch.bfloat16: 0.05, torch.float16: 0.01}.get(dtype, 1e-3)


def probe(
    run: Run, task: SyncWeights, gap: LogprobGap, prompt: Sequence[int], version: int, metrics: StepMetrics
) -> None:
    """After a sync, let the engine write a few short responses, and compare its logprobs with the trainer's.

    Every rank of the role scores all rows: they are few, and scoring is a collective.

    Args:
        run: The run on this rank.
        task: The sync of the policy; called by all its ranks.
        gap: Records how much the two differ.
        prompt: Token ids, the same on every rank.
        version: Version of the weights that both have now.
        metrics: Metrics of the step.
    """
    handle, engine = handles(run.module)[task.policy], run.rank_engines.by_policy.get(task.policy)
    assert isinstance(handle, CausalLM)
    transport, ranks, prompts = run.transport, probing_group(task), [prompt] * PROBES
    completions: list[Completion] = []
    if engine is not None:
        seeds = [sampling_seed(run.settings.seed, version, "probe", (0,), index) for index in range(PROBES)]
        sampling = Sampling(min(TOKENS, run.module.max_response_length), handle.temperature)
        completions = engine.generate(prompts, seeds, sampling, version)
    if transport.rank not in ranks:
        return
    here = [(one.token_ids, one.logprobs) for one in completions]
    written = transport.broadcast_json(here, task.target[0], ranks)
    if transport.rank not in task.source:
        return
    lists = prompts, [tokens for tokens, _ in written]
    rows = TokenRows.padded(*(to_device(Ragged.from_lists(each), transport.device) for each in lists))
    mask = torch.arange(rows.response_ids.shape[1], device=transport.device) < rows.lengths[:, None]
    said = torch.zeros(mask.shape, dtype=torch.float64, device=transport.device)
    every = [p for _, logprobs in written for p in logprobs]
    said[mask] = torch.tensor(every, dtype=said.dtype, device=transport.device)
    gap.record(metrics, handle.logprobs(rows), said, mask)


def probing_group(task: SyncWeights) -> tuple[int, ...]:
    """The engine's first rank and the role's ranks."""
    return tuple(sorted({task.target[0], *task.source}))
