"""The weights that `load_from_checkpoint` gives a module."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlflow import CausalLM, LoRA, Trainer
from rlflow.algorithms import SFT
from rlflow.callbacks import Callback
from rlflow.checkpoint import folder_of
from rlflow.data import PromptData
from rlflow.errors import Preempted
from rlflow.models.optimizer import Optimizer
from rlflow.models.tiny import write_tiny_model
from rlflow.process import preemption

pytestmark = pytest.mark.filterwarnings("ignore:.*has no config")
ROWS = [{"prompt": f"{i}+{i}=", "response": str(2 * i)} for i in range(4)]


@pytest.fixture
def base(tmp_path: Path) -> str:
    return str(write_tiny_model(tmp_path / "base", hidden_size=32, intermediate_size=48, layers=1))


def fit(actor: CausalLM, run: Path, steps: int, *callbacks: Callback, **settings: Any) -> None:
    trainer = Trainer(run, accelerator="cpu", max_steps=steps, callbacks=callbacks, **settings)
    trainer.fit(SFT(actor), PromptData(ROWS, prompts_per_step=4))


def loaded(path: Path) -> dict[str, torch.Tensor]:
    """The weights of the module that is loaded from the path."""
    return load_file(Path(SFT.load_from_checkpoint(path).actor.model) / "model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_checkpoint_that_was_written_again_is_exported_again(base: str, tmp_path: Path) -> None:
    run, keeping = tmp_path / "run", {"save_every_n_steps": 1, "save_last": 2}
    first, second = (folder_of(run / "checkpoint", step) for step in (1, 2))
    fit(CausalLM(base, optimizer=Optimizer(lr=1e-3)), run, 2, **keeping)
    before = loaded(second)
    assert equal(before, load_file(run / "model" / "model.safetensors"))
    fit(CausalLM(base, optimizer=Optimizer(lr=1e-2)), run, 2, ckpt_path=str(first), **keeping)
    again = loaded(second)
    assert equal(again, load_file(run / "model" / "model.safetensors"))
    assert not equal(again, before)
    # Those of both, and no draft.
    assert [path.name[:20] for path in (run / "exported").iterdir()] == 2 * ["step-00000002-actor-"]


def test_an_export_that_failed_leaves_nothing(base: str, tmp_path: Path) -> None:
    fit(CausalLM(base), run := tmp_path / "run", 1, save_every_n_steps=1)
    (run / "summary.json").write_text("no JSON")  # read for the model card, the last file that is written
    with pytest.raises(ValueError, match="Expecting value"):
        loaded(folder_of(run / "checkpoint", 1))
    assert not [*(run / "exported").iterdir()]


class Ends(Callback):
    """Sends this process a signal at the end of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any, module: Any, step: int, metrics: Any) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
            while not preemption.received():
                pass


def test_a_run_that_a_signal_ended_has_the_weights_of_its_last_checkpoint(base: str, tmp_path: Path) -> None:
    actor, run = CausalLM(base, optimizer=Optimizer(lr=1e-2)), tmp_path / "run"
    fit(actor, run, 1, save_every_n_steps=9)
    of_end = load_file(run / "model" / "model.safetensors")
    assert Path(SFT.load_from_checkpoint(run).actor.model) == run / "model"
    with pytest.raises(Preempted), preemption.handled(until_exit=False):
        fit(actor, run, 4, Ends(2), ckpt_path="last", save_every_n_steps=9)
    found = loaded(run)
    assert equal(of_end, load_file(run / "model" / "model.safetensors"))  # which a signal's checkpoint comes without
    assert not equal(found, of_end)
    assert equal(found, loaded(folder_of(run / "checkpoint", 2)))


def test_the_adapter_of_a_run_is_loaded_as_a_whole_model(base: str, tmp_path: Path) -> None:
    fit(CausalLM(base, lora=LoRA(rank=2)), run := tmp_path / "run", 1)
    assert loaded(run).keys() == load_file(Path(base) / "model.safetensors").keys()
