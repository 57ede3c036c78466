"""The files that `rlflow export` writes of a run's adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlflow import CausalLM, LoRA, Trainer, ValueModel
from rlflow.algorithms import SFT
from rlflow.cli import main
from rlflow.data import PromptData
from rlflow.models.optimizer import Optimizer
from rlflow.models.tiny import write_tiny_model, write_tiny_moe_model

CPU = torch.device("cpu")


def run_folder(base: str, folder: Path, kind: type = CausalLM, dtype: torch.dtype = torch.float32) -> Path:
    """The folder of a run with a role that has adapters, whose numbers are made up here."""
    path = write_tiny_model(folder.parent / "tiny") if base == "tiny" else Path(base)
    model = kind(base, lora=LoRA(rank=3, alpha=7.0)).load(path, dtype, CPU)
    generator = torch.Generator().manual_seed(0)
    state = {weight.name: 0.1 * torch.randn(weight.parameter.shape, generator=generator) for weight in model.trained()}
    model.save_adapter(folder, {name: tensor.to(dtype) for name, tensor in state.items()})
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)
    return folder


def refusal(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    (line,) = (line for line in capfd.readouterr().err.split("\n") if line.startswith("rlflow: error: "))
    return line


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_merged_model_is_the_base_with_the_adapter_in_the_base_s_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    base = write_tiny_model(tmp_path / "base", seed=3, dtype=dtype)
    adapter = run_folder(str(base), tmp_path / "model", dtype=dtype)
    main(["export", "--model", str(adapter), "--to", str(tmp_path / "out")])
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = PeftModel.from_pretrained(plain, str(adapter)).merge_and_unload()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert exported.dtype == dtype
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name).to(dtype)), name
    before = load_file(base / "model.safetensors")
    after = load_file(tmp_path / "out/model.safetensors")
    changed = {name for name in before if not torch.equal(after[name], before[name])}
    assert {name.rsplit(".", 2)[1] for name in changed} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    AutoTokenizer.from_pretrained(tmp_path / "out")


def test_settings_of_generation_that_transformers_would_refuse_stay_as_they_were(tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base", seed=3)
    file = "generation_config.json"
    generation = json.loads((base / file).read_text()) | {"temperature": 0.6, "top_p": 0.9, "pad_token_id": -1}
    (base / file).write_text(json.dumps(generation))
    CausalLM(str(base)).load(base, torch.float32, CPU).save_config(tmp_path)
    adapter = run_folder(str(base), tmp_path / "model")
    main(["export", "--model", str(adapter), "--to", str(tmp_path / "out")])
    assert json.loads((tmp_path / file).read_text()) == json.loads((tmp_path / "out" / file).read_text()) == generation


def test_the_exported_model_is_the_one_that_was_synced(tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base", seed=3)
    adapter = run_folder(str(base), tmp_path / "model")
    main(["export", "--model", str(adapter), "--to", str(tmp_path / "out")])
    model = CausalLM(str(base), lora=LoRA(rank=3, alpha=7.0)).load(base, torch.float32, CPU)
    stored = load_file(adapter / "adapter_model.safetensors")
    for weight in model.trained():
        weight.parameter.data.copy_(stored["base_model.model." + weight.name])
    exported = load_file(tmp_path / "out/model.safetensors")
    for weight in model.weights():
        torch.testing.assert_close(exported[weight.name], weight.value().detach(), rtol=0, atol=1e-6)


def test_a_critic_s_export_has_its_output_layer(tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base", seed=3)
    adapter = run_folder(str(base), tmp_path / "model-critic", ValueModel)
    main(["export", "--model", str(adapter), "--to", str(tmp_path / "out")])
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    stored = load_file(adapter / "adapter_model.safetensors")
    assert torch.equal(exported.score.weight, stored["base_model.model.score.weight"])
    assert exported.num_labels == 1


def test_an_adapter_of_the_embedded_model_finds_its_base(tmp_path: Path) -> None:
    adapter = run_folder("tiny", tmp_path / "model")
    main(["export", "--model", str(adapter), "--to", str(tmp_path / "out")])
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_the_adapter_form_is_what_peft_loads(tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base", seed=3)
    adapter = run_folder(str(base), tmp_path / "model")
    main(["export", "--model", str(adapter), "--to", str(tmp_path / "out"), "--form", "adapter"])
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "out"))
    stored = load_file(adapter / "adapter_model.safetensors")
    own = {name.replace(".default.", "."): p for name, p in loaded.named_parameters() if "lora_" in name}
    assert own.keys() == stored.keys()
    assert all(torch.equal(parameter, stored[name]) for name, parameter in own.items())


def test_a_checkpoint_is_exported_as_the_model_that_it_was(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"{i}+{i}=", "response": str(2 * i)} for i in range(4)]
    module = SFT(CausalLM(str(write_tiny_model(tmp_path / "base", layers=1)), optimizer=Optimizer(lr=0.01)))
    Trainer(tmp_path / "one", accelerator="cpu", max_steps=1).fit(module, PromptData(rows, prompts_per_step=4))
    longer = Trainer(tmp_path / "two", accelerator="cpu", max_steps=2, save_every_n_steps=1)
    longer.fit(module, PromptData(rows, prompts_per_step=4))
    first = tmp_path / "two" / "checkpoint" / "step-00000001"
    main(["export", "--model", str(first), "--to", str(tmp_path / "out")])
    exported, expected, last = (
        load_file(tmp_path / each / "model.safetensors") for each in ("out", "one/model", "two/model")
    )
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    assert not all(torch.equal(exported[name], last[name]) for name in last)
    main(["export", "--model", str(tmp_path / "two"), "--to", str(tmp_path / "half"), "--dtype", "bf16"])
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.lm_head.weight, last["model.embed_tokens.weight"].bfloat16())
    assert "| steps | 2 |" in (tmp_path / "half" / "README.md").read_text()
    AutoTokenizer.from_pretrained(tmp_path / "out")
    told = refusal(capfd, "export", "--model", str(first), "--to", str(tmp_path / "other"), "--role", "critic")
    assert "has actor; name one of these" in told


def write_experts(folder: Path) -> Path:
    """`tiny_moe` with a matrix for each expert, as checkpoints of the hub have it."""
    write_tiny_moe_model(folder)
    file = folder / "model.safetensors"
    stacked, apart = load_file(file), dict[str, torch.Tensor]()
    for name, tensor in stacked.items():
        layer, _, kind = name.partition(".experts.")
        for number, of_expert in enumerate(tensor if kind else ()):
            parts = {"down_proj": of_expert} if kind == "down_proj" else {}
            if kind == "gate_up_proj":
                parts["gate_proj"], parts["up_proj"] = of_expert.chunk(2)
            apart |= {f"{layer}.experts.{number}.{each}.weight": part.contiguous() for each, part in parts.items()}
        apart |= {} if kind else {name: tensor}
    save_file(apart, file, {"format": "pt"})
    return folder


def test_a_checkpoint_of_experts_that_files_name_otherwise_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{i}+{i}=", "response": str(2 * i)} for i in range(4)]
    trainer = Trainer(tmp_path / "run", accelerator="cpu", max_steps=1, save_every_n_steps=1)
    trainer.fit(
        SFT(CausalLM(str(write_experts(tmp_path / "base")), optimizer=Optimizer(lr=0.01))),
        PromptData(rows, prompts_per_step=4),
    )
    stored, to = tmp_path / "run/checkpoint/step-00000001", tmp_path / "out"
    told = refusal(capfd, "export", "--model", str(stored), "--to", str(to))
    model = tmp_path / "run/model"
    assert "which transformers' files name otherwise; resume from the checkpoint" in told
    assert f"or take {model}, which may be of an earlier step" in told
    assert not to.exists() or not any(to.iterdir())
    assert SFT.load_from_checkpoint(stored, actor=CausalLM(str(model))).actor.model == str(model)


def test_what_cannot_be_exported_is_refused_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base = write_tiny_model(tmp_path / "base", layers=1)
    adapter = run_folder(str(base), tmp_path / "model")
    pickled = shutil.copytree(base, tmp_path / "pickled")
    torch.save(load_file(base / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    for arguments, told in (
        (("--model", str(base), "--to", str(tmp_path / "out"), "--form", "adapter"), "which has no adapter; leave"),
        (
            ("--model", str(tmp_path / "runs"), "--to", str(tmp_path / "out")),
            "no config.json and no adapter_config.json",
        ),
        (("--model", str(adapter), "--to", str(base)), "where there is something already; name a new folder"),
        (
            ("--model", str(pickled), "--to", str(tmp_path / "out"), "--dtype", "bf16"),
            "no *.safetensors, the only files",
        ),
        (("--model", str(adapter), "--to", str(tmp_path / "out"), "--form", "both"), "`--form` is 'both'; give one of"),
    ):
        assert told in refusal(capfd, "export", *arguments)
    base.rename(tmp_path / "elsewhere")
    assert "neither a folder nor a Hugging Face name" in refusal(
        capfd, "export", "--model", str(adapter), "--to", str(tmp_path / "out")
    )
