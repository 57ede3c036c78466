"""The healthy ranges of metrics that are numbers, and what to do outside them: those of `docs/metrics.md`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

MetricsLine = Mapping[str, float | None]
RECENT = 10  # recorded steps whose median is judged


@dataclass(frozen=True)
class Range:
    """A metric's healthy range.

    Attributes:
        metric: Name of the metric; `<role>/` stands for any model, and so does `actor/` unless the model has a range of
            its own.
        healthy: The range in words, as in the documentation.
        otherwise: Advice where the metric is outside, as in the documentation.
        low: Smallest healthy value.
        high: Largest healthy value; 0 is for counts of failures: one failure in any step is unhealthy.
        share_of: The range is of the metric divided by this one.
    """

    metric: str
    healthy: str
    otherwise: str
    low: float = -math.inf
    high: float = math.inf
    share_of: str | None = None


RANGES = (
    Range("reward/errors", "0", "read the warning in `logs/`; it names the first such sample", high=0),
    Range("val/errors", "0", "correct the reward, because each failure lowers `val/accuracy`", high=0),
    Range(
        "<role>/skipped_updates", "not logged", "look for NaN in rewards and loss, or lower the learning rate", high=0
    ),
    Range(
        "rollout/truncated",
        "below 0.05",
        "raise `max_response_length`, or look for an end token that is not in the stop set (`stop_token_ids`)",
        high=0.05,
    ),
    Range(
        "rollout/ended_failed",
        "0",
        "`ended` of a conversation's last message in `samples.jsonl` has the reason",
        high=0,
    ),
    Range(
        "rollout/requests_refused",
        "0",
        "the last lines of the agent's output have the errors. In the setting `ignore`, list the request fields that do"
        " not matter, or raise `data.max_prompt_length`, `max_response_length` or `max_calls`",
        high=0,
    ),
    Range(
        "actor/useful_share",
        "above 0.5",
        "most prompts are too easy or too hard, so nothing is learned from them. Choose other prompts, raise"
        " `group_size`, or filter prompts (DAPO)",
        low=0.5,
    ),
    Range(
        "filter/kept",
        "above 0.3",
        "most prompts are too easy or too hard. Choose other prompts, or raise `group_size`",
        low=0.3,
    ),
    Range(
        "actor/clip_fraction",
        "below 0.2",
        "a step makes too many updates, or the learning rate is too large",
        high=0.2,
    ),
    Range(
        "critic/clip_fraction",
        "below 0.2",
        "use fewer epochs, or a larger `value_clip` for rewards of a larger scale",
        high=0.2,
    ),
    Range(
        "actor/importance_dropped",
        "below 0.01",
        "rollout and training logprobs differ (see `sync/logprob_gap`), or samples are old",
        high=0.01,
    ),
    Range(
        "actor/masked_fraction",
        "below 0.05",
        "samples are too old, or the engine's log-probabilities differ from the trainer's; see `sync/logprob_gap_max`",
        high=0.05,
    ),
    Range(
        "actor/drift",
        "below 0.01",
        "make fewer updates per step, or use a smaller learning rate or a larger `drift_coef`",
        high=0.01,
    ),
    Range(
        "sync/logprob_gap",
        "0.005 to 0.02 in bf16",
        "the engine has wrong weights, another temperature or another model",
        high=0.02,
    ),
    Range(
        "sync/logprob_spread",
        "within 0.005 of 1",
        "engine and trainer have different temperatures",
        low=0.995,
        high=1.005,
    ),
    Range(
        "verdict/readable",
        "above 0.95",
        "raise `judge_length` if answers are cut, or change the question in `rubric` if the judge does not use the"
        " form",
        low=0.95,
    ),
    Range(
        "rollout/environment_wait",
        "below 0.2",
        "the engine is idle. For an environment: set `timeout_s`, so that it runs in processes of its own, and raise"
        " `workers`, the number of these processes. For a harness: raise `max_concurrent`. For both: more conversations"
        " at the same time",
        high=0.2,
    ),
    Range(
        "rollout/continued",
        "below 0.3",
        "parts are too short; raise `partial_rollout`",
        high=0.3,
    ),
    Range(
        "time/load",
        "below a hundredth of the step",
        "put the dataset on a faster disk, or use shorter prompts",
        high=0.01,
        share_of="time/step",
    ),
    Range(
        "time/sync",
        "below a tenth of the step",
        "use a larger `trainer.sync_bucket_bytes`",
        high=0.1,
        share_of="time/step",
    ),
    Range(
        "time/exchange_wait",
        "below a tenth of the step",
        "ranks have uneven work; look at the trace",
        high=0.1,
        share_of="time/step",
    ),
    Range(
        "time/straggler_share",
        "below 0.1",
        "the other ranks wait for this rank; see `trainer.balance`, and `rlflow report`",
        high=0.1,
    ),
)
NOT_FINITE = "look for NaN in rewards and loss, and run the step's nodes again with `rlflow replay`"


@dataclass(frozen=True)
class Unhealthy:
    """A metric that is not healthy.

    Attributes:
        metric: Name of the metric.
        found: The finding, with the value.
        healthy: The healthy range in words.
        advice: Advice that names a change to the run.
    """

    metric: str
    found: str
    healthy: str
    advice: str


def findings(lines: Sequence[MetricsLine], placed: bool = False) -> Iterator[Unhealthy]:
    """The unhealthy metrics of a run.

    A metric is judged by the median of its last `RECENT` records, a count of failures by its largest value. Such counts
    come first.

    Args:
        lines: Lines of `metrics.jsonl`, in order.
        placed: Whether ranks may have different roles, so that one usually works longer than the others.
    """
    names = dict.fromkeys(name for line in lines for name in line)
    for name in names:
        if not_finite := [line["step"] for line in lines if name in line and line[name] is None]:
            found = f"NaN or infinite in {len(not_finite)} steps, the last of them {not_finite[-1]}"
            yield Unhealthy(name, found, "a finite number", NOT_FINITE)
    judged = [(name, of) for name in names if (of := _range_of(name)) is not None]
    for name, of in sorted(judged, key=lambda each: each[1].high != 0):  # others often follow from a failure
        values = [value for line in lines if (value := _value(line, name, of.share_of)) is not None]
        if not values or (placed and name == "time/straggler_share"):
            continue
        value = max(values) if of.high == 0 else statistics.median(values[-RECENT:])
        if not of.low <= value <= of.high:
            share = f" of `{of.share_of}`" if of.share_of else ""
            when = "at most" if of.high == 0 else f"median of the last {len(values[-RECENT:])}"
            outside = sum(not of.low <= each <= of.high for each in values)
            found = f"{value:.4g}{share} ({when}); outside in {outside} of {len(values)} records"
            yield Unhealthy(name, found, of.healthy, of.otherwise)


def _range_of(name: str) -> Range | None:
    exact = next((each for each in RANGES if each.metric == name), None)
    of_role = [f"{role}/{name.partition('/')[2]}" for role in ("actor", "<role>")]
    return exact or next((each for each in RANGES if each.metric in of_role), None)


def _value(line: MetricsLine, name: str, share_of: str | None) -> float | None:
    value = line.get(name)
    if share_of is None or value is None:
        return value
    whole = line.get(share_of)
    return value / whole if whole else None
