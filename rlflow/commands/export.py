"""`rlflow export`: what a run with adapters left, as a model that others can load."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlflow.commands.parser import OneLineParser, parsed_options
from rlflow.errors import UserError
from rlflow.models.lora import CONFIG, merge, require_peft
from rlflow.run.pretrained import load_tokenizer

Form = Literal["merged", "adapter"]


@dataclass(frozen=True)
class Export:
    """One export; `run` writes it.

    Attributes:
        model: An adapter's folder, such as the `model` of a run with `lora`.
        to: A new folder.
        form: `merged` for a whole model in Hugging Face form, in its base's dtype; `adapter` for one in peft's form.
        trust_remote_code: Whether code that lies beside the base may run.
    """

    model: Path
    to: Path
    form: Form = "merged"
    trust_remote_code: bool = False

    def run(self) -> None:
        """Write the model and its tokenizer, and say where.

        Raises:
            UserError: There is nothing to export, or something lies where it would go.
        """
        if (self.model / "config.json").is_file():
            raise UserError(f"`--model` is {str(self.model)!r}, a whole model in Hugging Face form; use it as it is")
        if not (self.model / CONFIG).is_file():
            raise UserError(
                f"`--model` is {str(self.model)!r}, which has no {CONFIG}; give the `model` folder of a run with `lora`"
            )
        if self.to.exists() and (not self.to.is_dir() or any(self.to.iterdir())):
            raise UserError(f"`--to` is {str(self.to)!r}, where something lies already; name a new folder")
        if self.form == "adapter":
            shutil.copytree(self.model, self.to, dirs_exist_ok=True)
        else:
            require_peft()
            with tempfile.TemporaryDirectory() as scratch:
                base = merge(self.model, self.to, Path(scratch), self.trust_remote_code)
                has_own = (self.model / "tokenizer_config.json").is_file()
                tokenizer = load_tokenizer(self.model if has_own else base, self.trust_remote_code)
                tokenizer.save_pretrained(self.to)
        print(f"wrote {self.to}/ ({self.form})")


def read_export(arguments: Sequence[str]) -> Export:
    """What `rlflow export` writes."""
    parser = OneLineParser(
        prog="rlflow export", description="Write a run's adapter, or the model with it.", allow_abbrev=False
    )
    parser.add_argument("--model", type=str, required=True, help="an adapter's folder: `model` of a run with `lora`")
    parser.add_argument("--to", type=str, required=True, help="a new folder")
    parser.add_argument("--form", type=Form, default="merged", help="a whole model, or the adapter in peft's form")
    parser.add_argument(
        "--trust_remote_code", type=bool, default=False, help="run the code beside the base's weights; read it first"
    )
    parsed = parsed_options(parser, arguments)
    return Export(Path(parsed.model), Path(parsed.to), parsed.form, parsed.trust_remote_code)
