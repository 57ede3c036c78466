"""Predicted roles on some ranks: busy ranks, memory, and the gain of running ahead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlflow.cli import main
from rlflow.commands.simulate import read_simulate
from rlflow.errors import UserError
from rlflow.settings import Place
from rlflow.simulate.designs import node_seconds, works
from rlflow.simulate.simulation import Simulation

ROOT = Path(__file__).parents[2]
SIXTEEN_NODES = str(ROOT / "configs" / "grpo_math_16nodes.yaml")
EIGHT = str(ROOT / "configs" / "grpo_math_8gpu.yaml")
APART = ['--placement={rollout: "0-3", actor: "4-7"}']


def simulation(*options: str) -> Simulation:
    return read_simulate(["--config", EIGHT, *options])


def seconds(told: Simulation) -> float:
    return told.predicted.timelines["rlflow"].seconds


def of(told: Simulation, *names: str) -> float:
    found = told.predicted.timelines["rlflow"].works
    return sum(found[name].seconds for name in names)


def test_ranks_apart_work_one_after_the_other() -> None:
    apart = simulation(*APART)
    assert seconds(apart) == pytest.approx(
        of(apart, "sync actor", "rollout", "rollout -> rewards, advantages", "old_logprobs", "actor_loss")
        + of(apart, "rollout -> old_logprobs, actor_loss"),
        rel=1e-4,
    )


def test_a_step_that_runs_ahead_takes_the_longer_of_the_two_phases_and_the_sync() -> None:
    ahead = simulation(*APART, "--trainer.max_staleness=1")
    generating, training = of(ahead, "rollout", "rewards", "advantages"), of(ahead, "old_logprobs", "actor_loss")
    assert generating < training
    assert seconds(ahead) == pytest.approx(of(ahead, "sync actor") + training, rel=1e-4)


def test_the_seconds_of_other_placements_are_given() -> None:
    ahead = simulation(*APART, "--trainer.max_staleness=1")
    assert list(ahead.alternatives) == ["in step", "all roles on all ranks"]
    in_step, together = (other.timelines["rlflow"].seconds for other in ahead.alternatives.values())
    assert in_step == pytest.approx(seconds(simulation(*APART)))
    assert together == pytest.approx(seconds(simulation()))
    assert simulation().alternatives == {}


def test_a_placement_that_cannot_be_is_not_an_alternative() -> None:
    # an engine of 7 ranks does not divide 8
    assert simulation('--placement={rollout: "0-6", actor: 7}', "--rollout.tensor_parallel_size=7").alternatives == {}


def test_a_policy_generates_with_the_engine_that_it_shares() -> None:
    step = simulation().predicted
    (engine,) = step.workload.engines.values()
    engines = {"first": replace(engine, ranks=1), "second": engine}
    shared = replace(step.workload, engines=engines, shared={"actor": "second"})
    assert [*works(shared, step.hardware, "rlflow")] == [*works(step.workload, step.hardware, "rlflow")]


def test_more_ranks_of_an_engine_than_heads_of_keys_have_copies() -> None:
    sparse = "--module.actor.model=Qwen/Qwen3-235B-A22B", "--hardware=h200", "--rollout.tensor_parallel_size=8"
    step = simulation(*sparse).predicted
    actor = step.workload.roles["actor"]
    eight = replace(actor, size=replace(actor.size, kv_heads=8))  # instead of 4
    one, other = (
        node_seconds(works(replace(step.workload, roles={"actor": role}), step.hardware, "rlflow"))["rollout"]
        for role in (actor, eight)
    )
    assert one == other


def test_where_prompts_are_fewer_than_shards_some_have_nothing_to_do() -> None:
    few, enough = (
        simulation(f"--data.prompts_per_step={prompts}", f"--module.actor.samples_per_update={4 * prompts}")
        for prompts in (2, 4)
    )
    assert of(few, "rollout") == pytest.approx(of(enough, "rollout"), rel=0.2)  # of 4 engines


@pytest.mark.parametrize("design", ["padded", "packed", "store"])
def test_the_other_designs_overlap_steps_as_well(design: str) -> None:
    ahead, in_step = simulation(*APART, "--trainer.max_staleness=1"), simulation(*APART)
    times = (told.predicted.timelines[design].seconds for told in (ahead, in_step))  # type: ignore[index]
    assert next(times) < 0.8 * next(times)


def test_a_rank_holds_what_lives_on_it() -> None:
    training, generating = simulation(*APART).predicted.memories
    assert (training.ranks, generating.ranks) == ((4, 5, 6, 7), (0, 1, 2, 3))
    assert not training.engines
    assert not generating.roles
    assert generating.training == generating.held
    # ZeRO 3 divides 7.6 thousand million bf16 weights by the four ranks that train.
    assert training.roles["actor"].weights == pytest.approx(7_615_616_512 * 2 / 4)
    assert generating.engines["actor"].weights == pytest.approx(7_615_616_512 * 2 / 2)  # engines of two ranks


def test_engines_of_a_node_with_two_policies_are_awake_together() -> None:
    arguments = ["--config", str(ROOT / "configs" / "agent_two_players.yaml"), "--strategy=deepspeed"]
    (memory,) = read_simulate([*arguments, "--module.actor.model=tiny"]).predicted.memories
    assert len(memory.engines) == 2
    assert memory.awake == sum(engine.awake(memory.capacity) for engine in memory.engines.values())


def test_more_machines_take_the_place_of_each_rank() -> None:
    grown = simulation(*APART, "--nodes=4").predicted.workload
    assert grown.engines["actor"].placed == tuple(range(16))
    assert grown.roles["actor"].layout.ranks == tuple(range(16, 32))


def test_peers_of_a_sequence_share_its_activations() -> None:
    whole, divided = simulation(), simulation("--placement={actor: {sequence_parallel_size: 2}}")
    divided_bytes, whole_bytes = (of.predicted.memory.roles["actor"].activations for of in (divided, whole))
    assert divided_bytes == pytest.approx(whole_bytes / 2)
    assert divided.predicted.workload.roles["actor"].layout.shards == 4


def test_the_tokens_that_were_left_are_among_a_row_s_bytes() -> None:
    whole, cut = simulation(), simulation("--module.actor.top_p=0.9", "--module.actor.top_k=64")
    plain, stored = (of.predicted.workload for of in (whole, cut))
    # At most 64 tokens at each place of a response, which has half of the longest on average: ids of 4 bytes, and
    # log-probabilities of 4 for a node that names them.
    more = stored.value_bytes("rollout") - plain.value_bytes("rollout")
    assert more == 8 * 64 * plain.lengths.response
    assert stored.value_bytes("rollout", fields=["support"]) == 4 * 64 * plain.lengths.response
    assert cut.predicted.memory.training > whole.predicted.memory.training


@pytest.mark.slow
def test_the_fastest_divisions_that_fit_are_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    sparse = ("--module.actor.model=Qwen/Qwen3-30B-A3B", "--hardware=h200")
    found = simulation("--strategy=fsdp", *sparse).divisions
    times = [step.timelines["rlflow"].seconds for _, step in found]
    assert times == sorted(times)
    places = [division.place for division, _ in found]
    sizes = [(each.tensor_parallel_size, each.sequence_parallel_size, each.expert_parallel_size) for each in places]
    assert {(1, 1, 1), (1, 1, 8), (2, 1, 4)} < {*sizes}
    assert all(layers in (1, 2, 4) for layers, _, _ in sizes)  # of 4 heads of keys
    assert all(layers == 1 or experts > 1 for layers, _, experts in sizes)
    assert all(division.hsdp_shard_size is None for division, _ in found)  # there is one node
    given = simulation(
        "--strategy=fsdp", *sparse, "--placement={actor: {tensor_parallel_size: 2, expert_parallel_size: 4}}"
    )
    assert times[sizes.index((2, 1, 4))] == pytest.approx(seconds(given))
    main(["simulate", "--config", EIGHT, "--strategy=fsdp", *sparse, "--suggest"])
    assert f"\n    {' x '.join(map(str, sizes[0])):<24} step " in capsys.readouterr().out
    with pytest.raises(UserError, match="which only `strategy: fsdp` does"):
        _ = simulation().divisions


@pytest.mark.slow
def test_copies_of_weights_on_nodes_are_among_the_suggestions() -> None:
    found = simulation("--strategy=fsdp", "--nodes=4").divisions
    copies = {division.hsdp_shard_size: step for division, step in found if division.place == Place()}
    assert {*copies} == {None, 8, 16}
    of_three = read_simulate(["--config", SIXTEEN_NODES, "--strategy=fsdp", "--nodes=3"]).divisions
    assert {division.hsdp_shard_size for division, _ in of_three if division.place == Place()} == {None, 8}
    # The same as where the config has the setting, in seconds and in bytes.
    given = simulation("--strategy=fsdp", "--strategy.hsdp_shard_size=8", "--nodes=4").predicted
    assert copies[8].timelines["rlflow"].seconds == pytest.approx(given.timelines["rlflow"].seconds)
    assert copies[8].memory.training == pytest.approx(given.memory.training)
    assert copies[8].memory.training > copies[None].memory.training
    # Ranks that divide layers or experts hold no copies.
    assert {division.hsdp_shard_size for division, _ in found if division.place.tensor_parallel_size > 1} == {None}


def test_a_placement_that_cannot_be_made_smaller_is_refused(tmp_path: Path) -> None:
    (tmp_path / "half.yaml").write_text("like: h100\ngpus_per_node: 4\n")
    with pytest.raises(UserError, match=r"`placement.actor.rollout` names 3 of 8 ranks, and 4 ranks cannot be divided"):
        seconds(
            simulation(
                '--placement={rollout: "0-2", actor: "3-7"}',
                "--rollout.tensor_parallel_size=1",
                f"--hardware={tmp_path / 'half.yaml'}",
            )
        )


def test_memory_that_is_short_names_rank_role_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["simulate", "--config", EIGHT, *APART, "--module.actor.model=Qwen/Qwen2.5-72B"])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  ! rank 4"))
    assert "rank 4 is out of memory by" in line
    assert "while training; `actor` holds" in line
