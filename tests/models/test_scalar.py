from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlflow.errors import UserError
from rlflow.models.scalar import ScalarModel
from tests.checkpoint_files import write_model
from tests.models.test_scoring import write

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPTNeoX"])
def test_other_plain_architectures_score_as_their_own_forward(tmp_path: Path, name: str) -> None:
    model = ScalarModel.load(write(tmp_path, name), torch.float32, CPU)
    model.check(model, CPU)  # raises where they differ


def test_a_wrongly_scored_model_is_refused_though_its_output_layer_is_new(tmp_path: Path) -> None:
    folder = write(tmp_path, "Bloom")  # attention of its own, with a mask over the whole line
    model = ScalarModel.load(folder, torch.float32, CPU)
    with pytest.raises(UserError, match=r"Bloom.*differ by"):
        model.check(model, CPU)


def test_what_is_saved_is_what_transformers_loads(classifier: Path, tmp_path: Path) -> None:
    model = ScalarModel.load(classifier, torch.float32, CPU)
    changed = {model.hf_name(name): parameter.detach() + 1 for name, parameter in model.named_parameters()}
    write_model(model, changed, tmp_path / "saved")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert {name for name, _ in loaded.named_parameters()} == set(changed)
    assert all(torch.equal(parameter, changed[name]) for name, parameter in loaded.named_parameters())


def test_a_classifier_of_several_labels_is_refused(tiny: Path, tmp_path: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=2).save_pretrained(tmp_path / "two")
    with pytest.raises(UserError, match="cannot be loaded") as refusal:
        ScalarModel.load(tmp_path / "two", torch.float32, CPU)
    assert "\n" not in str(refusal.value)


def test_loading_leaves_the_process_s_random_numbers_alone(tiny: Path) -> None:
    before = torch.get_rng_state()
    ScalarModel.load(tiny, torch.float32, CPU)
    assert torch.equal(torch.get_rng_state(), before)
