"""`rlflow export`: what a run with adapters left, as a model that others can load."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rlflow.commands.parser import call
from rlflow.errors import UserError
from rlflow.models.lora import CONFIG, merge, require_peft
from rlflow.run.pretrained import load_tokenizer

Form = Literal["merged", "adapter"]


def export(model: Path, to: Path, form: Form = "merged", trust_remote_code: bool = False) -> None:
    """Write a run's adapter, or the model with it, and its tokenizer.

    Args:
        model: An adapter's folder, such as the `model` of a run with `lora`.
        to: A new folder.
        form: `merged` for a whole model in Hugging Face form, in its base's dtype; `adapter` for one in peft's form.
        trust_remote_code: Run the code that is stored next to the base's weights; read it first.

    Raises:
        UserError: There is nothing to export, or there is something where it would go.
    """
    if (model / "config.json").is_file():
        raise UserError(f"`--model` is {str(model)!r}, a whole model in Hugging Face form; use it as it is")
    if not (model / CONFIG).is_file():
        raise UserError(
            f"`--model` is {str(model)!r}, which has no {CONFIG}; give the `model` folder of a run with `lora`"
        )
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"`--to` is {str(to)!r}, where there is something already; name a new folder")
    if form == "adapter":
        shutil.copytree(model, to, dirs_exist_ok=True)
    else:
        require_peft()
        with tempfile.TemporaryDirectory() as scratch:
            base = merge(model, to, Path(scratch), trust_remote_code)
            has_own = (model / "tokenizer_config.json").is_file()
            tokenizer = load_tokenizer(model if has_own else base, trust_remote_code)
            tokenizer.save_pretrained(to)
    print(f"wrote {to}/ ({form})")


def main(arguments: Sequence[str]) -> None:
    """Run `rlflow export`."""
    call(export, arguments)
