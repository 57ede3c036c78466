"""KTO on conversations."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlflow import Batch, CausalLM, PerSample, PromptData, Trainer, node
from rlflow.algorithms import KTO
from rlflow.models.tiny import write_tiny_model

CONVERSATION = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 7 more?"},
    {"role": "assistant", "content": "9"},
]


@dataclass(eq=False)
class Watched(KTO):
    """Keeps the rows that it reads."""

    seen: list[Batch] = field(default_factory=list)

    @node(role="reference")
    def ref_logprobs(self, batch: Batch) -> PerSample:
        self.seen.append(batch)
        return super().ref_logprobs(batch)


def logprob(folder: Path, batch: Batch) -> float:
    """Of what the assistant says in the first row, by transformers."""
    prompt = batch.prompt_ids.rows()[0]
    response, mask = batch.response_ids[0, : batch.lengths[0]], batch.loss_mask[0, : batch.lengths[0]]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    of_tokens = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
    assert 0 < int(mask.sum()) < len(mask)  # tokens of the user are among them
    return float(of_tokens[mask].sum())


def test_of_a_conversation_the_ratio_is_of_what_the_assistant_says(tmp_path: Path) -> None:
    actor, reference = (
        write_tiny_model(tmp_path / name, seed=seed) for seed, name in enumerate(("actor", "reference"))
    )
    rows = [{"m": CONVERSATION, "label": True}, {"m": CONVERSATION[:2], "label": False}]
    module = Watched(CausalLM(str(actor)), reference=CausalLM(str(reference)), beta=0.1)
    data = PromptData(rows, prompts_per_step=2, shuffle=False, response="m", chat_template=True)
    trainer = Trainer(tmp_path / "run", accelerator="cpu", max_steps=1)
    trainer.fit(module, data)
    (batch,) = module.seen
    ratio = logprob(actor, batch) - logprob(reference, batch)
    assert trainer.callback_metrics["actor/good_reward"] == pytest.approx(0.1 * ratio, abs=1e-5)
