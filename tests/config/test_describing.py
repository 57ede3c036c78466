"""What an error says of a type, with an example that is of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest

from rlflow import CausalLM, RLModule
from rlflow.callbacks import Callback
from rlflow.config.arguments import arguments_of
from rlflow.config.checking import mistakes_of
from rlflow.config.classes import class_named
from rlflow.config.describing import EXAMPLES, described
from rlflow.config.reading import read
from rlflow.data import Source
from rlflow.functional import Clip
from rlflow.loggers import Logger
from rlflow.models.handle import ModelHandle
from rlflow.models.optimizer import Optimizer
from rlflow.rollout import RolloutEngine, Share

LM = "class_path: rlflow.CausalLM, init_args: {model: tiny}"


@pytest.mark.parametrize(
    ("hint", "default", "said"),
    [
        (int, 3, "an integer"),
        (str | None, None, "a text or null"),
        (Literal["a", "b"] | None, None, "one of 'a', 'b' or null"),
        (tuple[float, float], (0.9, 0.999), "a list of 2 numbers, such as `[0.9, 0.999]`"),
        (tuple[float, float], None, "a list of 2 numbers, such as `[0.5, 0.5]`"),
        (list[str] | None, None, "a list of texts or null, such as `[text]`"),
        (Sequence[int], (), "a list of integers, such as `[1]`"),
        (list[Logger], None, "a list of Loggers, such as `[{class_path: rlflow.loggers.JSONLLogger}]`"),
        (dict[str, ModelHandle], None, f"a mapping of names to ModelHandles, such as `{{name: {{{LM}}}}}`"),
        (dict[str, float] | None, None, "a mapping of names to numbers or null, such as `{name: 0.5}`"),
        (dict[str, Any], None, "a mapping"),
        (
            dict[str, Share | RolloutEngine],
            None,
            "a mapping of names to Shares or RolloutEngines, such as"
            " `{name: {class_path: rlflow.rollout.TransformersEngine}}`",
        ),
        (
            RLModule,
            None,
            "a RLModule, such as `class_path: rlflow.algorithms.GRPO` and `init_args: {actor: {model: tiny}}`",
        ),
        (Source, None, "a Source, such as `class_path: rlflow.data.JSONL` and `init_args: {path: rows.jsonl}`"),
        (CausalLM, None, "a CausalLM, such as `class_path: rlflow.CausalLM` and `init_args: {model: tiny}`"),
        (Callback | None, None, "a Callback or null, such as `class_path: rlflow.callbacks.EarlyStopping` and"),
        (Optimizer | None, None, "a mapping of arguments or null, such as `{name: adamw}`"),
        (Clip, None, "a mapping of arguments, such as `{low: 0.2}`"),
    ],
    ids=str,
)
def test_a_type_is_told_with_an_example(hint: Any, default: Any, said: str) -> None:
    found = described(hint, default)
    assert found.startswith(said) if said.endswith(" and") else found == said
    if found.endswith("`"):
        _, _, example = found.partition(", such as ")
        parts = [read(part) for part in example.strip("`").split("` and `")]
        value = parts[0] if len(parts) == 1 else parts[0] | parts[1]
        assert list(mistakes_of(value, hint, ("key",))) == []


@pytest.mark.parametrize("path", EXAMPLES)
def test_the_example_of_a_class_has_all_that_it_needs(path: str) -> None:
    arguments = read(f"{{{EXAMPLES[path]}}}")
    needed = {name for name, each in arguments_of(class_named(path, (object,))).items() if each.required}
    assert needed <= arguments.keys() <= arguments_of(class_named(path, (object,))).keys()
