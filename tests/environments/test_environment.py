"""Settings of environments: one class or several, and their arguments."""

from __future__ import annotations

from typing import Any

import pytest

from rlflow import Environment
from rlflow.environments.conversation_format import bridge_of
from rlflow.environments.environment import Definition
from rlflow.errors import UserError
from rlflow.models.tiny import tiny_tokenizer
from tests.environments.games import Sized

GAMES = "tests.environments.games"
SEVERAL = {"words": f"{GAMES}.WordGame", "counting": f"{GAMES}.Sized"}


def several(**settings: Any) -> Environment:
    given: dict[str, Any] = {"arguments": {"counting": {"start": 3}}, "column": "task", **settings}
    return Environment(SEVERAL, **given)


def test_a_row_is_answered_by_the_environment_that_its_column_names() -> None:
    environment = several()
    words, counting = (environment.definition_of({"task": name}) for name in ("words", "counting"))
    assert (words.path, list(words.tools), words.answers_messages) == (f"{GAMES}.WordGame", ["guess"], False)
    assert (counting.path, list(counting.tools), counting.answers_messages) == (f"{GAMES}.Sized", [], True)
    assert counting.arguments == {"start": 3}


def test_the_policy_reads_of_the_tools_of_its_own_environment() -> None:
    environment, tokenizer = several(), tiny_tokenizer(2048)

    def prompt(definition: Definition) -> str:
        ids = bridge_of(definition, tokenizer).begin([{"role": "user", "content": "go"}])
        text = tokenizer.decode(ids)
        assert isinstance(text, str)
        return text

    assert "guess" in prompt(environment.definition_of({"task": "words"}))
    assert "guess" not in prompt(environment.definition_of({"task": "counting"}))


def test_a_class_of_the_script_is_refused_where_it_would_run_in_a_worker() -> None:
    own = type("Own", (Sized,), {"__module__": "__main__"})
    assert Environment(own, arguments={"start": 3}).definitions[""].path == "__main__.Own"
    with pytest.raises(
        UserError, match=r"`timeout_s` is 5, and `__main__\.Own` is in the script that runs, .* module$"
    ):
        _ = Environment(own, arguments={"start": 3}, timeout_s=5).definitions


@pytest.mark.parametrize(
    ("settings", "row", "line"),
    [
        ({}, {"tasks": "words"}, "`column` is 'task', .* a row has none .it has tasks.. Did you mean \"task"),
        ({}, {"task": "word"}, "a row has 'word' in `task`, and `environment` has words, counting. Did you mean"),
        ({}, {"task": ["words"]}, r"a row has \['words'\] in `task`"),
        ({"arguments": {"count": {}}}, {}, '`arguments` has `count`, and .* by its name. Did you mean "counting"'),
        ({"arguments": {"words": 3}}, {}, "`arguments` of `words` is 3; give names and values"),
        ({"arguments": {"words": {"size": 3}}}, {"task": "words"}, "do not fit `.*WordGame`.*argument 'size'"),
        ({"arguments": {"counting": {"starts": 3}}}, {"task": "words"}, "do not fit `.*Sized`.*'start"),
        ({"arguments": {}}, {"task": "words"}, "do not fit `.*Sized`.* argument: 'start'"),
    ],
)
def test_what_cannot_be_chosen_or_made_is_refused_in_one_line(
    settings: dict[str, Any], row: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError, match=line) as refused:
        several(**settings).definition_of(row)
    assert "\n" not in str(refused.value)
