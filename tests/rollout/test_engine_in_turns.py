"""Two policies that use one engine in turns, and two engines of one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlflow.databuffer.transport import Transport
from rlflow.rollout import RankInfo, RolloutEngine, Sampling, Share, TransformersEngine, VLLMEngine, WeightSyncError
from rlflow.rollout.assignment import EngineSettings, RankEngines, engines_of_rank
from rlflow.values.layout import Layout
from tests.ranks import RankPool
from tests.rollout.trained import PROMPTS, STOP, buckets, load, logprob_gap, perturb, setup

SEEDS = list(range(len(PROMPTS)))
SAMPLING = Sampling(16, 1.0, STOP)


def engines_here(
    folders: Mapping[str, Path], rollout: RolloutEngine, exceptions: Mapping[str, RolloutEngine | Share] | None = None
) -> RankEngines:
    """Engines of policies with models in `folders`, set up on this process alone."""
    engines = EngineSettings(rollout, exceptions or {}).assigned([*folders])
    transport = Transport(torch.device("cpu"))
    here = engines_of_rank(engines, dict.fromkeys(folders, Layout((0,), 1)), transport, on_cpu=True, timeout_s=120.0)
    for policy, engine in here.own.items():
        setup(engine, folders[policy])
    return here


def policies(folders: Mapping[str, Path]) -> dict[str, Any]:
    """A model for each, of other weights."""
    models = {}
    for seed, (policy, folder) in enumerate(folders.items()):
        models[policy] = load(folder)
        perturb(models[policy], seed)
    return models


@pytest.mark.parametrize(
    "rollout",
    [
        pytest.param(TransformersEngine(), id="transformers"),
        pytest.param(VLLMEngine(kv_cache_gib=0.25), id="vllm", marks=pytest.mark.slow),
    ],
)
def test_each_engine_of_a_process_generates_with_its_own_weights(
    rollout: RolloutEngine, tied: Path, untied: Path
) -> None:
    folders = {"actor": tied, "opponent": untied}
    here, models = engines_here(folders, rollout), policies(folders)
    for version in range(2):
        for policy, model in models.items():
            perturb(model, 10 + version)
            here.by_policy[policy].update_weights(buckets(model), version)
        for policy, model in models.items():
            completions = here.by_policy[policy].generate(PROMPTS, SEEDS, SAMPLING, version)
            assert logprob_gap(model, PROMPTS, completions) < 1e-4
    here.own["actor"].close()
    again = here.own["opponent"].generate(PROMPTS, SEEDS, SAMPLING, 1)
    assert again == completions  # the other's end changes nothing
    here.own["opponent"].close()
    assert not dist.is_initialized()


def test_an_engine_in_turns_generates_with_the_policy_that_was_synced_last(tied: Path) -> None:
    folders = {"actor": tied, "opponent": tied}
    here, models = engines_here(folders, TransformersEngine(), {"opponent": Share("actor")}), policies(folders)
    assert len(here.own) == 1
    for version in range(2):
        for policy, model in models.items():
            engine = here.by_policy[policy]
            assert engine.update_weights(buckets(model), version).version == engine.policy_version == version
            completions = engine.generate(PROMPTS, SEEDS, SAMPLING, version)
            assert logprob_gap(model, PROMPTS, completions) < 1e-4
            assert dict(engine.completions(PROMPTS, SEEDS, SAMPLING, version)) == dict(enumerate(completions))


def test_a_policy_that_is_not_in_the_engine_generates_nothing(tied: Path) -> None:
    folders = {"actor": tied, "opponent": tied}
    here, models = engines_here(folders, TransformersEngine(), {"opponent": Share("actor")}), policies(folders)
    actor, opponent = here.by_policy["actor"], here.by_policy["opponent"]
    with pytest.raises(WeightSyncError, match="the engine that it shares holds no version"):
        actor.generate(PROMPTS, SEEDS, SAMPLING, 3)
    with pytest.raises(WeightSyncError, match="the engine that it shares holds no version"):
        list(actor.completions(PROMPTS, SEEDS, SAMPLING, 3))
    actor.update_weights(buckets(models["actor"]), 3)
    opponent.update_weights(buckets(models["opponent"]), 3)  # of the same number, and another policy's
    with pytest.raises(WeightSyncError) as error:
        actor.generate(PROMPTS, SEEDS, SAMPLING, 3)
    assert str(error.value) == (
        "`actor` must generate with version 3 of its weights, and the engine that it shares holds version 3 of"
        " `opponent`; sync the weights of `actor` first"
    )
    with pytest.raises(WeightSyncError, match="not sent"):
        actor.update_weights(buckets(models["actor"], leave_out="model.norm.weight"), 4)
    for engine in (actor, opponent):
        with pytest.raises(WeightSyncError, match="holds no version"):
            engine.generate(PROMPTS, SEEDS, SAMPLING, 3)


def test_only_the_policy_in_the_engine_puts_it_to_sleep(tied: Path) -> None:
    folders = {"actor": tied, "opponent": tied}
    here, models = engines_here(folders, TransformersEngine(), {"opponent": Share("actor")}), policies(folders)
    actor, opponent = here.by_policy["actor"], here.by_policy["opponent"]
    actor.update_weights(buckets(models["actor"]), 0)
    opponent.sleep()
    actor.generate(PROMPTS, SEEDS, SAMPLING, 0)
    actor.sleep(keep_weights=True)
    actor.wake_up()
    actor.generate(PROMPTS, SEEDS, SAMPLING, 0)
    actor.sleep()
    assert actor.policy_version == -1
    with pytest.raises(WeightSyncError, match="the engine that it shares holds no version"):
        actor.generate(PROMPTS, SEEDS, SAMPLING, 0)


def _two_of_a_rank(folders: dict[str, Path]) -> list[float]:
    """The gaps of two engines of this rank to training, the second generating after the first is closed."""
    transport = Transport(torch.device("cpu"))
    engines = EngineSettings(VLLMEngine(kv_cache_gib=0.25)).assigned([*folders])
    here = engines_of_rank(engines, dict.fromkeys(folders, Layout((0, 1), 2)), transport, on_cpu=True, timeout_s=120.0)
    place = RankInfo(torch.float32, torch.device("cpu"), transport.rank, 2, transport.rank)
    models = policies(folders)
    for policy, engine in here.own.items():
        engine.setup(str(folders[policy]), place)
        engine.update_weights(buckets(models[policy]), 0)
    gaps = []
    for policy, engine in here.own.items():
        gaps.append(logprob_gap(models[policy], PROMPTS, engine.generate(PROMPTS, SEEDS, SAMPLING, 0)))
        engine.close()
    assert dist.get_world_size() == 2  # training's process group is still there
    return gaps


@pytest.mark.slow
def test_two_engines_of_each_rank_generate_with_their_own_weights(ranks2: RankPool, tied: Path, untied: Path) -> None:
    for gaps in ranks2.run(_two_of_a_rank, {"actor": tied, "opponent": untied}, timeout_s=300):
        assert max(gaps) < 1e-4
