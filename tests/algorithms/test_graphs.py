"""The nodes of an algorithm's graph, by its settings."""

from __future__ import annotations

from typing import Any

import pytest

from rlflow import CausalLM, LoRA, RewardModel, UserError, algorithms
from rlflow.algorithms import GRPO, SFT, PolicyGradient
from rlflow.algorithms.policy_gradient import GroupBaseline
from rlflow.dag.graph import GraphError
from rlflow.data import PromptData
from rlflow.functional import KL
from rlflow.models.causal_lm import WithoutAdapters
from rlflow.run.preflight import resolved
from rlflow.run.prepare import read_graph
from tests.algorithm_factory import made
from tests.controller.runs import OddCharacters

LEAST = {"rollout", "rewards", "advantages", "actor_loss"}


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({}, set()),
        ({"kl_coef": 0.1}, {"ref_logprobs"}),
        ({"epochs": 2}, {"old_logprobs"}),
        ({"samples_per_update": 4}, {"old_logprobs"}),
        ({"kl_coef": 0.1, "kl_in_reward": True, "kl_kind": "k1"}, {"ref_logprobs", "old_logprobs", "kl_penalty"}),
        ({"kl_in_reward": True}, set()),
        ({"anchor": "rollout", "importance": None, "epochs": 2}, set()),
        (
            {"anchor": "rollout", "importance": None, "kl_coef": 0.1, "kl_in_reward": True, "kl_kind": "k1"},
            {"ref_logprobs", "kl_penalty"},
        ),
    ],
)
def test_grpo_has_the_nodes_that_its_settings_need(settings: dict[str, Any], more: set[str]) -> None:
    assert set(read_graph(made(GRPO, "tiny", OddCharacters(), **settings)).nodes) == LEAST | more


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        (algorithms.DrGRPO, set()),
        (algorithms.RLOO, set()),
        (algorithms.OPO, set()),
        (algorithms.ReMax, {"greedy", "greedy_rewards", "baseline"}),
        (algorithms.REINFORCEPlusPlus, set()),
        (algorithms.REINFORCEPlusPlusBaseline, set()),
        (algorithms.GSPO, set()),
        (algorithms.CISPO, set()),
        (algorithms.GMPO, set()),
        (algorithms.CPGD, set()),
        (algorithms.GPG, set()),
        (algorithms.MaxRL, set()),
        (algorithms.SAPO, set()),
        (algorithms.REINFORCE, set()),
    ],
)
def test_an_algorithm_adds_the_nodes_of_its_own(algorithm: type[PolicyGradient], more: set[str]) -> None:
    assert set(read_graph(algorithm(CausalLM("tiny"), OddCharacters())).nodes) == LEAST | more


def test_a_discriminator_is_trained_before_it_gives_rewards() -> None:
    graph = read_graph(algorithms.GAIL(CausalLM("tiny"), discriminator=RewardModel("tiny")))  # without a verifier
    assert set(graph.nodes) == LEAST | {"examples", "discriminator_loss"}
    order = [node.id for node in graph.order]
    assert order.index("discriminator_loss") < order.index("rewards") < order.index("actor_loss")
    assert graph.levels("examples") == ("batch", "examples")
    assert graph.trained_roles() == ("discriminator", "actor")


def test_a_discriminator_s_dataset_needs_responses_whose_column_is_found() -> None:
    module = algorithms.GAIL(CausalLM("tiny"), discriminator=RewardModel("tiny"))
    rows = PromptData([{"prompt": "1+1=", "response": "2"}])
    assert resolved(rows, module, read_graph(module)).response == "response"
    with pytest.raises(UserError, match="no column `response` or `completion` or `messages`; columns found: prompt"):
        resolved(PromptData([{"prompt": "1+1="}]), module, read_graph(module))
    without = GRPO(CausalLM("tiny"), OddCharacters())
    assert resolved(rows, without, read_graph(without)).response is None


@pytest.mark.parametrize("algorithm", [algorithms.DPPO, algorithms.OffPolicySequenceMasking, algorithms.REINFORCE])
def test_algorithms_anchored_on_the_engine_score_no_samples_before_updates(
    algorithm: type[PolicyGradient],
) -> None:
    actor = CausalLM("tiny", epochs=2, samples_per_update=4)
    assert set(read_graph(algorithm(actor, OddCharacters())).nodes) == LEAST


def test_gdpo_has_the_reward_s_parts_in_the_place_of_rewards() -> None:
    assert set(read_graph(algorithms.GDPO(CausalLM("tiny"), OddCharacters())).nodes) == LEAST - {"rewards"} | {"parts"}


def test_distillation_learns_from_its_teacher_and_needs_no_reward() -> None:
    graph = read_graph(algorithms.OnPolicyDistillation(CausalLM("tiny"), teacher=CausalLM("tiny")))
    assert set(graph.nodes) == {"rollout", "teacher_logprobs", "old_logprobs", "advantages", "actor_loss"}


def test_the_greedy_responses_are_rows_of_their_own_and_the_baseline_is_of_prompts() -> None:
    graph = read_graph(algorithms.ReMax(CausalLM("tiny"), OddCharacters()))
    spaces = {name: graph.nodes[name].space for name in ("greedy_rewards", "baseline", "advantages")}
    assert spaces == {"greedy_rewards": "greedy", "baseline": "batch", "advantages": "rollout"}


PPO_NODES = LEAST | {"values", "estimates", "critic_loss"}


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({}, set()),
        ({"kl_coef": 0.1}, {"ref_logprobs", "old_logprobs", "kl_penalty"}),
        ({"kl_coef": 0.1, "kl_in_reward": False, "kl_kind": "k2"}, {"ref_logprobs"}),
        ({"on_truncation": "bootstrap"}, {"final_values"}),
        ({"on_truncation": "mask"}, set()),
        ({"epochs": 2}, {"old_logprobs"}),
    ],
)
def test_ppo_has_the_nodes_that_its_settings_need(settings: dict[str, Any], more: set[str]) -> None:
    assert set(read_graph(made(algorithms.PPO, "tiny", OddCharacters(), **settings)).nodes) == PPO_NODES | more


def test_an_actor_that_starts_later_leaves_the_critic_alone_till_then() -> None:
    module = algorithms.PPO(CausalLM("tiny", start_step=3), OddCharacters())
    module.configure_models()
    assert module.critic is not None
    assert (module.actor.start_step, module.critic.start_step) == (3, 0)


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        (GRPO, {"model_scores"}),
        (algorithms.PPO, {"model_scores", "values", "estimates", "critic_loss"}),
        (algorithms.ReMax, {"model_scores", "greedy", "greedy_rewards", "greedy_model_scores", "baseline"}),
    ],
)
def test_a_reward_model_is_a_role_of_its_own_and_a_verifier_may_be_missing(
    algorithm: type[PolicyGradient], more: set[str]
) -> None:
    graph = read_graph(algorithm(CausalLM("tiny"), reward_model=RewardModel("tiny")))
    assert set(graph.nodes) == LEAST | more
    assert graph.nodes["model_scores"].role == "reward_model"


def test_with_adapters_the_reference_is_the_actor_without_them() -> None:
    module = GRPO(CausalLM("tiny", lora=LoRA()), OddCharacters(), kl=KL(0.1))
    module.configure_models()
    assert isinstance(module.reference, WithoutAdapters)
    assert module.reference.owner is module.actor


def test_with_adapters_a_reference_that_is_named_is_a_model_of_its_own() -> None:
    module = GRPO(CausalLM("tiny", lora=LoRA()), OddCharacters(), kl=KL(0.1), reference=CausalLM("other"))
    module.configure_models()
    assert type(module.reference) is CausalLM
    assert module.reference.model == "other"


def test_a_missing_critic_is_reported_with_the_nodes_that_need_it() -> None:
    class Uncritical(algorithms.PPO):
        def configure_models(self) -> None:
            super().configure_models()
            self.critic = None

    with pytest.raises(GraphError, match="`values` has role 'critic', which names no model handle of the module"):
        read_graph(Uncritical(CausalLM("tiny"), OddCharacters()))


def test_sft_is_one_node() -> None:
    assert set(read_graph(SFT(CausalLM("tiny"))).nodes) == {"actor_loss"}


def test_dpo_needs_a_reference_and_reward_model_training_needs_none() -> None:
    assert set(read_graph(algorithms.DPO(CausalLM("tiny"))).nodes) == {"ref_logprobs", "actor_loss"}
    assert set(read_graph(algorithms.RewardModelTraining(RewardModel("tiny"))).nodes) == {"reward_model_loss"}


@pytest.mark.parametrize(
    "algorithm",
    [cls for cls in vars(algorithms).values() if isinstance(cls, type) and issubclass(cls, GroupBaseline)],
)
def test_a_group_of_one_is_refused(algorithm: type[PolicyGradient]) -> None:
    discriminator = {"discriminator": RewardModel("tiny")} if algorithm is algorithms.GAIL else {}
    with pytest.raises(UserError, match="`group_size` is 1; group-relative advantages need at least 2"):
        algorithm(CausalLM("tiny"), OddCharacters(), group_size=1, **discriminator)


def test_algorithms_without_groups_take_a_group_of_one() -> None:
    for algorithm in (algorithms.ReMax, algorithms.REINFORCEPlusPlus):
        assert algorithm(CausalLM("tiny"), OddCharacters()).group_size == 1
