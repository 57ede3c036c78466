"""Scoring responses while others are generated gives the same results as scoring them after the last has ended."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlflow import Batch, CausalLM, Environment, PerSample, Rollout, RolloutWithTexts, node
from rlflow.algorithms import DAPO, GRPO
from rlflow.callbacks import Callback
from rlflow.context.node_context import NodeContext
from rlflow.data import Mixture, PromptData
from rlflow.rewards import ByDataset, CallableReward, HTTPReward, Reward, SampleReward, WeightedSum
from rlflow.rewards.early import EarlyScores
from rlflow.rewards.reward import OnError
from rlflow.rollout import RolloutEngine, TransformersEngine, VLLMEngine
from tests.controller import scoring
from tests.controller.runs import ZERO2, Fit, OddCharacters, RaggedReMax, failing_fit, fit, sums, trainer_of
from tests.faults.killed_runs import STOP, content, fit_to_the_end
from tests.ranks import RankPool
from tests.rewards.test_early import Counts
from tests.rewards.test_served_rewards import Server
from tests.slow import slow_but

ENGINES: dict[str, Callable[[], RolloutEngine]] = {
    "transformers": TransformersEngine,
    "vllm": lambda: VLLMEngine(kv_cache_gib=0.25),
}
WAYS = ("seconds", "workers", "max_concurrent", "http", "http in batches")
POLICIES: tuple[OnError, ...] = ("raise", "zero", "drop")


class InThreads(SampleReward):
    """Scores several samples at a time in this process."""

    def __init__(self, function: str, on_error: OnError) -> None:
        super().__init__(on_error, max_concurrent=3)
        self.function = function

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return float(getattr(scoring, self.function)(text, row["question"]))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Scores as `scoring` does, by the function that the URL ends with."""
    server = Server()

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        try:
            pairs = zip(body["texts"], body["rows"], strict=True)
            return 200, {"scores": [scoring.fails_on_some(text, row["question"]) for text, row in pairs]}
        except ValueError:
            return 400, {}

    server.answer = answer
    yield server
    server.close()


def reward_of(way: str, on_error: OnError, server: Server) -> Reward:
    """A reward that fails on some samples if it may."""
    function = "odd" if on_error == "raise" else "fails_on_some"
    if way.startswith("http"):
        if on_error == "raise":
            server.answer = _never_failing
        return HTTPReward(server.url, batch=3 if "batches" in way else 1, max_concurrent=3, on_error=on_error)
    if way == "max_concurrent":
        return InThreads(function, on_error)
    return limited(function, on_error, workers=3 if way == "workers" else 1)


def _never_failing(body: dict[str, Any]) -> tuple[int, Any]:
    pairs = zip(body["texts"], body["rows"], strict=True)
    return 200, {"scores": [scoring.odd(text, row["question"]) for text, row in pairs]}


def run_of(policy: Path, folder: Path, reward: Reward, algorithm: Any = GRPO, **settings: Any) -> Fit:
    """A run of two steps, whose responses end after some six tokens."""
    module = algorithm(CausalLM(str(policy)), reward, group_size=4, max_response_length=24, stop_token_ids=STOP)
    return Fit(module, sums(8, prompts_per_step=4), folder, settings={"max_steps": 2, **settings})


def limited(function: str = "odd", on_error: OnError = "raise", workers: int = 3) -> CallableReward:
    """One of the functions of `scoring`, in processes of its own."""
    return CallableReward(f"tests.controller.scoring.{function}", on_error, timeout_s=30, workers=workers)


def late(monkeypatch: pytest.MonkeyPatch, run: Fit) -> None:
    """Make the run and score no response before all have ended."""
    with monkeypatch.context() as patched:
        patched.setattr(NodeContext, "_score_early", lambda self, now: None)
        fit(run)


def early_steps(folder: Path, node: str = "rollout") -> int:
    """Steps of a run in which calls of a reward began while the node generated."""
    events = [json.loads(line) for line in (folder / "traces/rank0.jsonl").read_text().splitlines()]
    spans = [each for each in events if each.get("cat") == "RunNode" and each["name"].split()[1] == f"{node}:"]
    began = [each["ts"] for each in events if each["ph"] == "b" and re.search(r", \d+ calls$", each["name"])]
    return sum(any(span["ts"] < ts < span["ts"] + span["dur"] for ts in began) for span in spans)


def assert_same(folder: Path) -> None:
    """Assert that the results of two runs, in `early` and `late`, are the same."""
    early, late = content(folder / "early"), content(folder / "late")
    assert early.keys() == late.keys()
    assert [name for name in early if early[name] != late[name]] == []
    assert (folder / "early/samples.jsonl").read_bytes() == (folder / "late/samples.jsonl").read_bytes()


CASES = [(engine, way, on_error) for engine in ENGINES for way in WAYS for on_error in POLICIES]
FAST = [("transformers", "workers", "drop"), ("transformers", "http in batches", "zero")]


@pytest.mark.parametrize(
    ("engine", "way", "on_error"), slow_but([*FAST, ("transformers", "max_concurrent", "raise")], CASES)
)
def test_a_run_with_early_scores_leaves_the_same_files_to_the_byte(
    engine: str, way: str, on_error: OnError, policy: Path, tmp_path: Path, server: Server, monkeypatch: Any
) -> None:
    monkeypatch.setattr(server, "answer", server.answer)  # as it was, afterwards
    runs = {}
    for name in ("early", "late"):
        run = run_of(policy, tmp_path / name, reward_of(way, on_error, server))
        runs[name] = dataclasses.replace(run, engine=ENGINES[engine]())
    fit(runs["early"])
    late(monkeypatch, runs["late"])
    assert_same(tmp_path)
    assert early_steps(tmp_path / "early") == 2
    assert early_steps(tmp_path / "late") == 0
    samples = [json.loads(line) for line in (tmp_path / "early/samples.jsonl").read_text().splitlines()]
    assert len({sample["reward"] for sample in samples}) > 2
    metrics = [json.loads(line) for line in (tmp_path / "early/metrics.jsonl").read_text().splitlines()]
    assert (sum(step.get("reward/errors", 0) for step in metrics) > 0) == (on_error != "raise")


@dataclasses.dataclass(eq=False)
class Conversing(GRPO):
    """Talks to an environment, which answers up to three times."""

    environment: Environment | None = dataclasses.field(
        default_factory=lambda: Environment("tests.controller.answering.Counting", max_turns=2, max_turn_length=6)
    )
    max_response_length: int = 90


def conversing(policy: Path, folder: Path) -> Fit:
    module = Conversing(CausalLM(str(policy)), limited("of_conversation"), group_size=2)
    data = sums(8, prompts_per_step=4)
    data.chat_template, data.max_prompt_length = True, 120
    return Fit(module, data, folder, settings={"max_steps": 2})


def summed() -> Reward:
    return WeightedSum({"odd": limited(), "plain": OddCharacters(), "some": limited("fails_on_some", "drop", 2)})


def mixed(policy: Path, folder: Path, on_error: OnError = "raise", **settings: Any) -> Fit:
    """A run on three datasets, of which two have rewards that score early, one of them as a part of a sum."""
    function = "odd" if on_error == "raise" else "fails_on_some"
    parts = {"slow": limited(function, on_error), "plain": OddCharacters()}
    reward = ByDataset({"a": InThreads(function, on_error), "b": WeightedSum(parts), "c": OddCharacters()})
    source = Mixture({name: [{"question": f"{i}+{name}="} for i in range(3)] for name in "abc"})
    run = run_of(policy, folder, reward, **settings)
    return dataclasses.replace(run, data=PromptData(source, None, prompts_per_step=9))


KINDS: dict[str, Callable[[Path, Path], Fit]] = {
    "a sum of which a part scores early": lambda policy, to: run_of(policy, to, summed()),
    "a filter that draws again": lambda policy, to: run_of(policy, to, limited(), DAPO),
    "a mixture of datasets": mixed,
    "a mixture with samples that are dropped": lambda policy, to: mixed(policy, to, "drop"),
    "a mixture with samples that count 0": lambda policy, to: mixed(policy, to, "zero"),
    "two rollouts in a step": lambda policy, to: run_of(policy, to, limited(), RaggedReMax),
    "conversations": conversing,
}


FAST_KINDS = ["a sum of which a part scores early", "a mixture with samples that are dropped", "conversations"]


@pytest.mark.parametrize("kind", slow_but(FAST_KINDS, KINDS))
def test_runs_of_other_kinds_with_early_scores_leave_the_same_files(
    kind: str, policy: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    fit(KINDS[kind](policy, tmp_path / "early"))
    late(monkeypatch, KINDS[kind](policy, tmp_path / "late"))
    assert_same(tmp_path)
    assert early_steps(tmp_path / "early") >= 2


@dataclasses.dataclass(eq=False)
class Edits(GRPO):
    """Scores other texts than those that were sampled."""

    def rewards(self, rollout: RolloutWithTexts) -> PerSample:
        texts = [text.upper() for text in rollout.texts]
        return self.reward_function(dataclasses.replace(rollout, texts=texts))


@dataclasses.dataclass(eq=False)
class SamplesTwice(GRPO):
    """Returns what two calls have sampled."""

    @node(role="rollout")
    def rollout(self, batch: Batch) -> Rollout:
        return self.generate(batch, n=2).concat(self.generate(batch, n=2))


@dataclasses.dataclass(eq=False)
class Unread(GRPO):
    """Has a reward that no node calls."""

    def rewards(self, rollout: RolloutWithTexts) -> PerSample:
        return rollout.lengths.float()


class Backwards(InThreads):
    """Scores the responses read backwards, and begins to score them as they were."""

    waits_for_others = True

    def score(self, responses: Any) -> Any:
        return super().score(dataclasses.replace(responses, texts=[text[::-1] + "a" for text in responses.texts]))


OTHERS: dict[str, Callable[[Path, Path], Fit]] = {
    "texts that a node changes": lambda policy, to: run_of(policy, to, limited(), Edits),
    "rows of two calls": lambda policy, to: run_of(policy, to, limited(), SamplesTwice),
    "a reward that no node calls": lambda policy, to: run_of(policy, to, limited(), Unread, max_steps=3),
    "texts that the reward changes": lambda policy, to: run_of(policy, to, Backwards("odd", "raise")),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_responses_other_than_those_sampled_are_scored_again(
    kind: str, policy: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    rollouts, add = set[EarlyScores](), EarlyScores.add

    def noted(early: EarlyScores, *given: Any, **named: Any) -> None:
        rollouts.add(early)
        add(early, *given, **named)

    monkeypatch.setattr(EarlyScores, "add", noted)
    run, threads = OTHERS[kind](policy, tmp_path / "early"), Threads()
    run.settings["callbacks"] = [threads]
    fit(run)
    late(monkeypatch, OTHERS[kind](policy, tmp_path / "late"))
    assert_same(tmp_path)
    assert len(rollouts) == 1, "after the first it is known"
    assert threads.left == 0


class OfLongest(InThreads):
    """Looks at all responses before it scores the first."""

    def score(self, responses: Any) -> Any:
        self.longest = max(map(len, responses.texts))
        return super().score(responses)

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return len(text) / self.longest


STAY: dict[str, Callable[[Path, Path], Fit]] = {
    "a plain function": lambda policy, to: run_of(policy, to, CallableReward("tests.controller.scoring.odd")),
    "a function of the whole batch": lambda policy, to: run_of(policy, to, limited("all_together", workers=1)),
    "a reward that looks at all": lambda policy, to: run_of(policy, to, OfLongest("odd", "raise")),
    "one request for all": lambda policy, to: run_of(
        policy, to, HTTPReward("http://127.0.0.1:9", retries=0, on_error="zero")
    ),
    "responses that are cut off": lambda policy, to: run_of(policy, to, limited(), partial_rollout=4),
    "those that a filter chooses from": lambda policy, to: run_of(policy, to, limited(), DAPO, partial_rollout=4),
}


@pytest.mark.parametrize("kind", STAY)
def test_what_needs_all_responses_is_scored_after_them(
    kind: str, policy: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(EarlyScores, "add", lambda *given, **named: begun.append(given))
    fit(STAY[kind](policy, tmp_path / "run"))
    assert begun == []


def test_no_more_calls_run_together_than_a_reward_allows(policy: Path, tmp_path: Path) -> None:
    reward = Counts(max_concurrent=2, seconds=0.05)
    fit(run_of(policy, tmp_path, reward, RaggedReMax))  # which samples twice in a step
    assert early_steps(tmp_path) == 2
    assert reward.most == 2


class Threads(Callback):
    """The most threads of rewards that are there between steps."""

    left = 0

    def on_step_end(self, trainer: Any, module: Any, step: int, metrics: Any) -> None:
        self.left = max(self.left, len(reward_threads()))


def reward_threads() -> list[threading.Thread]:
    """Threads of rewards that run."""
    return [each for each in threading.enumerate() if each.name == "reward"]


@pytest.mark.parametrize("function", ["fails_on_some", "exits_on_some"])
def test_a_scorer_that_fails_meanwhile_ends_the_run_where_it_is_called(
    function: str, policy: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    watch = Watches()
    early = failing_fit(run_of(policy, tmp_path / "early", limited(function), callbacks=[watch]))
    with monkeypatch.context() as patched:
        patched.setattr(NodeContext, "_score_early", lambda self, now: None)
        expected = failing_fit(run_of(policy, tmp_path / "late", limited(function)))
    assert early.error == expected.error
    assert f"reward `tests.controller.scoring.{function}` failed on sample " in early.error
    assert watch.nodes == ["rollout", "rewards"]
    assert reward_threads() == []


class Watches(Callback):
    """Notes the nodes that began."""

    def __init__(self) -> None:
        self.nodes: list[str] = []

    def on_node_start(self, trainer: Any, module: Any, node_id: str) -> None:
        self.nodes.append(node_id)


class BreaksOff(TransformersEngine):
    """Fails when half of the responses have ended."""

    def completions(self, *given: Any) -> Any:
        for number, ended in enumerate(super().completions(*given)):
            if number == 8:
                raise KeyboardInterrupt
            yield ended


def test_a_run_that_ends_in_a_rollout_leaves_no_thread(policy: Path, tmp_path: Path) -> None:
    run = dataclasses.replace(run_of(policy, tmp_path, limited(workers=2)), engine=BreaksOff())
    with pytest.raises(KeyboardInterrupt):
        fit(run)
    until = time.monotonic() + 30  # a call is waited for, but not for long: a busy machine may still start its worker
    while reward_threads() and time.monotonic() < until:
        time.sleep(0.05)
    assert reward_threads() == []


def of_ranks(policy: Path, folder: Path, **settings: Any) -> Fit:
    """Two ranks: one generates and scores a step ahead of the other, which trains."""
    ahead = {"placement": {"rollout": 0, "actor": 1}, "max_staleness": 1, "save_every_n_steps": 1, "max_steps": 3}
    run = run_of(policy, folder, limited("fails_on_some", "zero"), **{**ahead, **settings})
    return dataclasses.replace(run, strategy=ZERO2)


class Stops(Exception):
    """Ends a run on all ranks."""


class StopsAfter(Callback):
    """Raises after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, trainer: Any, module: Any, step: int, metrics: Any) -> None:
        if step == self.steps:
            raise Stops


def stopped(run: Fit, steps: int) -> None:
    with pytest.raises(Stops):
        trainer_of(run, run.strategy(), [StopsAfter(steps)]).fit(run.module, run.data)


def fit_late(run: Fit) -> None:
    with pytest.MonkeyPatch.context() as patch:
        late(patch, run)


@pytest.mark.parametrize("of_datasets", slow_but([False], [False, True]))
def test_a_resumed_run_with_early_scores_leaves_the_same_files(
    of_datasets: bool, policy: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    def run(name: str, **more: Any) -> Fit:
        more |= {"max_steps": 3, "save_every_n_steps": 1}
        if of_datasets:
            return mixed(policy, tmp_path / name, "drop", **more)
        return run_of(policy, tmp_path / name, limited("fails_on_some", "drop"), **more)

    stopped(run("early"), 2)
    fit(run("early", ckpt_path="last"))
    assert early_steps(tmp_path / "early") == 2, "those of the continued part"
    late(monkeypatch, run("late"))
    assert_same(tmp_path)


@pytest.mark.slow
def test_a_resumed_run_one_step_off_leaves_the_same_files(ranks2: RankPool, policy: Path, tmp_path: Path) -> None:
    ranks2.run(stopped, of_ranks(policy, tmp_path / "early"), 2, timeout_s=240)
    ranks2.run(fit_to_the_end, of_ranks(policy, tmp_path / "early", ckpt_path="last"), timeout_s=240)
    assert early_steps(tmp_path / "early") >= 1
    ranks2.run(fit_late, of_ranks(policy, tmp_path / "late"), timeout_s=240)
    assert_same(tmp_path)
