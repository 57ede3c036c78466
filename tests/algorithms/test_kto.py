"""KTO on conversations."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlflow import Batch, CausalLM, PerSample, PromptData, Trainer, UserError, node
from rlflow.algorithms import KTO
from rlflow.callbacks import Callback
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


class First(Callback):
    """Keeps the validation before the first step."""

    margin: float

    def on_validation_end(self, trainer: Any, module: Any, step: int, metrics: Any) -> None:
        if step == 0:
            self.margin = metrics["val/margin"]


def logprob(folder: Path, batch: Batch, row: int = 0) -> float:
    """Logprob of the assistant's turns in a row, by transformers."""
    prompt, length = batch.prompt_ids.rows()[row], batch.lengths[row]
    response, mask = batch.response_ids[row, :length], batch.loss_mask[row, :length]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    of_tokens = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
    assert row or 0 < int(mask.sum()) < len(mask)  # tokens of the user are among the first's
    return float(of_tokens[mask].sum())


def test_of_a_conversation_the_ratio_is_of_what_the_assistant_says(tmp_path: Path) -> None:
    actor, reference = (
        write_tiny_model(tmp_path / name, seed=seed) for seed, name in enumerate(("actor", "reference"))
    )
    rows = [{"m": CONVERSATION, "label": True}, {"m": CONVERSATION[:2], "label": False}]
    module = Watched(CausalLM(str(actor)), reference=CausalLM(str(reference)), beta=0.1)
    data = PromptData(rows, rows, prompts_per_step=2, shuffle=False, response="m", chat_template=True)
    first = First()
    trainer = Trainer(tmp_path / "run", accelerator="cpu", max_steps=1, callbacks=first)
    trainer.fit(module, data)
    (batch,) = module.seen
    ratio, of_bad = (logprob(actor, batch, row) - logprob(reference, batch, row) for row in (0, 1))
    assert trainer.callback_metrics["actor/good_reward"] == pytest.approx(0.1 * ratio, abs=1e-5)
    assert first.margin == pytest.approx(0.1 * (ratio - of_bad), abs=1e-5)


def test_a_step_of_one_row_is_refused_and_rows_of_one_class_have_no_margin(policy: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "response": "2", "label": True}]
    module, data = KTO(CausalLM(str(policy))), PromptData(rows, rows, prompts_per_step=1)
    trainer = Trainer(tmp_path / "run", accelerator="cpu", max_steps=1)
    with pytest.raises(UserError, match="a step has 1 row, and KTO takes z from other rows' responses; raise"):
        trainer.fit(module, data)
    assert "val/margin" not in trainer.callback_metrics
