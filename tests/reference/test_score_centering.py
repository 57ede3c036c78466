"""Advantages, loss and gradient of score centering, as its nodes make them, equal the paper's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlflow import CausalLM
from rlflow.algorithms import ScoreCentering
from rlflow.functional import Importance
from rlflow.models.tiny import write_tiny_model
from rlflow.values.ragged import Ragged
from rlflow.values.truncation import END
from tests.against_trl import rlflow_nodes
from tests.reference.paper_batches import LENGTHS, SEEDS, assert_tight
from tests.reference.paper_nodes import scored_batch
from tests.reference.papers import score_centering

K = 5  # tokens that could be sampled at a place


def worth(response: str, worth: float) -> float:
    return worth


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    return write_tiny_model(folder / "tiny", seed=1, hidden_size=32, intermediate_size=48, layers=1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("C", [2.0, 1.3, None])
def test_the_nodes_make_the_papers_advantages_loss_and_gradient(seed: int, C: float | None, policy: Path) -> None:
    data, rollout = scored_batch(seed, policy)
    A = [a for group in score_centering.advantages(data.groups(data.rewards)) for a in group]
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64)
    draw = torch.Generator().manual_seed(seed)
    loss, weights = 0.0, list[float]()
    ids, logprobs = list[list[int]](), list[list[float]]()  # of each response, as the engine notes them
    for i, prompt in enumerate(rollout.prompt_ids.rows()):
        response = rollout.response_ids[i, : LENGTHS[i]]
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        slope = torch.zeros_like(logits)
        ids.append([])
        logprobs.append([])
        for t, y in enumerate(response.tolist()):
            others = [v for v in torch.randperm(90, generator=draw).tolist() if v != y][: K - 1]
            z = logits[t, [*others, y]].detach()
            moved = z + 1.5 * torch.randn(K, generator=draw, dtype=torch.float64)
            p, q = z.softmax(0).tolist(), moved.softmax(0).tolist()
            weights += score_centering.weights(p, q, C)
            loss += score_centering.loss(p, q, K - 1, A[i], C) / sum(LENGTHS)
            of_logits = score_centering.gradient(p, q, K - 1, A[i], C)
            slope[t, [*others, y]] = torch.tensor(of_logits, dtype=torch.float64) / sum(LENGTHS)
            ids[-1] += [*others, END]
            logprobs[-1] += moved.log_softmax(0).tolist()
        logits.backward(slope)
    assert C is None or 0.05 < sum(w == C for w in weights) / len(weights) < 0.6

    own = torch.zeros_like(data.log_mu)
    own[data.mask] = torch.tensor([each for row in logprobs for each in row[K - 1 :: K]], dtype=torch.float64)
    rollout = replace(
        rollout,
        logprobs=own,
        support=Ragged.from_lists(ids, torch.int32),
        support_logprobs=Ragged.from_lists(logprobs, torch.float64),
        rows=[{"worth": reward} for reward in data.rewards.tolist()],
    )
    importance = None if C is None else Importance("token", "truncate", high=C)
    module = ScoreCentering(CausalLM(str(policy), top_k=K), worth, importance=importance)
    found = rlflow_nodes.step(module, {"rollout": rollout}, {"actor": policy}, policy)
    assert found.advantages is not None
    assert_tight(found.advantages, torch.tensor(A, dtype=torch.float64))
    assert found.loss == pytest.approx(loss, rel=1e-12, abs=1e-14)
    wanted = {name: weight.grad for name, weight in model.named_parameters()}
    assert found.gradient.keys() == wanted.keys()
    for name, gradient in found.gradient.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("C", [2.0, None])
def test_the_papers_gradient_is_0_on_average_if_all_advantages_are_equal(C: float | None) -> None:
    p, q = [0.1, 0.2, 0.3, 0.4], [0.4, 0.05, 0.25, 0.3]
    by_token = [score_centering.gradient(p, q, y, 1.0, C) for y in range(4)]
    for k in range(4):
        assert sum(q[y] * by_token[y][k] for y in range(4)) == pytest.approx(0.0, abs=1e-16)
