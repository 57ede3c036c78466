"""An engine that dies, hangs or raises: one restart where it has a process of its own, else a clean stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlflow.models.tiny import write_tiny_model
from rlflow.rollout import (
    Completion,
    EngineProcessError,
    EngineSubprocess,
    Sampling,
    TransformersEngine,
    VLLMEngine,
    WeightSyncError,
)
from rlflow.rollout.engine import GenerationRequest
from tests import own_folder
from tests.faults.running import fit, left_over
from tests.rollout.stepping import assert_alike, stepped, turns
from tests.rollout.trained import PROMPTS, STOP, buckets, load, perturb, setup

pytestmark = pytest.mark.row("engine faults")

SEEDS = list(range(len(PROMPTS)))
SAMPLING = Sampling(24, 1.0, STOP)


class Later(TransformersEngine):
    """Ends each turn in the step after the one in which it began."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: dict[int, GenerationRequest] = {}

    def step(self, new: Mapping[int, GenerationRequest], sampling: Sampling, version: int) -> dict[int, Completion]:
        before, self._begun = self._begun, dict(new)
        return super().step(before, sampling, version)


ENGINES = {"transformers": Later, "vllm": lambda: VLLMEngine(kv_cache_gib=0.25)}
EACH = ["transformers", pytest.param("vllm", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1, intermediate_size=96, max_position=256)


@pytest.fixture
def model(folder: Path) -> Any:
    return load(folder)


@pytest.fixture
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[EngineSubprocess]:
    beside = EngineSubprocess(ENGINES[request.param](), index=0, size=1, address="", timeout_s=60.0)
    setup(beside, folder)
    yield beside
    beside.close()


def fall(engine: EngineSubprocess, number: int) -> int:
    """Send its process a signal; its id."""
    process = engine._running()._popen
    process.send_signal(number)
    return process.pid


@pytest.mark.parametrize("engine", EACH, indirect=True)
def test_a_killed_engine_is_restarted_with_its_weights_and_answers_as_before(
    engine: EngineSubprocess, model: Any, seen: Callable[[str], None]
) -> None:
    for version in range(2):
        perturb(model, version)
        engine.update_weights(buckets(model), version)
    before = engine.generate(PROMPTS, SEEDS, SAMPLING, 1)
    perturb(model, 2)  # which the engine must not be given
    first, second, *_ = turns(SAMPLING).items()
    engine.step(dict([first]), SAMPLING, 1)
    killed = fall(engine, signal.SIGKILL)
    ended = engine.step(dict([second]), SAMPLING, 1)
    for _ in range(SAMPLING.max_tokens):
        ended |= engine.step({}, SAMPLING, 1)
    assert_alike([ended[0], ended[1]], before[:2])
    assert engine.generate(PROMPTS, SEEDS, SAMPLING, 1) == before
    assert engine.policy_version == 1
    assert engine._running()._popen.pid != killed
    with pytest.raises(WeightSyncError, match="the engine holds version 1, and must generate with version 0"):
        engine.generate(PROMPTS, SEEDS, SAMPLING, 0)
    fall(engine, signal.SIGKILL)
    with pytest.raises(EngineProcessError, match=r"^rank 0: .* was killed by SIGKILL when it should generate"):
        engine.generate(PROMPTS, SEEDS, SAMPLING, 1)
    engine.sleep()  # of a process that is gone; the next sync starts another
    engine.wake_up()
    seen("killed: one restart, the weights read back, the same tokens; killed again: the run ends")


@pytest.mark.slow
@pytest.mark.parametrize("engine", EACH, indirect=True)
def test_an_engine_that_was_killed_between_steps_gets_the_next_weights(engine: EngineSubprocess, model: Any) -> None:
    engine.update_weights(buckets(model), 0)
    fall(engine, signal.SIGKILL)
    engine._running()._popen.wait()
    engine.sleep()
    perturb(model, 0)
    engine.wake_up()  # as a sync does first
    report = engine.update_weights(buckets(model), 1)
    assert report.tensors == len(list(model.parameters()))
    assert len(engine.generate(PROMPTS, SEEDS, SAMPLING, 1)) == len(PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
def test_turns_in_progress_begin_again(engine: EngineSubprocess, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.update_weights(buckets(model), 0)
    before = stepped(engine, SAMPLING, 0)
    call, calls = engine._call, []

    def killed_at_the_fourth(method: str, *given: Any, **more: Any) -> Any:
        calls.append(method)
        if len(calls) == 4:
            fall(engine, signal.SIGKILL)
        return call(method, *given, **more)

    monkeypatch.setattr(engine, "_call", killed_at_the_fourth)
    assert_alike(stepped(engine, SAMPLING, 0), before)
    assert len(calls) > 4


@pytest.mark.slow
@pytest.mark.parametrize("engine", EACH, indirect=True)
def test_an_engine_that_hangs_is_ended_and_started_again(engine: EngineSubprocess, model: Any) -> None:
    engine.update_weights(buckets(model), 0)
    before = engine.generate(PROMPTS, SEEDS, SAMPLING, 0)
    engine._running()._timeout_s = 1.0
    stopped = fall(engine, signal.SIGSTOP)
    assert engine.generate(PROMPTS, SEEDS, SAMPLING, 0) == before
    assert engine._running()._popen.pid != stopped


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["transformers"], indirect=True)
def test_after_a_failed_sync_there_are_no_weights_to_start_again_with(engine: EngineSubprocess, model: Any) -> None:
    engine.update_weights(buckets(model), 0)
    with pytest.raises(WeightSyncError):
        engine.update_weights(buckets(model, leave_out="model.norm.weight"), 1)
    fall(engine, signal.SIGKILL)
    with pytest.raises(EngineProcessError, match="was killed by SIGKILL"):
        engine.generate(PROMPTS, SEEDS, SAMPLING, 0)


RAISES = """
from rlflow.rollout import TransformersEngine


class Raises(TransformersEngine):
    def _generate(self, prompts, seeds, sampling):
        if self.policy_version == 1:
            raise RuntimeError("no kernel image is available")
        return super()._generate(prompts, seeds, sampling)
"""


@pytest.mark.slow
def test_an_engine_in_the_ranks_own_process_that_raises_ends_the_run(
    tmp_path: Path, seen: Callable[[str], None]
) -> None:
    own_folder.make(tmp_path)
    (tmp_path / "my_engine.py").write_text(RAISES)
    own_folder.write(tmp_path / "my.yaml", own_folder.TWO_RANKS | {"rollout.class_path": "my_engine.Raises"})
    with left_over(tmp_path) as left:
        ended = fit(tmp_path, "--config", "my.yaml")
    assert (ended.code, left) == (1, [])
    assert "no kernel image is available" in ended.errors
    assert "rank " in ended.last
    seen("raises in the rank's process: the run ends with code 1 and names the rank")
