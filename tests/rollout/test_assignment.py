"""The engine that each policy gets, as configured."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from transformers import Qwen2Config

from rlflow.errors import UserError
from rlflow.rollout import RolloutEngine, Share, TransformersEngine, VLLMEngine
from rlflow.rollout.assignment import Engines, EngineSettings, policies_with_engine_processes
from rlflow.values.layout import Layout

POLICIES = ("actor", "opponent", "judge")
ALL, SOME = Layout((0, 1), 2), Layout((1,), 1)


def assigned(exceptions: Mapping[str, RolloutEngine | Share], rollout: RolloutEngine | None = None) -> Engines:
    return EngineSettings(rollout or TransformersEngine(max_batch=7), exceptions).assigned(POLICIES)


def test_one_policy_generates_with_the_very_engine_of_the_config() -> None:
    engine = TransformersEngine()
    assert EngineSettings(engine).assigned(["actor"]).own["actor"] is engine


def test_each_policy_has_an_engine_of_its_own_with_the_settings_of_rollout() -> None:
    engines = assigned({})
    own = [engines[policy] for policy in POLICIES]
    assert [engine.max_batch for engine in own if isinstance(engine, TransformersEngine)] == [7, 7, 7]
    assert len(set(map(id, own))) == 3


def test_an_exception_replaces_the_engine_of_its_policy_alone() -> None:
    other = VLLMEngine()
    engines = assigned({"opponent": other})
    assert [type(engines[policy]).__name__ for policy in POLICIES] == [
        "TransformersEngine",
        "VLLMEngine",
        "TransformersEngine",
    ]
    assert engines["opponent"] is other


def test_an_exception_given_for_two_policies_is_two_engines() -> None:
    other = TransformersEngine()
    engines = assigned({"opponent": other, "judge": other})
    assert engines["opponent"] is not engines["judge"]


def test_a_share_is_the_engine_of_the_other_policy() -> None:
    engines = assigned({"opponent": Share("actor"), "judge": Share("actor")})
    assert engines["opponent"] is engines["judge"] is engines["actor"]
    assert list(engines.own) == ["actor"]
    assert engines.users("actor") == POLICIES


@pytest.mark.parametrize(
    ("exceptions", "said"),
    [
        (
            {"oponent": TransformersEngine()},
            "`engines.oponent` names 'oponent', which is not a policy that generates; those are actor, opponent, judge."
            ' Did you mean "opponent"?',
        ),
        (
            {"opponent": Share("acter")},
            "`engines.opponent.share` names 'acter', which is not a policy that generates; those are actor, opponent,"
            ' judge. Did you mean "actor"?',
        ),
        (
            {"opponent": Share("opponent")},
            "`engines.opponent.share` is 'opponent', the policy itself; name another policy, whose engine it uses",
        ),
        (
            {"opponent": Share("judge"), "judge": Share("actor")},
            "`engines.opponent.share` is 'judge', which has no engine of its own and shares that of `actor`; name a"
            " policy with an engine of its own",
        ),
    ],
)
def test_exceptions_that_cannot_be_are_refused_in_one_line(
    exceptions: Mapping[str, RolloutEngine | Share], said: str
) -> None:
    with pytest.raises(UserError) as error:
        assigned(exceptions)
    assert str(error.value) == said


def test_a_node_that_generates_with_two_policies_of_one_engine_is_refused() -> None:
    engines = assigned({"judge": Share("actor")})
    engines.refuse_together("game", ("actor", "opponent"))
    with pytest.raises(UserError) as error:
        engines.refuse_together("game", ("actor", "judge"))
    assert str(error.value) == (
        "node `game` generates with `actor` and `judge`, which share an engine in turns, so one of them is in it while"
        " a node runs; leave out `engines.judge`, or generate in a node for each"
    )


def test_models_of_two_architectures_do_not_share_an_engine() -> None:
    engines = assigned({"judge": Share("actor")})
    small, large = Qwen2Config(hidden_size=64), Qwen2Config(hidden_size=128)
    layouts = dict.fromkeys(POLICIES, ALL)
    other_name = Qwen2Config(hidden_size=64, eos_token_id=7, name_or_path="elsewhere")
    engines.check_shared({"actor": small, "opponent": large, "judge": other_name}, layouts)
    with pytest.raises(UserError) as error:
        engines.check_shared({"actor": small, "opponent": small, "judge": large}, layouts)
    assert str(error.value) == (
        "`engines.judge` shares the engine of `actor`, which is built for one architecture, and `hidden_size` is 64"
        " there and 128 here; leave `engines.judge` out for an engine of its own"
    )


def test_policies_on_other_ranks_do_not_share_an_engine() -> None:
    engines = assigned({"judge": Share("actor")})
    configs = dict.fromkeys(POLICIES, Qwen2Config())
    with pytest.raises(UserError) as error:
        engines.check_shared(configs, {"actor": ALL, "opponent": ALL, "judge": SOME})
    assert str(error.value) == (
        "`engines.judge` shares the engine of `actor` on ranks 0-1, and `placement` has it generate on rank 1; place"
        " both alike, or leave `engines.judge` out"
    )


def test_engines_that_cannot_live_in_one_process_get_processes_of_their_own() -> None:
    def beside(exceptions: Mapping[str, RolloutEngine], on_cpu: bool, **layouts: Layout) -> tuple[str, ...]:
        placed = dict.fromkeys(POLICIES, ALL) | layouts
        return policies_with_engine_processes(assigned(exceptions, VLLMEngine()), placed, 2, on_cpu)

    assert beside({}, on_cpu=True) == ()
    assert beside({}, on_cpu=False) == ("opponent", "judge")  # one of a process can sleep
    assert beside({"opponent": TransformersEngine()}, on_cpu=False) == ("judge",)
    assert beside({"judge": VLLMEngine(tensor_parallel_size=2)}, on_cpu=True) == ("judge",)
    assert beside({}, on_cpu=True, actor=SOME) == ("actor",)
    assert beside({}, on_cpu=False, actor=SOME) == ("actor", "judge")
