"""Registers classes of vLLM for models that its registry does not find by itself.

Files of vLLM with models that read videos import torchvision, and the locks have no build of it for the CPU. Text and
pictures do not need it. See docs/design/0039.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

STAND_INS = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


class VllmClass(NamedTuple):
    """A class of vLLM for a type of models.

    Attributes:
        architecture: Name of the class in config.json.
        file: vLLM's file.
        processor: Transformers' processor, where the model reads pictures and videos.
        name: vLLM's name of the class where that is another.
    """

    architecture: str
    file: str
    processor: str | None = None
    name: str | None = None


CLASSES = {  # by the type of models
    "qwen2_5_vl": VllmClass("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "Qwen2_5_VLProcessor"),
    "qwen3_5": VllmClass("Qwen3_5ForConditionalGeneration", "qwen3_5", "Qwen3VLProcessor"),
    "qwen3_5_moe_text": VllmClass("Qwen3_5MoeForCausalLM", "qwen3_5"),
    "qwen3_5_text": VllmClass("Qwen3_5ForCausalLM", "qwen3_5"),
    "qwen3_vl": VllmClass("Qwen3VLForConditionalGeneration", "qwen3_vl", "Qwen3VLProcessor"),
    # SmolVLM is Idefics3 with another processor, which needs one more package for videos.
    "smolvlm": VllmClass("SmolVLMForConditionalGeneration", "idefics3", name="Idefics3ForConditionalGeneration"),
}


def register_model(model_type: str) -> None:
    """Register vLLM's own class for a type of models in `CLASSES`; does nothing for other types.

    vLLM imports files in a process of its own to find what classes can do, and that import fails without torchvision.
    Classes that are registered it asks in this process.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    if model_type not in CLASSES:
        return
    own = CLASSES[model_type]
    with _torchvision_stood_in():
        kind = getattr(import_module(f"vllm.model_executor.models.{own.file}"), own.name or own.architecture)
    ModelRegistry.register_model(own.architecture, _for_pictures(kind, own.processor) if own.processor else kind)


@contextmanager
def _torchvision_stood_in() -> Iterator[None]:
    """A context in which empty modules replace torchvision, if it is not installed."""
    from transformers.utils.import_utils import is_torchvision_available

    names = () if is_torchvision_available() else STAND_INS  # remembered by transformers from here on
    for name in names:
        sys.modules[name] = ModuleType(name)
    if names:
        sys.modules[STAND_INS[-2]].functional = sys.modules[STAND_INS[-1]]  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


@cache
def _for_pictures(kind: Any, processor: str) -> Any:
    """A subclass of vLLM's model that takes pictures but no videos; for videos it would need torchvision.

    Args:
        kind: vLLM's class.
        processor: Name of transformers' class that prepares what the model reads.
    """
    import transformers
    from vllm.multimodal.processing import BaseProcessingInfo

    without_videos = _without_videos(getattr(transformers, processor))
    factory = kind._processor_factory

    class PicturesAlone(factory.info):  # type: ignore[misc, name-defined]
        def get_hf_processor(self, **settings: object) -> Any:
            return self.ctx.get_hf_processor(without_videos, **settings)

        def get_supported_mm_limits(self) -> dict[str, int | None]:
            return {"image": None}

        def get_supported_mm_processor_kwargs(self) -> Any:
            return BaseProcessingInfo.get_supported_mm_processor_kwargs(self)  # Qwen3-VL's adds to those of videos

        def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Any) -> dict[str, int]:
            return {"image": self.get_max_image_tokens()}

    own = {"__module__": __name__, "_processor_factory": replace(factory, info=PicturesAlone)}
    return type(kind.__name__, (kind,), own)


def _without_videos(processor: Any) -> Any:
    """A subclass of transformers' processor that is made of an image processor and a tokenizer."""
    parts = [part for part in processor.get_attributes() if part != "video_processor"]
    return type(processor.__name__, (processor,), {"get_attributes": classmethod(lambda cls: parts)})
