"""The references written from the papers give the numbers that were worked out by hand from the same equations."""

from __future__ import annotations

from functools import partial
from math import log
from typing import Any

import pytest
import torch

from tests.reference.papers import (
    cpgd,
    deepseek_v32,
    distillation,
    dppo,
    gdpo,
    gmpo,
    gpg,
    gspo,
    maxrl,
    opo,
    ppo,
    reinforce_plus_plus,
    remax,
    sapo,
)
from tests.reference.papers.ragged import gradient, ragged, sum_of

Known = dict[str, Any]


def logs(rows: list[list[float]]) -> list[list[float]]:
    return [[log(x) for x in row] for row in rows]


def zeros(rows: list[list[float]]) -> list[torch.Tensor]:
    return ragged([[0.0] * len(row) for row in rows])


def assert_rows(found: list[list[float]], wanted: list[list[float]]) -> None:
    assert [len(row) for row in found] == [len(row) for row in wanted]
    assert [x for row in found for x in row] == pytest.approx([x for row in wanted for x in row], rel=1e-6, abs=1e-6)


def test_ppo_s_paper_gives_the_losses_and_the_gradient_by_hand(known: Known) -> None:
    answer = known["paper_ppo"]
    log_old, log_pi = zeros(answer["ratios"]), ragged(logs(answer["ratios"]))

    def loss(rows: Any) -> torch.Tensor:
        return ppo.clip_loss(rows, log_old, answer["advantages"], answer["epsilon"])

    assert loss(log_pi).item() == pytest.approx(answer["loss"], abs=1e-7)
    assert_rows(gradient(loss, log_pi), answer["gradient"])
    assert ppo.value_loss(ragged([[answer["value"]]]), [[answer["value_target"]]]).item() == answer["value_loss"]


def test_ppo_s_kl_penalty_is_subtracted_at_each_token(known: Known) -> None:
    answer = known["paper_ppo_kl_reward"]
    gap = answer["log_ratios_to_reference"]
    found = ppo.rewards_with_kl([answer["reward"]], [gap], [[0.0] * len(gap)], answer["beta"])
    assert_rows(found, [answer["rewards"]])


def test_both_forms_of_gae_give_the_advantages_by_hand(known: Known) -> None:
    answer = known["gae"]
    for form in (ppo.gae, ppo.gae_as_average):
        for after, wanted in ((0.0, "advantages"), (0.8, "advantages_with_bootstrap_0.8")):
            found = form(answer["rewards"], answer["values"], answer["gamma"], answer["lam"], after)
            assert found == pytest.approx(answer[wanted], abs=1e-9)


def test_gmpo_s_paper_gives_the_loss_and_the_gradient_by_hand(known: Known) -> None:
    answer = known["paper_gmpo"]
    log_old, log_pi = zeros(answer["log_ratios"]), ragged(answer["log_ratios"])

    def loss(rows: Any) -> torch.Tensor:
        return gmpo.loss(rows, log_old, answer["advantages"])

    assert loss(log_pi).item() == pytest.approx(answer["loss"], abs=1e-7)
    assert_rows(gradient(loss, log_pi), answer["gradient"])


def test_gpg_s_paper_gives_the_advantages_and_the_loss_by_hand(known: Known) -> None:
    answer = known["paper_gpg"]
    A = gpg.advantages(answer["groups"])
    assert_rows(A, answer["advantages"])
    log_pi = ragged([[answer["logprob"]] * length for length in answer["lengths"]])
    assert gpg.loss(log_pi, [a for row in A for a in row]).item() == pytest.approx(answer["loss"], abs=1e-9)


def test_opo_s_paper_gives_the_advantages_by_hand(known: Known) -> None:
    answer = known["paper_opo"]
    assert opo.advantages(answer["rewards"], answer["lengths"]) == pytest.approx(answer["advantages"], abs=1e-9)


def test_remax_s_paper_gives_the_loss_and_the_gradient_by_hand(known: Known) -> None:
    answer = known["paper_remax"]
    log_pi = ragged(answer["logprobs"])

    def loss(rows: Any) -> torch.Tensor:
        return remax.loss(rows, answer["rewards"], answer["greedy_rewards"])

    assert loss(log_pi).item() == pytest.approx(answer["loss"], abs=1e-9)
    assert_rows(gradient(loss, log_pi), answer["gradient"])


def test_reinforce_plus_plus_gives_the_advantages_by_hand(known: Known) -> None:
    answer = known["paper_reinforce_plus_plus"]
    gap = answer["log_ratios_to_reference"]
    for ddof, wanted in ((0, "population_std"), (1, "unbiased_std")):
        found = reinforce_plus_plus.advantages(
            answer["rewards"], gap, [[0.0] * len(row) for row in gap], answer["beta"], ddof
        )
        assert_rows(found, answer[wanted])


def test_reinforce_plus_plus_with_a_baseline_gives_the_advantages_by_hand(known: Known) -> None:
    answer = known["paper_reinforce_plus_plus_baseline"]
    found = reinforce_plus_plus.advantages_with_baseline(answer["groups"], answer["lengths"])
    lengths = [length for group in answer["lengths"] for length in group]
    assert_rows(found, [[a] * length for a, length in zip(answer["advantages"], lengths, strict=True)])


def test_cpgd_s_paper_gives_the_loss_and_the_gradient_by_hand(known: Known) -> None:
    answer = known["paper_cpgd"]
    log_old, log_pi = zeros(answer["log_ratios"]), ragged(answer["log_ratios"])

    def loss(rows: Any, alpha: float = answer["alpha"]) -> torch.Tensor:
        return cpgd.loss([rows], [log_old], [answer["advantages"]], answer["epsilon"], alpha, answer["c"])

    phi = [x for row in answer["phi"] for x in row]
    assert loss(log_pi, alpha=0.0).item() == pytest.approx(-sum(phi) / len(phi), abs=1e-7)
    assert_rows(gradient(loss, log_pi), answer["gradient"])


def test_cpgd_s_paper_gives_the_weights_by_hand(known: Known) -> None:
    answer = known["paper_cpgd_weights"]
    groups = answer["groups"]
    assert cpgd.clip_filter_like_weight(groups, answer["c_omega"]) == [answer["clip_filter_like"]] * len(groups)
    assert cpgd.clip_filter_like_weight(groups, 9.0) == [answer["clip_filter_like_without_limit"]] * len(groups)
    assert cpgd.std_weight(groups, ddof=0) == pytest.approx(answer["std_population"])


def test_papers_on_distillation_give_the_kl_the_gradients_and_advantages_by_hand(known: Known) -> None:
    answer = known["paper_distillation"]
    q = torch.tensor([answer["student"]], dtype=torch.float64).log().requires_grad_()
    p = torch.tensor([answer["teacher"]], dtype=torch.float64).log()
    kl = distillation.gkd_loss([q], [p])
    kl.backward()
    assert kl.item() == pytest.approx(answer["reverse_kl"], abs=1e-7)
    assert q.grad is not None
    assert_rows(q.grad.tolist(), [answer["gradient_to_logits"]])
    gap = answer["log_teacher_over_student"]
    log_p, log_q = ragged([gap]), zeros([gap])
    assert_rows(gradient(lambda rows: distillation.minillm_loss(rows, log_p), log_q), [answer["minillm_gradient"]])
    assert_rows(distillation.per_token_reverse_kl_advantages(log_q, log_p), [gap])


def test_gspo_s_paper_gives_the_losses_and_gradients_by_hand(known: Known) -> None:
    answer = known["paper_gspo"]
    log_pi, log_old = ragged([answer["log_ratios"]]), zeros([answer["log_ratios"]])
    low, high = answer["epsilon_low"], answer["epsilon_high"]
    for sign, A in (("positive", 1.0), ("negative", -1.0)):
        found = gradient(partial(gspo.loss, log_old=log_old, A=[A], epsilon_low=low, epsilon_high=high), log_pi)
        assert gspo.loss(log_pi, log_old, [A], low, high).item() == pytest.approx(answer[sign]["loss"], abs=1e-7)
        assert_rows(found, [[answer[sign]["gradient"]] * 3])
    A_t = [answer["token_advantages"]]
    assert gspo.token_loss(log_pi, log_old, A_t, low, high).item() == pytest.approx(answer["token_loss"], abs=1e-7)
    assert_rows(
        gradient(lambda rows: gspo.token_loss(rows, log_old, A_t, low, high), log_pi), [answer["token_gradient"]]
    )


def test_sapo_s_paper_gives_the_loss_and_the_gradient_by_hand(known: Known) -> None:
    answer = known["paper_sapo"]
    log_old, log_pi = zeros(answer["ratios"]), ragged(logs(answer["ratios"]))

    def loss(rows: Any) -> torch.Tensor:
        return sapo.loss(rows, log_old, answer["advantages"], answer["tau_pos"], answer["tau_neg"])

    assert loss(log_pi).item() == pytest.approx(answer["loss"], abs=1e-7)
    assert_rows(gradient(loss, log_pi), answer["gradient"])


def test_gdpo_s_paper_gives_the_advantages_by_hand(known: Known) -> None:
    answer = known["paper_gdpo"]
    assert_rows(gdpo.advantages(answer["parts"]), answer["advantages"])


def test_dppo_s_paper_gives_the_masks_the_loss_and_the_gradient_by_hand(known: Known) -> None:
    answer = known["paper_dppo_tv"]
    log_mu = ragged([[log(x)] for x in answer["rollout_probabilities"]])
    log_pi = ragged([[log(x)] for x in answer["probabilities"]])

    def loss(rows: Any) -> torch.Tensor:
        return dppo.loss(rows, log_mu, answer["advantages"], answer["delta"])

    assert dppo.masks(log_pi, log_mu, answer["advantages"], answer["delta"]) == [[m] for m in answer["masks"]]
    assert loss(log_pi).item() == pytest.approx(answer["loss"], rel=1e-8)
    assert_rows(gradient(loss, log_pi), [[g] for g in answer["gradient"]])


def test_maxrl_s_paper_gives_the_advantages_by_hand(known: Known) -> None:
    answer = known["paper_maxrl"]
    assert_rows([maxrl.advantages(group) for group in answer["groups"]], answer["advantages"])


def test_deepseek_v32_s_paper_gives_the_sequence_masks_by_hand(known: Known) -> None:
    answer = known["paper_off_policy_sequence_mask"]
    log_mu = ragged(answer["log_rollout_over_policy"])
    log_pi = zeros(answer["log_rollout_over_policy"])
    assert deepseek_v32.sequence_masks(log_pi, log_mu, answer["advantages"], answer["delta"]) == answer["masks"]


def test_deepseek_v32_s_unbiased_kl_has_the_value_and_gradient_by_hand(known: Known) -> None:
    answer = known["paper_k3_ratio"]
    log_pi = torch.tensor(answer["logprob"], dtype=torch.float64, requires_grad=True)
    others = [torch.tensor(answer[name], dtype=torch.float64) for name in ("old_logprob", "ref_logprob")]
    kl = deepseek_v32.unbiased_kl(log_pi, *others)
    kl.backward()
    assert kl.item() == pytest.approx(answer["value"], abs=1e-7)
    assert log_pi.grad is not None
    assert log_pi.grad.item() == pytest.approx(answer["gradient"], abs=1e-7)


def test_deepseek_v32_s_kl_and_its_gradient_are_unbiased_under_the_old_policy() -> None:
    """The sum over all actions, weighted by pi_old, of eq. 7 is KL(pi || pi_ref); so for the gradient."""
    logits = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    log_old = torch.log_softmax(torch.tensor([1.0, 0.2, -0.4], dtype=torch.float64), -1)
    log_ref = torch.log_softmax(torch.tensor([-0.5, 0.6, 0.1], dtype=torch.float64), -1)
    log_pi = torch.log_softmax(logits, -1)
    estimate = sum_of(log_old[a].exp() * deepseek_v32.unbiased_kl(log_pi[a], log_old[a], log_ref[a]) for a in range(3))
    exact = (log_pi.exp() * (log_pi - log_ref)).sum()
    assert estimate.item() == pytest.approx(exact.item(), rel=1e-12)
    (found,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(exact, logits)
    assert found.tolist() == pytest.approx(wanted.tolist(), rel=1e-12)
