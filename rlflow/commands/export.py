"""`rlflow export`: writes the model of a run or checkpoint in the form that other libraries load."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor

from rlflow.commands.parser import call, writing
from rlflow.errors import UserError
from rlflow.models.checkpoint_weights import is_checkpoint, of_checkpoint, rewrite
from rlflow.models.lora import CONFIG, merge, require_peft
from rlflow.run.pretrained import load_tokenizer

Form = Literal["merged", "adapter"]
Dtype = Literal["bf16", "fp32"]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CARD = "README.md"


def export(
    model: Path,
    to: Path,
    form: Form = "merged",
    dtype: Dtype | None = None,
    role: str = "actor",
    trust_remote_code: bool = False,
) -> None:
    """Write the model of a run or of a checkpoint, merged or as an adapter, with its tokenizer and a model card.

    Example:
        rlflow export --model runs/mine/model --to exported

    Args:
        model: The folder of a run, one of its checkpoints (`runs/x/checkpoint/step-00000100`), its `model`, or any
            folder in Hugging Face's or peft's form.
        to: A new folder.
        form: `merged` for a whole model in Hugging Face form; `adapter` for one in peft's form.
        dtype: Dtype of the weights, `bf16` or `fp32`; None for the dtype of the model, or of an adapter's base.
        role: Role of a checkpoint whose weights are written.
        trust_remote_code: Run the code that is stored next to the base's weights; read it first.

    Raises:
        UserError: There is nothing to export, or there is something where it would go.
    """
    source = model / "model" if (model / "model").is_dir() else model
    wanted = None if dtype is None else DTYPES[dtype]
    with tempfile.TemporaryDirectory() as scratch:
        if is_checkpoint(model):
            source = of_checkpoint(model, role, wanted, Path(scratch) / "checkpoint")
        is_adapter = (source / CONFIG).is_file()
        if not is_adapter and not (source / "config.json").is_file():
            raise UserError(
                f"`--model` is {str(model)!r}, which has no config.json and no {CONFIG}; give a run, a checkpoint or a"
                " model's folder"
            )
        if form == "adapter" and not is_adapter:
            raise UserError(f"`--model` is {str(model)!r}, which has no adapter; leave `--form` out")
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise UserError(f"`--to` is {str(to)!r}, where there is something already; name a new folder")
        with writing("to"):
            to.mkdir(parents=True, exist_ok=True)
        if is_adapter and form == "merged":
            require_peft()
            whole = to if dtype is None else Path(scratch) / "merged"
            base = merge(source, whole, Path(scratch), trust_remote_code)
            has_own = (source / "tokenizer_config.json").is_file()
            load_tokenizer(source if has_own else base, trust_remote_code).save_pretrained(whole)
            source = whole
        if wanted is not None and not any(source.glob("*.safetensors")):
            raise UserError(
                f"`--dtype` is {dtype!r}, and {str(model)!r} has no *.safetensors, the only files that are cast;"
                " leave `--dtype` out, or save the model as safetensors first"
            )
        if source != to:
            rewrite(source, to, partial(_cast, wanted))
            _write_dtype(to / "config.json", wanted)
    if not (to / CARD).exists():
        (to / CARD).write_text(card(model), encoding="utf-8")
    print(f"wrote {to}/ ({form}{f', {dtype}' if dtype else ''})")


def _cast(dtype: torch.dtype | None, _: str, tensor: Tensor) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _write_dtype(path: Path, dtype: torch.dtype | None) -> None:
    """Write the dtype of the weights into a model's config."""
    if dtype is not None and path.is_file():
        config = {**json.loads(path.read_text()), "dtype": str(dtype).removeprefix("torch.")}
        config.pop("torch_dtype", None)
        path.write_text(json.dumps(config, indent=2) + "\n")


def card(model: Path) -> str:
    """A model card in the form of the Hugging Face hub, from what the run left: algorithm, data, and results."""
    runs = (folder for folder in (model, *model.resolve().parents[:2]) if (folder / "summary.json").is_file())
    run = next(runs, None)
    settings: dict[str, Any] = {}
    if run is not None and (run / "config.yaml").is_file():
        settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    module = settings.get("module") or {}
    actor = (module.get("init_args") or {}).get("actor") or {}
    started_from = actor.get("model") if isinstance(actor, dict) else actor
    of_hub = isinstance(started_from, str) and "/" in started_from and not Path(started_from).exists()
    head = ["---", "library_name: transformers", "tags: [rlflow, reinforcement-learning]"]
    head += [f"base_model: {started_from}"] * of_hub + ["---", "", f"# {run.name if run else model.name}", ""]
    algorithm = str(module.get("class_path", "an algorithm of its own")).rpartition(".")[2]
    lines = [f"Trained with rlflow: {algorithm}, from `{started_from}`." if settings else "Trained with rlflow."]
    if run is not None:
        summary = json.loads((run / "summary.json").read_text())
        shown = {name: value for name, value in summary.items() if isinstance(value, int | float)}
        lines += ["", "| | |", "|---|---|", *(f"| {name} | {value:.4g} |" for name, value in shown.items())]
    return "\n".join([*head, *lines, ""])


def main(arguments: Sequence[str]) -> None:
    """Run `rlflow export`."""
    call(export, arguments)
