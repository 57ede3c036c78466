"""A small model that transformers does not know: the code of its architecture is stored with its weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import dynamic_module_utils

from rlflow.models.tiny import write_tiny_model

AUTO_MAP = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModel": "modeling_own.OwnModel",
    "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    "AutoModelForSequenceClassification": "modeling_own.OwnForSequenceClassification",
}
CONFIGURATION = """
from transformers import Qwen2Config


class OwnConfig(Qwen2Config):
    model_type = "own"
"""
MODELING = """
from pathlib import Path

from transformers import Qwen2ForCausalLM, Qwen2ForSequenceClassification, Qwen2Model

from .configuration_own import OwnConfig
from .marker_own import MARKER

Path(MARKER).touch()


class OwnModel(Qwen2Model):
    config_class = OwnConfig


class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig


class OwnForSequenceClassification(Qwen2ForSequenceClassification):
    config_class = OwnConfig
"""
TOKENIZATION = """
from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def write_own_model(folder: Path, was_run: Path) -> Path:
    """Write it.

    Args:
        folder: A new one.
        was_run: A file that is there as soon as the code has run.
    """
    write_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": AUTO_MAP}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "tokenization_own.py").write_text(TOKENIZATION)
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "modeling_own.py").write_text(MODELING)
    (folder / "marker_own.py").write_text(f"MARKER = {str(was_run)!r}\n")
    return folder


@contextmanager
def copies_in(folder: Path) -> Iterator[None]:
    """A context in which transformers copies the code that it runs into `folder`, and not into the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
        patch.setattr(sys, "path", sys.path.copy())
        yield
        for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
            del sys.modules[name]
