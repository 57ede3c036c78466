"""The gap between the engine's and the trainer's logprobs, which shows stale or wrong weights in the engine."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.controller.run import Run
from rlflow.dag.tasks import SyncWeights
from rlflow.errors import UserError
from rlflow.metrics import StepMetrics
from rlflow.models.causal_lm import CausalLM
from rlflow.module import handles
from rlflow.rollout.engine import Completion, Sampling, picture_argument
from rlflow.rollout.sampling import sampling_seed
from rlflow.values.batch import TokenRows
from rlflow.values.columns import to_device
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Rollout

log = logging.getLogger(__name__)

GAP = "sync/logprob_gap"  # for one policy; with several, one for each: `sync/logprob_gap/solver`
LARGEST_GAP = "sync/logprob_gap_max"
UNCERTAIN_GAP = "sync/logprob_gap_uncertain"
SPREAD = "sync/logprob_spread"
# Sums over the compared tokens, from which the last two figures are computed: the number of tokens, 1 - probability,
# and logprobs and their squares for trainer and engine. No logger receives them.
SUMS = tuple(f"sync/{name}" for name in ("tokens", "uncertain", "trainer", "trainer_square", "engine", "engine_square"))

STEPS = 16  # number of last steps whose gaps are remembered
TIMES = 3.0  # a gap above this multiple of their median is a fault; healthy gaps stay within 1.5 times the median
OFF = 0.03  # a spread this far from 1 is a fault; the spread is about the trainer's temperature over the engine's
SMALLEST_VARIANCE = 1e-4  # variance of logprobs below which rounding dominates, so no spread is computed
FAR = 10.0  # times the default limit, which ends a run also where other faults are only warned of
# Gaps up to this for an uncertain token are not a fault; 1e-3 for other dtypes.
SMALLEST = {torch.float64: 1e-4, torch.float32: 1e-4}
PROBES = 4  # responses that a probe compares
TOKENS = 8  # most tokens of each


class LogprobGap:
    """Compares the engine's logprobs of its tokens with the trainer's, at equal weights.

    It watches the forward passes of the policy's model from the rollout until the model's first update, and uses the
    first pass over each of this rank's rows. Rows that other weights generated do not count.

    The run stops for any of three faults:

    1. The mean gap is above a limit, which holds for every model.
    2. The gap of uncertain tokens is several times that of earlier steps. A token of probability p counts as 1 - p,
       since a rounding error of its logit changes its logprob by about 1 - p times that error. So this figure depends
       neither on the entropy nor on how many tokens of a trained policy are certain.
    3. The engine's logprobs spread more or less than the trainer's.

    In bfloat16 a healthy gap depends on the model, so the last two find faults that the first cannot.

    The thresholds were found on CPUs. So on another device a fault is a warning in the first `trial` steps, unless the
    limit was set, or the mean gap is far above the default one.

    Args:
        limit: Largest mean |logprob - rollout logprob| over all tokens of a step; above it the run stops. None takes
            the limit of `dtype`, and checks the other two figures too.
        dtype: Dtype of the trainer's numbers.
        policy: Name of the policy if there are several; else empty.
        made_by: The nodes whose rows only this policy generates; None for all rows.
        engine: Name of the engine's class; gaps are compared only with those of the same class.
        trial: Compared steps in which a fault is a warning.
        counts: Whether this rank's rows count: of ranks that have the same rows, those of the first alone do.
    """

    def __init__(
        self,
        limit: float | None,
        dtype: torch.dtype,
        policy: str = "",
        made_by: Collection[str] | None = None,
        engine: str = "",
        trial: int = 0,
        counts: bool = True,
    ) -> None:
        self._counts = counts
        self._limit = default_gap_limit(dtype) if limit is None else limit
        self._watches_more = limit is None
        self._smallest = SMALLEST.get(dtype, 1e-3)
        self._policy = policy
        self._made_by = made_by
        self._kind = f"{dtype}, {engine}"
        self._trial = trial if limit is None else 0
        self._metrics: StepMetrics | None = None
        self._version: int | None = None  # version of the weights that are compared; None while nothing is compared
        self._compared = False  # whether rows were compared since `open`
        self._healthy: deque[tuple[float, float]] = deque(maxlen=STEPS)  # gap of uncertain tokens, and their number

    def state_dict(self) -> dict[str, Any]:
        """The gaps of earlier steps, with which the next is compared; JSON-able and the same on every rank."""
        return {"of": self._kind, "steps": [list(step) for step in self._healthy], "trial": self._trial}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, unless it is of another dtype or engine."""
        if state["of"] == self._kind:
            self._healthy.extend((gap, uncertain) for gap, uncertain in state["steps"])
            self._trial = min(self._trial, state.get("trial", 0))

    def open(self, version: int, metrics: StepMetrics) -> None:
        """Begin to compare: from now on the trainer has the weights `version`, with which the engine generates.

        Args:
            version: Version of the weights.
            metrics: Metrics of the step whose rows are compared.
        """
        self._version, self._metrics, self._compared = version, metrics, False

    def close(self, if_compared: bool = False) -> None:
        """Stop comparing, since the trainer's weights are about to change, or because a node has scored rows.

        Args:
            if_compared: Whether to stop only if rows were compared since `open`.
        """
        if self._compared or not if_compared:
            self._version = None

    def observe(self, rows: Any, logprobs: Tensor) -> None:
        """Compare the logprobs `[B, T]` of a forward pass over `rows` with the engine's, which the rows have."""
        if self._version is None or self._metrics is None or not isinstance(rows, Rollout):
            return
        if self._made_by is not None and rows.path.levels[-1] not in self._made_by:
            return
        self._compared = True
        self.record(self._metrics, logprobs, rows.logprobs, rows.loss_mask & (rows.version == self._version)[:, None])

    def record(self, metrics: StepMetrics, trainer: Tensor, engine: Tensor, mask: Tensor) -> None:
        """Compare logprobs `[B, T]` of equal weights where `mask` is True."""
        if not self._counts:
            return
        ours, theirs = (x.detach().double().where(mask, 0.0) for x in (trainer, engine))
        gap, uncertain = (ours - theirs).abs(), (1 - ours.exp()).sum()  # where masked, the logprob is 0
        metrics.mean(self._named(GAP), gap.sum(), mask.sum())
        metrics.largest(self._named(LARGEST_GAP), gap.max() if gap.numel() else 0.0)
        metrics.mean(self._named(UNCERTAIN_GAP), gap.sum(), uncertain)
        sums = mask.sum().double(), uncertain, ours.sum(), ours.square().sum(), theirs.sum(), theirs.square().sum()
        for name, of_all in zip(SUMS, sums, strict=True):
            metrics.sum(self._named(name), of_all)

    def check(self, reduced: dict[str, float]) -> None:
        """Stop the run if the step's figures show a fault, else remember them.

        Args:
            reduced: The step's metrics, the same on every rank. The sums in it are replaced by the spread.

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
            what = f"differ by {found:.3g} on average, more than `trainer.logprob_gap_limit` = {self._limit:g}"
            self._report(what, not found <= FAR * self._limit)
        if self._watches_more and uncertain >= 1:
            if spread is not None and abs(spread - 1) > OFF + 0.5 / math.sqrt(uncertain):
                self._report(
                    f"differ: the engine's spread {spread:.3g} times as much as the trainer's, as they do where the"
                    " temperature is another"
                )
            self._compare(reduced[self._named(UNCERTAIN_GAP)], uncertain)
        self._trial = max(0, self._trial - 1)

    def _compare(self, gap: float, uncertain: float) -> None:
        """Compare a gap with those of earlier steps; the limit is wider for few tokens, whose gap varies more."""
        if self._healthy:
            usual = statistics.median(gap for gap, _ in self._healthy)
            before = sum(tokens for _, tokens in self._healthy)
            most = max(self._smallest, usual * (TIMES + 10 / math.sqrt(uncertain) + 10 / math.sqrt(before)))
            if gap > most:
                self._report(
                    f"differ by {gap:.3g} for an uncertain token, which is more than {most:.3g}, where they differed by"
                    f" {usual:.3g} in the steps before"
                )
                return  # what was found on trial is not a measure of later steps
        self._healthy.append((gap, uncertain))

    def _report(self, what: str, is_far: bool = False) -> None:
        """Stop the run; or, on trial and unless it is far above the limit, warn."""
        of = f" of `{self._policy}`" if self._policy else ""
        line = (
            f"rollout and training logprobs{of} {what}: the rollout engine holds other weights than the trainer, or"
            " computes another model. Check the engine's version and dtype, or set `trainer.logprob_gap_limit`, which"
            " is then the only limit"
        )
        if is_far or not self._trial:
            raise UserError(line)
        log.warning("%s. For %d more steps this is a warning, as it was found on CPUs alone", line, self._trial - 1)

    def _named(self, name: str) -> str:
        return f"{name}/{self._policy}" if self._policy else name


def _spread(tokens: float, moments: list[float]) -> float | None:
    """Standard deviation of the engine's logprobs over the trainer's; None if the trainer's hardly differ."""
    if not tokens:
        return None
    trainer, trainer_square, engine, engine_square = (of_all / tokens for of_all in moments)
    ours, theirs = trainer_square - trainer**2, engine_square - engine**2
    return math.sqrt(theirs / ours) if ours > SMALLEST_VARIANCE and theirs > SMALLEST_VARIANCE else None


def default_gap_limit(dtype: torch.dtype) -> float:
    """The default limit of the mean gap: 1e-3 in float32 and float64, 0.05 in bfloat16, 0.01 in float16.

    A healthy gap is 1e-6 in float32 and 0.005 to 0.02 in bfloat16. Numbers in float16 have 3 more bits than those.
    """
    return {torch.bfloat16: 0.05, torch.float16: 0.01}.get(dtype, 1e-3)


def probe(
    run: Run,
    task: SyncWeights,
    gap: LogprobGap,
    prompt: Sequence[int],
    pictures: Sequence[int],
    version: int,
    metrics: StepMetrics,
) -> None:
    """After a sync, let the engine write a few short responses, and compare its logprobs with the trainer's.

    Every rank of the role scores all rows: they are few, and scoring is a collective.

    Args:
        run: The run on this rank.
        task: The sync of the policy; called by all its ranks.
        gap: Records the differences.
        prompt: Token ids, the same on every rank.
        pictures: Numbers of the prompt's pictures.
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
        seen = [run.album(pictures)] * PROBES
        completions = engine.generate(prompts, seeds, sampling, version, **picture_argument(seen))
    if transport.rank not in ranks:
        return
    here = [(one.token_ids, one.logprobs) for one in completions]
    written = transport.broadcast_json(here, task.target[0], ranks)
    if transport.rank not in task.source:
        return
    lists = prompts, [tokens for tokens, _ in written], [pictures] * PROBES
    rows = TokenRows.padded(*(to_device(Ragged.from_lists(each), transport.device) for each in lists))
    mask = torch.arange(rows.response_ids.shape[1], device=transport.device) < rows.lengths[:, None]
    said = torch.zeros(mask.shape, dtype=torch.float64, device=transport.device)
    every = [p for _, logprobs in written for p in logprobs]
    said[mask] = torch.tensor(every, dtype=said.dtype, device=transport.device)
    logprobs = handle.logprobs(rows)
    if transport.rank == task.source[0]:  # all have the same rows
        gap.record(metrics, logprobs, said, mask)


def probing_group(task: SyncWeights) -> tuple[int, ...]:
    """The ranks that take part in a probe: the engine's first rank and the ranks of the role."""
    return tuple(sorted({task.target[0], *task.source}))
