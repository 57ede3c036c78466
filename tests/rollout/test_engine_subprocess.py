"""An engine in a process of its own answers as the same engine in this one."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

import rlflow.rollout.engine_subprocess
from rlflow.errors import UserError
from rlflow.process.preemption import SIGNALS
from rlflow.rollout import (
    EngineProcessError,
    EngineSubprocess,
    RankInfo,
    RolloutEngine,
    Sampling,
    TransformersEngine,
    VLLMEngine,
    WeightSyncError,
)
from rlflow.rollout.engine_subprocess import share
from tests.rollout.engines import Broken, SaysItsRank
from tests.rollout.stepping import check_completions, check_steps
from tests.rollout.trained import PROMPTS, STOP, buckets, load, perturb, setup

SEEDS = list(range(len(PROMPTS)))
SAMPLING = Sampling(24, 1.0, STOP)
VERSIONS = itertools.count()
SCRIPT = """
import torch
from rlflow.rollout import EngineSubprocess, RankInfo
from tests.rollout.engines import Broken
engine = EngineSubprocess(Broken(), index=0, size=1, address="", timeout_s=120.0)
engine.setup("", RankInfo(torch.float32, torch.device("cpu")))
print(engine._process._popen.pid, flush=True)
engine.sleep()
"""


@pytest.fixture(scope="module")
def engine(tied: Path) -> Iterator[RolloutEngine]:
    engine = setup(_in_subprocess(TransformersEngine()), tied)
    yield engine
    engine.close()


@pytest.fixture
def broken(tied: Path) -> Iterator[RolloutEngine]:
    engine = setup(_in_subprocess(Broken()), tied)
    yield engine
    engine.close()


@pytest.fixture
def model(tied: Path) -> Any:
    return load(tied)


def _in_subprocess(engine: RolloutEngine, timeout_s: float = 120.0) -> EngineSubprocess:
    return EngineSubprocess(engine, index=0, size=1, address="", timeout_s=timeout_s)


def _process(engine: RolloutEngine) -> Any:
    assert isinstance(engine, EngineSubprocess)
    return engine._running()


def test_responses_and_logprobs_are_those_of_the_engine_in_this_process(
    engine: RolloutEngine, model: Any, tied: Path
) -> None:
    here = setup(TransformersEngine(), tied)
    for seed in range(2):
        perturb(model, seed)
        version = next(VERSIONS)
        reports = [each.update_weights(buckets(model), version) for each in (here, engine)]
        assert [(report.version, report.tensors, report.nbytes) for report in reports] == [
            (version, 26, 4 * sum(parameter.numel() for parameter in model.parameters()))
        ] * 2
        expected = here.generate(PROMPTS, SEEDS, SAMPLING, version)
        assert engine.generate(PROMPTS, SEEDS, SAMPLING, version) == expected


def test_turns_that_come_one_by_one_are_those_of_one_call(engine: RolloutEngine, model: Any) -> None:
    version = next(VERSIONS)
    engine.update_weights(buckets(model), version)
    check_steps(engine, version)
    check_completions(engine, version, by_length=False)  # this one computes all of them within a step


def test_the_engine_is_not_in_this_process(engine: RolloutEngine) -> None:
    assert _process(engine)._popen.pid in {child.pid for child in psutil.Process().children()}


def test_another_version_is_refused_in_the_same_words(engine: RolloutEngine, model: Any) -> None:
    version = next(VERSIONS)
    engine.update_weights(buckets(model), version)
    with pytest.raises(
        WeightSyncError, match=rf"^the engine holds version {version}, and must generate with version 999;"
    ):
        engine.generate(PROMPTS, SEEDS, SAMPLING, 999)
    assert engine.policy_version == version


def test_sleep_gives_the_version_up_on_both_sides(engine: RolloutEngine, model: Any) -> None:
    version = next(VERSIONS)
    engine.update_weights(buckets(model), version)
    engine.sleep()
    engine.wake_up()
    assert engine.policy_version == -1
    with pytest.raises(WeightSyncError, match="the engine holds no version"):
        engine.generate(PROMPTS, SEEDS, SAMPLING, version)


def test_weights_that_are_kept_asleep_generate_without_a_sync(engine: RolloutEngine, model: Any) -> None:
    version = next(VERSIONS)
    engine.update_weights(buckets(model), version)
    before = engine.generate(PROMPTS, SEEDS, SAMPLING, version)
    engine.sleep(keep_weights=True)
    engine.wake_up()
    assert engine.generate(PROMPTS, SEEDS, SAMPLING, version) == before


@pytest.mark.parametrize(("device", "expected"), [("cuda", ["empty cache"]), ("cpu", [])])
def test_the_gpu_cache_is_freed_before_an_engine_in_its_own_process_wakes(
    device: str, expected: list[str], engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("empty cache"))
    monkeypatch.setattr(engine, "_device", torch.device(device))
    engine.wake_up()
    assert seen == expected


def test_a_prompt_beyond_the_context_is_refused_in_the_same_words(engine: RolloutEngine, model: Any) -> None:
    version = next(VERSIONS)
    engine.update_weights(buckets(model), version)
    with pytest.raises(UserError, match=r"^a prompt of 500 tokens and a response of up to 13 exceed .* 512 tokens"):
        engine.generate([[65] * 500], [0], Sampling(13), version)


def test_lengths_beyond_the_context_are_refused_in_the_same_words(engine: RolloutEngine) -> None:
    engine.check_context(500, 12)
    with pytest.raises(UserError, match=r"^a prompt of 500 tokens and a response of up to 13 exceed .* 512 tokens"):
        engine.check_context(500, 13)


def _without_the_norm(model: Any) -> Iterator[list[tuple[str, Tensor]]]:
    return buckets(model, leave_out="model.norm.weight")


def _with_a_stranger(model: Any) -> Iterator[list[tuple[str, Tensor]]]:
    yield from itertools.islice(buckets(model), 3)
    yield [("stranger", torch.ones(1))]
    yield from itertools.islice(buckets(model), 3, None)


def _failing(model: Any) -> Iterator[list[tuple[str, Tensor]]]:
    yield from itertools.islice(buckets(model), 3)
    raise KeyError("gathering failed")


def _failing_at_once(model: Any) -> Iterator[list[tuple[str, Tensor]]]:
    raise KeyError("gathering failed")
    yield []


@pytest.mark.parametrize(
    ("weights", "kind", "text"),
    [
        (_without_the_norm, WeightSyncError, r"^the engine does not hold .* not sent: model\.norm\.weight$"),
        (
            _with_a_stranger,
            WeightSyncError,
            "^the trainer sends `stranger`, .* not have; take another engine for this model$",
        ),
        (_failing, KeyError, "gathering failed"),
        pytest.param(_failing_at_once, KeyError, "gathering failed", marks=pytest.mark.slow),
    ],
)
def test_a_sync_that_fails_leaves_no_version_and_the_next_succeeds(
    engine: RolloutEngine, model: Any, weights: Any, kind: type[Exception], text: str
) -> None:
    engine.update_weights(buckets(model), next(VERSIONS))
    with pytest.raises(kind, match=text):
        engine.update_weights(weights(model), next(VERSIONS))
    assert engine.policy_version == -1
    version = next(VERSIONS)
    engine.update_weights(buckets(model), version)
    assert len(engine.generate(PROMPTS, SEEDS, SAMPLING, version)) == len(PROMPTS)


def test_a_weight_that_changes_on_its_way_is_named(
    engine: RolloutEngine, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def share_changed(tensor: Tensor, parts: Any) -> int:
        changed = tensor.clone()
        changed.view(-1)[-1] += 1e-6
        return share(changed, parts)

    monkeypatch.setattr(rlflow.rollout.engine_subprocess, "share", share_changed)
    with pytest.raises(WeightSyncError, match=r"^`model\.embed_tokens\.weight` reached .* with other values"):
        engine.update_weights(buckets(model), next(VERSIONS))


def test_no_descriptor_is_left_open(engine: RolloutEngine, model: Any) -> None:
    engine.update_weights(buckets(model), next(VERSIONS))
    processes = [psutil.Process(), psutil.Process(_process(engine)._popen.pid)]
    before = [process.num_fds() for process in processes]
    engine.update_weights(buckets(model), next(VERSIONS))
    assert [process.num_fds() for process in processes] == before
    with pytest.raises(KeyError):
        engine.update_weights(_failing(model), next(VERSIONS))
    engine.update_weights(buckets(model), next(VERSIONS))  # the engine's process is another one now
    assert processes[0].num_fds() == before[0]


def test_a_refusal_at_setup_keeps_the_engine_s_words_and_ends_its_process(tied: Path) -> None:
    beside = _in_subprocess(VLLMEngine())
    with pytest.raises(UserError, match=r"^vLLM does not run in torch\.float64"):
        setup(beside, tied, torch.float64)
    assert not _process(beside).runs


def test_an_engines_own_error_is_reported_with_its_type_and_its_place(broken: RolloutEngine, model: Any) -> None:
    with pytest.raises(EngineProcessError, match=r"^rank 0: .* could not load the weights of version 0: ZeroDiv") as no:
        broken.update_weights(buckets(model), 0)
    assert "in update_weights" in no.value.__notes__[0]
    with pytest.raises(EngineProcessError, match="ZeroDiv"):
        broken.update_weights(buckets(model), 0)  # they still understand each other


def test_a_process_that_exits_is_reported_with_its_code_and_its_last_lines(broken: RolloutEngine) -> None:
    said = r"^rank 0: .* exited with code 3 when it should generate 6 responses\. .*\nthe last words of an engine$"
    with pytest.raises(EngineProcessError, match=re.compile(said, re.S)):
        broken.generate(PROMPTS, SEEDS, SAMPLING, 0)


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_works_is_reported_immediately(broken: RolloutEngine) -> None:
    process = _process(broken)
    threading.Timer(0.5, process._popen.kill).start()
    started = time.monotonic()
    with pytest.raises(EngineProcessError, match=r"^rank 0: .* was killed by SIGKILL when it should sleep"):
        broken.sleep()
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_asks_the_run_to_end_leaves_the_engine_to_its_rank(engine: RolloutEngine, number: int) -> None:
    _process(engine)._popen.send_signal(number)
    engine.check_context(1, 1)
    assert _process(engine).runs


def test_an_engine_counts_the_ranks_that_share_it_not_those_of_the_job() -> None:
    engine = _in_subprocess(SaysItsRank())
    with pytest.raises(EngineProcessError, match="rank 0 of 1"):
        engine.setup("", RankInfo(torch.float32, torch.device("cpu"), rank=1, world_size=2))


def test_a_process_that_hangs_is_ended_and_reported(broken: RolloutEngine) -> None:
    process = _process(broken)
    process._timeout_s = 0.5
    with pytest.raises(EngineProcessError, match=r"^rank 0: .* should sleep and did not within 0\.5 s"):
        broken.sleep()
    assert not process.runs


def test_an_unguarded_script_s_engine_prints_to_its_output_and_dies_with_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as script:
        try:
            assert script.stdout is not None
            said = "".join(script.stdout.readline().decode() for _ in range(3))  # two processes may share a line
            (process,) = re.findall(r"\d+", said)
            engine = psutil.Process(int(process))
        finally:
            script.kill()
    assert "an engine's errors" in said
    assert "sleeps" in said
    engine.wait(timeout=10)
