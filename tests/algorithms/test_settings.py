"""Settings of an algorithm that cannot work, alone or together, are refused in one line that names them."""

from __future__ import annotations

from typing import Any

import pytest

from rlflow import UserError, algorithms
from rlflow.functional import Importance
from tests.controller.runs import OddCharacters


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("GRPO", {"anchor": "rollout"}, "`anchor` is 'rollout', .* set `importance` to null"),
        ("GRPO", {"anchor": "engine"}, "`anchor` is 'engine'; give one of old, rollout"),
        ("GRPO", {"kl_coef": 0.1, "kl_kind": "k1"}, "`kl_kind` is 'k1' and `kl_in_reward` is false, .*'k3-ratio'"),
        ("PPO", {"kl_coef": 0.1, "kl_in_reward": False}, "`kl_kind` is 'k1' and `kl_in_reward` is false"),
        ("GRPO", {"kl_coef": 0.1, "kl_in_reward": True}, "`kl_kind` is 'k3-ratio' and `kl_in_reward` is true, .*'k1'"),
        ("GPG", {"epochs": 2}, "`epochs` is 2, which GPG has no use for"),
        ("GPG", {"samples_per_update": 8}, "`samples_per_update` is 8, which GPG has no use for"),
        ("GPG", {"anchor": "rollout", "importance": None}, "`anchor` is rollout, which GPG has no use for"),
        ("OPO", {"anchor": "rollout", "importance": None}, "`anchor` is rollout, which OPO has no use for"),
        (
            "DAPO",
            {"overlong_buffer": 0},
            "`overlong_buffer` is 0; give a whole number of tokens from 1 to .* 256, a share",
        ),
        ("DAPO", {"overlong_buffer": 2.5}, "`overlong_buffer` is 2.5; give a whole number of tokens"),
        ("DAPO", {"overlong_buffer": 257}, "`overlong_buffer` is 257; give a whole number of tokens"),
        ("PPO", {"critic_lam": 1.1}, "`critic_lam` is 1.1; give a number from 0 to 1"),
        ("PPO", {"critic_loss_aggregation": "mean"}, "`critic_loss_aggregation` is 'mean'; give one of token-mean, "),
        ("CPGD", {"normalize_std": False}, "`normalize_std` is False, which CPGD has no use for"),
        ("CPGD", {"weight": "deviation"}, "`weight` is 'deviation'; give one of std, filter, none"),
        ("CPGD", {"weight_cap": 0.5}, "`weight_cap` is 0.5, .* raise it"),
        ("CPGD", {"drift_clip": 0.0}, "`drift_clip` is 0.0; give more than 0"),
        ("GSPO", {"loss_aggregation": "token-mean"}, "`loss_aggregation` is token-mean, which GSPO has no use for"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        getattr(algorithms, name)("tiny", OddCharacters(), **settings)
    assert "\n" not in str(refused.value)


def test_a_teacher_s_word_is_of_tokens_or_of_responses() -> None:
    with pytest.raises(UserError, match="`reverse_kl` is 'tokens'; give one of token, sequence"):
        algorithms.OnPolicyDistillation("tiny", teacher_path="tiny", reverse_kl="tokens")  # type: ignore[arg-type]


def test_kl_that_is_off_may_be_of_any_kind() -> None:
    assert algorithms.PPO("tiny", OddCharacters(), kl_in_reward=False).kl_kind == "k1"
    assert algorithms.GRPO("tiny", OddCharacters(), importance=Importance(), kl_in_reward=True).kl_coef == 0
