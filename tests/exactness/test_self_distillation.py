"""Two steps of self-distillation in float64 equal plain transformers over the samples, row by row."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlflow import Batch, CausalLM, Optimizer, Rollout
from rlflow.algorithms import SelfDistillation
from rlflow.data.prompts import PromptData
from rlflow.models.tiny import write_tiny_model
from rlflow.strategies import SingleProcess
from tests.controller.runs import Fit, Result, fit
from tests.data.list_source import Listed

LR, DECAY, TEMPERATURE, STEPS = 0.5, 0.7, 0.8, 2


class Recorded(SelfDistillation):
    """Records of each step prompts and responses."""

    stop_token_ids = tuple(range(40, 60))
    record: list[list[tuple[list[int], list[int]]]]

    def rollout(self, batch: Batch) -> Rollout:
        rollout = super().rollout(batch)
        rows = zip(rollout.prompt_ids.rows(), rollout.response_ids, rollout.lengths.tolist(), strict=True)
        self.record.append([(prompt.tolist(), ids[:length].tolist()) for prompt, ids, length in rows])
        return rollout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "model", seed=5, layers=2, max_position=128)


def run(folder: Path, out: Path, strategy: Any) -> Fit:
    actor = CausalLM(str(folder), optimizer=Optimizer("sgd", lr=LR, gradient_clipping=0.0), temperature=TEMPERATURE)
    module = Recorded(actor, hint="{prompt} {answer}?", decay=DECAY, group_size=2, max_response_length=9)
    module.record = []
    rows = [{"question": f"{i}+{i * 7 % 10}=", "answer": str(i + i * 7 % 10)} for i in range(8)]
    return Fit(module, PromptData(Listed(rows), None, 4), out, strategy, settings={"max_steps": STEPS})


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return fit(run(folder, tmp_path_factory.mktemp("run") / "run", partial(SingleProcess, "fp64", token_budget=60)))


def reference(folder: Path, record: list[Any]) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each step, and the weights after the last."""
    student = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    losses = []
    for rows in record:
        divergence, tokens = torch.zeros((), dtype=torch.float64), 0
        for prompt, response in rows:
            left, right = (int(part) for part in "".join(map(chr, prompt)).rstrip("=").split("+"))
            hinted = [*prompt, *(ord(character) for character in f" {left + right}?")]
            p = probabilities(student, prompt, response)
            q = probabilities(teacher, hinted, response).detach()
            divergence = divergence + (p * (p.log() - q.log())).sum()
            tokens += len(response)
        loss = divergence / tokens
        losses.append(float(loss.detach()))
        student.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight, average in zip(student.parameters(), teacher.parameters(), strict=True):
                weight -= LR * weight.grad
                average.copy_(DECAY * average + (1 - DECAY) * weight)
    return losses, dict(student.named_parameters())


def probabilities(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """`[T, V]`, from which each response token was drawn."""
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return torch.softmax(logits / TEMPERATURE, dim=-1)


def test_loss_and_weights_are_those_of_the_papers(alone: Result, folder: Path) -> None:
    losses, weights = reference(folder, alone.record)
    assert [step["actor/loss"] for step in alone.steps] == pytest.approx(losses, rel=1e-10)
    assert losses[0] > 1e-3, "the hint changes what the teacher says"
    for name, weight in alone.weights.items():
        assert torch.allclose(weight, weights[name], rtol=0, atol=1e-10), name
