"""The object at a dotted path that a user wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow.dotted_path import object_at
from rlflow.errors import UserError


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dotted_games.py").write_text("class Games:\n    class Word:\n        def guess(self): ...\n")
    (tmp_path / "dotted_broken.py").write_text("1 / 0\n")
    (tmp_path / "dotted_needs.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


def test_a_path_may_continue_within_a_class() -> None:
    assert object_at("dotted_games.Games.Word.guess", "").__qualname__ == "Games.Word.guess"


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("Games", ", which is not a path of a module and a name in it; write module.name"),
        ("dotted_games.", ", which is not a path of a module and a name in it; write module.name"),
        ("dotted_game.Games", ', but there is no module dotted_game. Did you mean "dotted_games"?'),
        ("dotted_games.Games.Words", ', but dotted_games.Games has no Words. Did you mean "Word"?'),
        (
            "dotted_broken.Games",
            ", which cannot be imported (ZeroDivisionError: division by zero); correct its module",
        ),
        (
            "dotted_needs.Games",
            ", which cannot be imported (No module named 'a_module_that_nobody_has'); correct its module",
        ),
    ],
)
def test_what_cannot_be_found_is_refused_in_one_line(path: str, end: str) -> None:
    with pytest.raises(UserError) as refused:
        object_at(path, f"`function` is {path!r}")
    assert str(refused.value) == f"`function` is {path!r}{end}"
