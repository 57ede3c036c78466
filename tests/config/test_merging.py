"""Later configs and options win, by the types of what they configure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from rlflow.config.arguments import Argument, Group
from rlflow.config.command_line import Text, layers
from rlflow.config.keys import WrittenKeys
from rlflow.config.merging import merged as merged_layers
from rlflow.config.merging import written_whole

HERE = __name__


@dataclass(frozen=True)
class Point:
    x: int = 0
    y: float = 0.0


@dataclass(frozen=True)
class Height:
    y: float = 0.0


class Shape:
    def __init__(self, name: str = "") -> None: ...


class Square(Shape):
    def __init__(self, name: str = "", side: int = 1, corner: Point = Point(), inner: Shape | None = None) -> None: ...


class Post(Shape):
    def __init__(self, corner: Height = Height()) -> None: ...


class Circle(Shape):
    def __init__(self, radius: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)


TAKES = Group({"shape": Argument(Shape | None), "shapes": Argument(list[Shape]), "name": Argument(str | None)})
SQUARE = {"shape": {"class_path": f"{HERE}.Square", "init_args": {"side": 2, "name": "a"}}}


def merged(*trees: dict[str, Any], options: Sequence[str] = ()) -> dict[str, Any]:
    return merged_layers([*trees, *layers(options)], TAKES)


def test_an_option_reaches_an_argument_with_or_without_init_args() -> None:
    for option in ("--shape.side", "--shape.init_args.side"):
        found = merged(SQUARE, options=[option, "3"])["shape"]["init_args"]
        assert found == {"side": 3, "name": "a"}


def test_another_class_keeps_the_arguments_that_it_takes_too() -> None:
    found = merged(SQUARE, options=["--shape", f"{HERE}.Circle"])["shape"]
    assert found == {"class_path": f"{HERE}.Circle", "init_args": {"name": "a"}}  # which it passes on to `Shape`


@pytest.mark.parametrize(
    ("corner", "kept"),
    [({"x": 1, "y": 2.5}, {"corner": {"y": 2.5}}), ({"x": 1}, {}), ({"y": 2.5}, {"corner": {"y": 2.5}})],
)
def test_another_class_keeps_the_fields_of_a_part_that_its_own_has_too(
    corner: dict[str, Any], kept: dict[str, Any]
) -> None:
    given = {"shape": {"class_path": f"{HERE}.Square", "init_args": {"corner": corner}}}
    found = merged(given, options=["--shape", f"{HERE}.Post"])["shape"]
    assert found == {"class_path": f"{HERE}.Post", "init_args": kept}


def test_a_class_by_its_path_alone_takes_options() -> None:
    found = merged({"shape": f"{HERE}.Square"}, options=["--shape.corner.x", "4", "--shape.inner.name", "b"])
    arguments = found["shape"]["init_args"]
    assert arguments == {"corner": {"x": 4}, "inner": {"class_path": f"{HERE}.Shape", "init_args": {"name": "b"}}}


def test_a_list_is_replaced_and_appended_to() -> None:
    circle = {"class_path": f"{HERE}.Circle", "init_args": {}}
    assert merged({"shapes": [1, 2]}, {"shapes": [f"{HERE}.Circle"]})["shapes"] == [circle]
    found = merged({"shapes": [f"{HERE}.Circle"]}, options=["--shapes+", f"{HERE}.Circle"])
    assert found["shapes"] == [circle, circle]


@pytest.mark.parametrize(("text", "value"), [("5", "5"), ("null", None), ("a: b", "a: b"), ("x", "x")])
def test_the_text_of_an_option_is_what_its_type_says(text: str, value: str | None) -> None:
    assert merged(options=["--name", text])["name"] == value


def test_off_is_a_string_where_it_is_one_of_the_choices() -> None:
    assert written_whole(Text("off"), Literal["auto", "off"] | Point) == "off"
    assert written_whole(False, Literal["auto", "off"] | Point) == "off"  # `balance: off` of a file
    assert written_whole(False, bool) is False


@pytest.mark.parametrize(
    ("trees", "options", "key"),
    [
        ([SQUARE], [], "shape.init_args.side"),
        ([{"shape": {"name": "a"}}], [], "shape.side"),  # of a class that is implied
        ([SQUARE], ["--shape.side", "3"], "shape.side"),  # the option wins, and is named
        ([SQUARE], ["--shape.name", "3"], "shape.init_args.side"),
        ([{"shape": f"{HERE}.Square"}], [], "shape.side"),
        ([], [], "shape.init_args.side"),
    ],
)
def test_a_key_is_named_as_it_is_written(trees: list[dict[str, Any]], options: list[str], key: str) -> None:
    given = [*trees, *layers(options)]
    keys = WrittenKeys(given, merged_layers(given, TAKES))
    assert keys.key(("shape", "init_args", "side")) == key


@pytest.mark.parametrize(
    ("trees", "options", "key"),
    [
        ([SQUARE], [], "shape.class_path"),
        ([{"shape": f"{HERE}.Square"}], [], "shape"),
        ([SQUARE], ["--shape", "Post"], "shape"),  # the option wins, and is named
        ([{"shape": f"{HERE}.Square"}], ["--shape.class_path", "Post"], "shape.class_path"),
        ([SQUARE], ["--shape.side", "3"], "shape.class_path"),
    ],
)
def test_a_class_is_named_by_its_class_path_where_that_is_written(
    trees: list[dict[str, Any]], options: list[str], key: str
) -> None:
    given = [*trees, *layers(options)]
    keys = WrittenKeys(given, merged_layers(given, TAKES))
    assert keys.key(("shape", "class_path")) == key
