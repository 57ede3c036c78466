"""Code in the folder of a model's weights (`auto_map`): it runs for a role that sets `trust_remote_code`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlflow.errors import UserError, one_line


@contextmanager
def stored_code(
    path: Path, part: str, trust_remote_code: bool, setting: str = "`model`", key: str = "trust_remote_code"
) -> Iterator[None]:
    """A context for loading a part of a model that may be code in the model's folder; reports its errors in a line.

    Args:
        path: Folder or Hugging Face name of the model.
        part: Name of the part in errors, such as `architecture`.
        trust_remote_code: Whether code in the model's folder may run.
        setting: Name in errors of the setting that named the model.
        key: Name in errors of the setting that allows code to run.

    Raises:
        UserError: The part is code that may not run, or code that fails.
    """
    from transformers import dynamic_module_utils

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # seconds to wait for a person's answer; 0 raises instead
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise UserError(
                f"{setting} is {str(path)!r}, whose {part} is code stored with it (`auto_map`), and code"
                f" that runs can do all that you can; read it, then set `{key}` to true, or take a model that"
                " transformers knows by itself"
            ) from error
        if trust_remote_code and not isinstance(error, OSError | ValueError):
            raise UserError(
                f"{setting} is {str(path)!r}, and the code stored with it fails where its {part} is loaded"
                f" ({type(error).__name__}: {one_line(error)}); correct that code, or take another model"
            ) from error
        raise


def stored_class(config: Any, kind: str) -> Any:
    """The class that a model's own code has for a key of `auto_map`; None if it has none. Runs the file of the class.

    Args:
        config: The model's transformers configuration, which was loaded from the folder of the code.
        kind: Key of `auto_map`, such as `AutoModelForCausalLM`.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    reference = (getattr(config, "auto_map", None) or {}).get(kind)
    return None if reference is None else get_class_from_dynamic_module(reference, config.name_or_path)


def register_decoder(path: Path, trust_remote_code: bool) -> None:
    """Register a model's own decoder with transformers, where a model for sequence classification may ask for it.

    Args:
        path: Folder or Hugging Face name of the model.
        trust_remote_code: Whether the model's code may run; if not, nothing is done.
    """
    if not trust_remote_code:
        return
    from transformers import AutoConfig, AutoModel
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if type(config) not in MODEL_MAPPING:  # else other roles would get this one's code
        decoder = stored_class(config, "AutoModel")
        if decoder is not None:
            AutoModel.register(type(config), decoder)
