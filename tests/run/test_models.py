"""The models of a run: copies of those given, the handles derived from them, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from rlflow import CausalLM, LoRA, Optimizer, PerToken, RewardModel, RLModule, UserError, ValueModel, node
from rlflow.algorithms import DPO, GPG, GRPO, PPO, SFT, OnPolicyDistillation
from rlflow.functional import KL
from rlflow.models.moe import MoE
from rlflow.run.prepare import read_graph
from rlflow.types import TokensWithLossMask
from tests.controller.runs import OddCharacters


def test_a_run_changes_no_model_that_a_user_holds() -> None:
    actor = CausalLM("tiny")
    module = GRPO(actor, OddCharacters())
    for _ in range(2):  # another run starts as the first did
        read_graph(module)
        assert module.actor is not actor
        assert module.actor.trainable
        assert module.actor.optimizer == actor.optimizer
        module.actor.freeze()  # as validation does
    assert actor.trainable


def test_defaults_taken_from_the_actor_are_those_of_the_actor_of_the_run() -> None:
    module = PPO(CausalLM("tiny", epochs=3, samples_per_update=4, gradient_checkpointing=True), OddCharacters())
    for _ in range(2):
        read_graph(module)
        critic = module.critic
        assert isinstance(critic, ValueModel)
        assert (critic.model, critic.epochs, critic.samples_per_update) == ("tiny", 3, 4)
        assert critic.gradient_checkpointing
        assert critic.optimizer == Optimizer(lr=1e-5)
    module.actor = CausalLM("other", lora=LoRA())
    read_graph(module)
    assert module.critic.model == "other"
    assert module.reference.owner is module.actor


def test_a_model_of_the_config_is_the_one_that_others_follow_from() -> None:
    module = GRPO(CausalLM("tiny"), OddCharacters(), kl=KL(0.1))
    module.config_models = {"actor": CausalLM("other", temperature=0.7), "reference": CausalLM("third")}
    read_graph(module)
    assert (module.actor.model, module.reference.model) == ("other", "third")
    assert (module.reference.temperature, module.reference.trainable) == (0.7, False)


def nodes_of(module: GRPO) -> set[str]:
    return set(read_graph(module).nodes)


def test_the_graph_is_that_of_the_actor_of_the_run() -> None:
    """Old log-probabilities are needed where a step makes several updates, whoever says so."""
    module = GRPO(CausalLM("tiny"), OddCharacters())
    assert "old_logprobs" not in nodes_of(module)
    module.config_models = {"actor": CausalLM("tiny", epochs=2)}
    assert "old_logprobs" in nodes_of(module)
    module.config_models = {}
    module.actor = CausalLM("tiny", samples_per_update=4)
    assert "old_logprobs" in nodes_of(module)
    module.actor = CausalLM("tiny")
    assert "old_logprobs" not in nodes_of(module)
    once = GPG(CausalLM("tiny"), OddCharacters())
    once.config_models = {"actor": CausalLM("tiny", epochs=2)}
    with pytest.raises(UserError, match=r"`actor.epochs` is 2, and GPG makes one update a step"):
        read_graph(once)


def test_what_is_changed_of_a_model_between_two_runs_counts_in_the_next() -> None:
    held = CausalLM("tiny")
    module = GRPO(held, OddCharacters())
    read_graph(module)
    module.actor.epochs, module.actor.optimizer = 4, Optimizer(lr=1e-3)
    for _ in range(2):
        assert "old_logprobs" in nodes_of(module)
        assert (module.actor.epochs, module.actor.optimizer) == (4, Optimizer(lr=1e-3))
    assert held.epochs == 1


def test_an_average_that_a_constructor_makes_follows_the_actor_of_the_run() -> None:
    module = SFT(CausalLM("tiny"))
    module.teacher = module.actor.averaged(0.9)  # type: ignore[attr-defined]
    read_graph(module)
    assert module.teacher.owner is module.actor  # type: ignore[attr-defined]


def test_a_critic_s_losses_per_token_become_one_number_by_themselves() -> None:
    module = PPO(CausalLM("tiny"), OddCharacters(), loss_aggregation="constant", critic=ValueModel("tiny"))
    read_graph(module)
    assert module.critic.loss_aggregation == "token-mean"
    module.critic = ValueModel("tiny", loss_aggregation="constant")
    read_graph(module)
    assert module.critic.loss_aggregation == "constant"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"optimizer": Optimizer(lr=1e-3)}, "optimizer"),
        ({"lora": LoRA()}, "lora"),
        ({"moe": MoE(freeze_router=True)}, "moe"),
        ({"epochs": 2}, "epochs"),
        ({"samples_per_update": 2}, "samples_per_update"),
        ({"start_step": 2}, "start_step"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing"),
    ],
)
def test_settings_of_training_are_refused_for_a_model_that_only_scores(settings: dict[str, Any], name: str) -> None:
    teacher = CausalLM("teacher", **settings)
    with pytest.raises(UserError, match=f"`{name}` is given for 'teacher', which this algorithm does not train; leave"):
        read_graph(OnPolicyDistillation(CausalLM("tiny"), teacher=teacher))


def test_models_that_are_compared_have_one_temperature() -> None:
    for given in (1.0, 0.7):
        module = DPO(CausalLM("tiny", temperature=0.7), reference=CausalLM("other", temperature=given))
        read_graph(module)
        assert module.reference.temperature == 0.7
    with pytest.raises(UserError, match=r"`temperature` is 0.5 for 'other' and 0.7 for 'tiny'"):
        read_graph(DPO(CausalLM("tiny", temperature=0.7), reference=CausalLM("other", temperature=0.5)))


@pytest.mark.parametrize(
    ("actor", "message"),
    [
        (3, "`actor` is 3, which is not a CausalLM; give one"),
        (RewardModel("tiny"), "`actor` is .*RewardModel.*, which is not a CausalLM; give one"),
    ],
)
def test_what_is_not_a_model_is_refused(actor: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        SFT(actor)


def test_a_name_is_a_handle_of_the_field_s_class() -> None:
    actor = SFT("tiny").actor
    assert isinstance(actor, CausalLM)
    assert actor.model == "tiny"
    assert type(PPO("tiny", OddCharacters(), critic="other").critic) is ValueModel

    class Plain(RLModule):
        def __init__(self, actor: CausalLM | str) -> None:
            self.actor = actor

        @node(role="actor", type="train")
        def actor_loss(self, batch: TokensWithLossMask) -> PerToken:
            return -self.actor.logprobs(batch)

    assert [*read_graph(plain := Plain("tiny")).roles()] == ["actor"]
    assert plain.actor.model == "tiny"


def test_a_field_that_a_class_hides_from_its_constructor_is_refused() -> None:
    class Stops(GRPO):
        stop_token_ids = (3,)

    with pytest.raises(UserError, match=r"Stops sets `stop_token_ids` to \(3,\) in its body, and its constructor sets"):
        Stops(CausalLM("tiny"), OddCharacters())

    @dataclass(eq=False)
    class AsField(GRPO):
        stop_token_ids: tuple[int, ...] = (3,)

    assert AsField(CausalLM("tiny"), OddCharacters()).stop_token_ids == (3,)
