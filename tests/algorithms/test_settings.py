"""Settings of an algorithm that cannot work, alone or together, are refused in one line that names them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from rlflow import CausalLM, Environment, UserError, algorithms
from rlflow.algorithms.self_play import _with
from rlflow.functional import KL, Bounds, Clip, Importance
from tests.algorithm_factory import made
from tests.controller.runs import OddCharacters


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("GRPO", {"anchor": "rollout"}, "`anchor` is 'rollout', .* set `importance` to null"),
        ("GRPO", {"anchor": "engine"}, "`anchor` is 'engine'; give one of old, rollout"),
        ("GRPO", {"kl_coef": 0.1, "kl_kind": "k1"}, r"`kl.kind` is 'k1' and `kl.in_reward` is false, .*'k3-ratio'"),
        ("PPO", {"kl_coef": 0.1, "kl_kind": "k3-ratio"}, r"`kl.kind` is 'k3-ratio' and `kl.in_reward` is true, .*'k1'"),
        ("DAPO", {"kl_coef": 0.1, "kl_in_reward": True}, r"`kl.in_reward` is true, and DAPO has no rewards to take"),
        ("GRPO", {"kl_coef": 0.1, "kl_target": 0.1}, r"`kl.target` is 0.1, and adapts KL in the reward; set"),
        ("CPGD", {"clip_low": 1.0}, r"`clip.low` is 1.0, and CPGD takes log\(1 - clip.low\); give less than 1"),
        ("GPG", {"epochs": 2}, "`actor.epochs` is 2, and GPG makes one update a step"),
        ("OPO", {"samples_per_update": 8}, "`actor.samples_per_update` is 8, and OPO makes one update a step"),
        (
            "DAPO",
            {"overlong_buffer": 0},
            "`overlong_buffer` is 0; give a whole number of tokens from 1 to .* 256, a share",
        ),
        ("DAPO", {"overlong_buffer": 2.5}, "`overlong_buffer` is 2.5; give a whole number of tokens"),
        ("DAPO", {"overlong_buffer": 257}, "`overlong_buffer` is 257; give a whole number of tokens"),
        ("PPO", {"critic_lam": 1.1}, "`critic_lam` is 1.1; give a number from 0 to 1"),
        ("CPGD", {"weight": "deviation"}, "`weight` is 'deviation'; give one of std, filter, none"),
        ("CPGD", {"weight_cap": 0.5}, "`weight_cap` is 0.5, .* raise it"),
        ("CPGD", {"drift_clip": 0.0}, "`drift_clip` is 0.0; give more than 0"),
        ("ScoreCentering", {}, "`top_k` of `actor` is not set, and score centering sums over the tokens"),
        ("ScoreCentering", {"top_k": 8, "importance": Importance("sequence")}, "`importance.level` is 'sequence'"),
        ("TreeRL", {"branches": 1}, "`branches` is 1; a trunk that forks has at least 2 leaves"),
        ("TreeRL", {"branches": 3}, "`group_size` is 8 and `branches` is 3; .* so make `group_size` a multiple"),
        ("RAFT", {"group_size": 1}, "`group_size` is 1; the best is chosen of at least 2"),
        ("GRPO", {"advantages_at": "turn"}, "`advantages_at` is 'turn' without an `environment`, .* set `environment`"),
        ("GRPO", {"advantages_at": "turns"}, "`advantages_at` is 'turns'; give one of conversation, turn, subtree"),
        (
            "GRPO",
            {"advantages_at": "subtree", "environment": Environment("tests.controller.answering.Counting")},
            "`advantages_at` is 'subtree', and conversations with this `environment` share no turns; .* rlflow.Harness",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        made(getattr(algorithms, name), "tiny", OddCharacters(), **settings)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("clip", "SAPO CISPO DPPO REINFORCE GPG"),
        ("anchor", "GPG CPGD"),
        ("normalize_std", "CPGD MaxRL GDPO"),
        ("advantages_at", "PPO ReMax REINFORCEPlusPlus REINFORCEPlusPlusBaseline OPO GPG MaxRL GMPO GDPO GAIL TreeRL"),
        ("overlong_buffer", "GDPO GAIL OnPolicyDistillation MaxRL"),
        ("reward_model", "GDPO GAIL OnPolicyDistillation"),
        ("environment", "TreeRL GDPO"),
    ],
)
def test_a_setting_that_an_algorithm_has_no_use_for_is_none_of_its_arguments(setting: str, names: str) -> None:
    for name in names.split():
        assert setting not in inspect.signature(getattr(algorithms, name)).parameters, name


@pytest.mark.parametrize("name", ["GSPO", "GMPO", "CPGD"])
def test_a_clip_without_dual_is_given_none(name: str) -> None:
    algorithm = getattr(algorithms, name)
    with pytest.raises(UserError, match=rf"^`clip.dual` is 3.0, which {name} has no use for: .* Bounds \(high, low\);"):
        algorithm(CausalLM("tiny"), OddCharacters(), clip=Clip(dual=3.0))
    for clip in (Clip(low=0.1), Bounds(0.1)):
        assert algorithm(CausalLM("tiny"), OddCharacters(), clip=clip).clip.low == 0.1


def test_reverse_kl_is_of_tokens_or_of_sequences() -> None:
    with pytest.raises(UserError, match="`reverse_kl` is 'tokens'; give one of token, sequence"):
        algorithms.OnPolicyDistillation(CausalLM("tiny"), teacher=CausalLM("tiny"), reverse_kl="tokens")  # type: ignore[arg-type]


def test_kl_that_is_off_may_be_of_any_kind() -> None:
    for kl in (KL(kind="k1", in_reward=False), KL(kind="k3-ratio", in_reward=True)):
        assert algorithms.GRPO(CausalLM("tiny"), OddCharacters(), kl=kl).kl.coef == 0


@pytest.mark.parametrize(
    ("name", "given", "in_reward", "kind"),
    [
        ("GRPO", KL(0.1), False, "k3-ratio"),
        ("GRPO", KL(0.1, in_reward=True), True, "k1"),
        ("RLOO", KL(0.1), True, "k1"),
        ("ReMax", KL(0.1), True, "k1"),
        ("PPO", KL(0.1), True, "k1"),
        ("PPO", KL(0.1, in_reward=False), False, "k3-ratio"),
        ("REINFORCEPlusPlus", KL(0.1, "k2"), True, "k2"),
        ("REINFORCEPlusPlusBaseline", KL(0.1), False, "k2"),
        ("REINFORCEPlusPlusBaseline", KL(0.1, in_reward=True), True, "k1"),
    ],
)
def test_kl_stands_where_the_algorithm_has_it_and_of_the_kind_that_is_right_there(
    name: str, given: KL, in_reward: bool, kind: str
) -> None:
    found = getattr(algorithms, name)(CausalLM("tiny"), OddCharacters(), kl=given).kl
    assert (found.in_reward, found.kind) == (in_reward, kind)


def test_a_question_is_written_where_the_reward_reads_it() -> None:
    row = {"a": {"b": 1}, "c.d": 2, "text": "said"}
    assert _with(row, "a.b", "?") == {**row, "a": {"b": "?"}}
    assert _with(row, "c.d", "?") == {**row, "c.d": "?"}
    with pytest.raises(UserError, match=r"^`column` steps by `text.b` into `text`, which is 'said' in a row, and no"):
        _with(row, "text.b", "?")


@pytest.mark.parametrize("setting", ["questions", "answers"])
def test_self_play_compares_at_least_two(setting: str) -> None:
    with pytest.raises(UserError, match=f"^`{setting}` is 1; group-relative advantages need at least 2"):
        algorithms.SelfPlay(CausalLM("tiny"), CausalLM("tiny"), OddCharacters(), **{setting: 1})
