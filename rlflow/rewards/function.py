"""Rewards that are plain functions, called for each sample or, in TRL's form, for a batch."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from rlflow.dotted_path import function_at
from rlflow.errors import UserError
from rlflow.rewards.reward import OnError, RewardInput, SampleReward, Scores, log, read_column
from rlflow.worker import Limits, Worker, WorkerPool
from rlflow.worker.child import batch_call
from rlflow.worker.copies import copied

OF_A_SAMPLE = ("response", "completion", "prompt", "messages", "row", "info")
OF_A_BATCH = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
NOT_AS_COLUMNS = ("prompt", "completion", "completion_ids")  # of a batch, as TRL has it


class CallableReward(SampleReward):
    """A reward that calls a function, plain or `async`, for each sample or for all samples of a rank.

        def exact(response: str, answer: str) -> float:                    # `answer` is a column of the dataset
            return float(response.strip() == answer)

        def graded(response: str, row: dict) -> dict[str, float]:          # a reward of two parts
            return {"right": float(response == row["answer"]), "brevity": -0.01 * len(response)}

        def of_trl(completions: list[str], answer: list[str], **columns) -> list[float]:
            return [float(each == right) for each, right in zip(completions, answer)]

    The names of the function's parameters choose what it is passed:

        response, completion    the response's text, without special tokens
        prompt                  the prompt as the dataset has it: a text, or a list of messages
        messages                the whole conversation, a list of messages
        row                     the dataset's row, a dict
        info                    the row's column `info`; an empty dict if there is none
        any other name          the column of that name; `**kwargs` gets all columns

    If the dataset has a column with one of these names, such as `row`, the column is passed, and a warning is logged
    once. The function returns a number, or a dict of names to numbers whose sum is the score. `on_error` decides what
    happens if it raises.

    A function with a parameter `completions` or `completion_ids` has TRL's form. It is called once with all samples of
    this rank. It can take the lists `prompts`, `completions` (lists of messages if the prompts are) and
    `completion_ids` (token ids), and any column by its name. It can also take `trainer_state` (`global_step`,
    `max_steps`, `epoch`), `log_extra(name, list)`, which writes the values to `samples.jsonl`, and
    `log_metric(name, number)`. It returns a list of numbers, with None for a sample that it does not apply to.
    https://huggingface.co/docs/trl/grpo_trainer

    Args:
        function: Dotted path such as `my_rewards.brevity`, or the function itself. If it returns a dict, each part is
            logged, and nodes can read the parts by `self.reward_parts`. In a `WeightedSum` only their sum is a part.
        on_error: `raise`, `zero` or `drop`; see `Reward`.
        timeout_s: Time limit of a call. The function then runs in another process, which can be killed, so it can
            neither hang nor end the run. It must be named by its dotted path. It scores each response as soon as it has
            ended, while others are generated. None to run the function in the rank's own process after all responses
            have ended, which is faster and has no limit.
        workers: Number of such processes on each rank; above 1 needs `timeout_s`.
        memory_mb: Memory limit of each of these processes, in MB; has an effect only with `timeout_s`.
        gold: Column of a response to which the function must give at least 1, see `Reward.gold_of`; None for no column.

    Raises:
        UserError: `workers` is set without `timeout_s`; `timeout_s` is set with a function that has no dotted path; or
            TRL's form is mixed with `prompt` or `completion`.
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        on_error: OnError = "raise",
        timeout_s: float | None = None,
        workers: int = 1,
        memory_mb: int = 4096,
        gold: str | None = None,
    ) -> None:
        super().__init__(on_error, max_concurrent=workers)
        self.function = function
        self.gold = gold
        called = function_at(function, f"`function` is {function!r}") if isinstance(function, str) else function
        self._read_signature(called)
        if timeout_s is None:
            if workers != 1:
                raise UserError(
                    f"`workers` is {workers} without `timeout_s`, and only calls with a limit run in workers; set it"
                )
            self._call: Callable[..., Any] = called
            self._call_batch: Callable[..., Any] = partial(batch_call, called)
        elif isinstance(function, str):
            pool = WorkerPool(Limits(timeout_s=timeout_s, memory_mb=memory_mb), workers)
            self._call = partial(pool.call, Worker.function, function)
            self._call_batch = partial(pool.call, Worker.batch, function)
        else:
            raise UserError(
                f"`timeout_s` is {timeout_s:g}, and `function` is {function!r:.60}, which no other process can"
                " import; give its dotted path"
            )
        if gold is not None:
            self.reads = {**self.reads, gold: False}
        self._limited = timeout_s is not None
        is_async = inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(type(called).__call__)
        self._together = timeout_s is None and is_async
        self._warned: set[str] = set()

    def _read_signature(self, function: Any) -> None:
        parameters = inspect.signature(function).parameters.values()
        named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        self._positional = [each.name for each in named if each.kind is each.POSITIONAL_ONLY]
        self._parameters = [each.name for each in named]
        self._required = [each.name for each in named if each.default is each.empty]
        self._takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        self._batched = not {"completions", "completion_ids"}.isdisjoint(self._parameters)
        given = OF_A_BATCH if self._batched else OF_A_SAMPLE
        self.reads = {name: True for name in self._required if name not in given}
        one = next((name for name in self._required if name in ("prompt", "completion")), None)
        if self._batched and one is not None:
            raise UserError(
                f"`function` has the parameter `{one}` and TRL's form, which gives lists: `{one}s`; rename it, or take"
                " one sample a call by `response` in place of `completions`"
            )

    def gold_of(self, row: dict[str, Any]) -> str | None:
        return None if self.gold is None else str(read_column(row, self.gold))

    @property
    def waits_for_others(self) -> bool:
        return self._limited and not self._batched

    def score(self, responses: RewardInput) -> Scores:
        if self._batched:
            return self._of_batch(responses)
        if self._together:
            calls = [self.call_of(responses, i) for i in range(len(responses))]
            return self.side_by_side([partial(_result, outcome) for outcome in _run(_outcomes(calls))], responses)
        return super().score(responses)

    def score_sample(self, text: str, row: dict[str, Any]) -> float | Mapping[str, float]:
        value: float | Mapping[str, float] = self.call_of(RewardInput([text], [row]), 0)()
        return value

    def call_of(self, responses: RewardInput, i: int) -> Callable[[], Any]:
        """The call that scores sample `i`, with the arguments that the function's parameters name."""
        row = responses.rows[i]
        given = dict(row) if self._takes_all else {}
        for name in self._parameters:
            if name in row:
                self._warn_of_column(name, responses)
                given[name] = row[name]
            elif name in OF_A_SAMPLE:
                given[name] = self._of_sample(name, responses, i)
        given = copied(given)  # samples of a prompt share its row
        return partial(self._call, *(given.pop(name) for name in self._positional if name in given), **given)

    def _of_sample(self, name: str, responses: RewardInput, i: int) -> Any:
        if name in ("response", "completion"):
            return responses.texts[i]
        if name == "prompt":
            return self._prompt(responses, i)
        if name == "messages":
            return responses.messages(i)
        return responses.rows[i] if name == "row" else {}

    def _prompt(self, responses: RewardInput, i: int) -> Any:
        prompt = responses.prompt(i)
        if prompt is None and not {"prompt", "prompts"}.isdisjoint(self._required):
            raise UserError(
                f"{self} reads the prompt, and the dataset's row has no such column ({', '.join(responses.rows[i])});"
                " name it by `data.prompt`"
            )
        return prompt

    def _warn_of_column(self, name: str, responses: RewardInput) -> None:
        means_column = name == "info" or (name == "prompt" and responses.prompt_column in (None, name))
        if name in OF_A_SAMPLE and not means_column and name not in self._warned:
            self._warned.add(name)
            log.warning("%s is given the dataset's column `%s`, in place of what a reward means by it", self, name)

    def _of_batch(self, responses: RewardInput) -> Scores:
        """The scores of a function of TRL's form, called once; without samples it is not called.

        An exception counts as one of every sample. A None marks the sample as absent, with the score 0.
        """
        if not len(responses):
            return Scores([])
        named = {name: value for name, value in self._batch(responses) if self._wants(name)}
        logs = [name for name in ("log_extra", "log_metric") if self._wants(name)]
        state = asdict(responses.state) if self._wants("trainer_state") else None
        columns: dict[str, list[Any]] = {}
        metrics: dict[str, list[float]] = {}
        outcomes: list[Any]
        try:
            found, columns, metrics = self._call_batch(named, state, logs)
            outcomes = _for_each(found, len(responses))
        except BaseException as error:  # is that of every sample
            outcomes = [error] * len(responses)
        absent = frozenset(i for i, outcome in enumerate(outcomes) if outcome is None)
        calls = [partial(_result, 0.0 if outcome is None else outcome) for outcome in outcomes]
        scores = self.scores_of(calls, responses)
        for name, values in columns.items():
            if len(values) != len(responses):
                raise UserError(
                    f"{self} called log_extra({name!r}) with {len(values)} values for {len(responses)} samples; give"
                    " one for each"
                )
        return replace(scores, absent=absent, metrics=metrics, columns=columns)

    def _batch(self, responses: RewardInput) -> Iterator[tuple[str, Any]]:
        every = range(len(responses))
        for name in dict.fromkeys(name for row in responses.rows for name in row if name not in NOT_AS_COLUMNS):
            yield name, [copied(row.get(name)) for row in responses.rows]
        if self._wants("prompts"):
            yield "prompts", [copied(self._prompt(responses, i)) for i in every]
        if self._wants("completions"):
            yield "completions", [copied(responses.completion(i)) for i in every]
        if self._wants("completion_ids"):
            yield "completion_ids", responses.token_ids()

    def _wants(self, name: str) -> bool:
        """Whether a function of TRL's form has a parameter of this name, or takes all by `**kwargs`."""
        return self._takes_all or name in self._parameters

    def __str__(self) -> str:
        return f"reward `{self.function if isinstance(self.function, str) else name_of(self.function)}`"


def name_of(function: Callable[..., Any]) -> str:
    """The function's `__name__`; for another callable object the name of its class."""
    return function.__name__ if inspect.isroutine(function) else type(function).__name__


def _for_each(found: Any, count: int) -> list[Any]:
    """The result of a function in TRL's form, as a list of `count` numbers or Nones; else a `ValueError`."""
    found = found.tolist() if isinstance(found, torch.Tensor | np.ndarray) else found
    if not isinstance(found, Sequence) or isinstance(found, str) or len(found) != count:
        what = f"{len(found)} scores" if isinstance(found, list | tuple) else f"{found!r:.60}"
        raise ValueError(f"it returned {what} for {count} samples, not a number or None for each")
    return [each.item() if isinstance(each, torch.Tensor) else each for each in found]


def _run(together: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    """The result of a coroutine, run in an event loop of a new thread: a notebook has a loop running in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, together).result()


async def _outcomes(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The value or the error of each coroutine, in order; they run concurrently."""

    async def outcome(call: Callable[[], Any]) -> Any:
        return await call()

    return await asyncio.gather(*map(outcome, calls), return_exceptions=True)


def _result(outcome: Any) -> Any:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
