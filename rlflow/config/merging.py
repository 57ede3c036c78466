"""Layers of a config as one tree, merged by the types of what they configure: the later one wins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args, get_origin

from rlflow.config.arguments import Argument, Group, arguments_of, chosen_classes, fields_of, implied_class, is_choice
from rlflow.config.checking import accepts
from rlflow.config.classes import class_named
from rlflow.config.layers import Appended, Layer, Text
from rlflow.dag.annotations import choices
from rlflow.errors import UserError

CLASS, ARGUMENTS = "class_path", "init_args"
ShortForms = Mapping[type, Callable[[str, Sequence[type]], Any]]


class Merging:
    """How layers become one tree, in which every class is written as `class_path` and `init_args`.

    Args:
        short: By class, what a text stands for where a config chooses a subclass of it, one of those given.
    """

    def __init__(self, short: ShortForms) -> None:
        self._short = short

    def merged(self, layers: Iterable[Layer], shape: Group) -> dict[str, Any]:
        """The layers as one tree."""
        tree: dict[str, Any] = {}
        for layer in layers:
            tree = self._mappings(tree, layer.tree, shape.arguments)
        return tree

    def value(self, value: Any, hint: Any) -> Any:
        """A value with its classes written whole."""
        return self._merged(None, value, hint)

    def _merged(self, old: Any, new: Any, hint: Any) -> Any:
        if isinstance(hint, Group):
            new = _plain(new)
            is_group = new is None or isinstance(new, Mapping)  # a section that nothing stands in is null
            return self._mappings(old, new or {}, hint.arguments) if is_group else new
        if isinstance(new, Text):
            new = _of_type(new, hint)
        if isinstance(new, Appended):
            added = [self._merged(None, each, _of_entries(hint)) for each in new]
            return [*(old if isinstance(old, list) else []), *added]
        classes = chosen_classes(hint)
        if classes and isinstance(new, str) and str not in choices(hint):
            new = self._named(new, classes)
        if is_choice(hint, new):
            return self._of_class(old, new, classes)
        if isinstance(new, Mapping):
            fields = fields_of(hint, new)
            entries = Argument(_of_entries(hint))
            return self._mappings(old, new, dict.fromkeys(new, entries) if fields is None else fields)
        if isinstance(new, list):
            return [self._merged(None, each, _of_entries(hint)) for each in new]
        return new

    def _mappings(self, old: Any, new: Mapping[str, Any], arguments: Mapping[str, Argument]) -> dict[str, Any]:
        found = dict(old) if isinstance(old, Mapping) else {}
        for key, value in new.items():
            argument = arguments.get(key)
            hint = Any if argument is None else argument.hint
            found[key] = self._merged(found.get(key), value, hint)
        return found

    def _named(self, text: str, classes: list[type]) -> Any:
        """What a text stands for where a class is chosen."""
        known = next((cls for cls in self._short if any(issubclass(each, cls) for each in classes)), None)
        found = text if known is None else self._short[known](text, classes)
        return {CLASS: found} if isinstance(found, str) else found

    def _whole(self, value: Mapping[str, Any], classes: list[type]) -> dict[str, Any]:
        """With `class_path` and `init_args` as keys, and the class by its path."""
        if CLASS not in value and ARGUMENTS not in value:
            return {ARGUMENTS: value}
        whole = dict(value)
        path = _plain(whole.get(CLASS))
        if isinstance(path, str):
            whole[CLASS] = self._named(path, classes).get(CLASS, path)
        return whole

    def _of_class(self, old: Any, new: Mapping[str, Any], classes: list[type]) -> Any:
        """A class and its arguments, after what was written before; without `class_path` where nobody wrote it."""
        before = self._whole(old, classes) if isinstance(old, Mapping) else {}
        is_written = any(key in each for each in (old or {}, new) for key in (CLASS, ARGUMENTS))
        new = self._whole(new, classes)
        path = new.get(CLASS, before.get(CLASS))
        try:
            cls = implied_class(classes) if path is None else class_named(str(path), classes)
        except UserError:  # it is looked at once more where the whole config is checked
            cls = None
        arguments = {} if cls is None else arguments_of(cls)
        given = before.get(ARGUMENTS, {})
        if cls is not None and CLASS in new and path != before.get(CLASS):
            given = _kept(given, arguments)
        inner = _plain(new.get(ARGUMENTS, {}))
        inner = self._mappings(given, inner, arguments) if isinstance(inner, Mapping) else inner
        if path is None and not is_written:
            return inner
        rest = {key: value for key, value in (before | new).items() if key not in (CLASS, ARGUMENTS)}
        whole = {} if path is None and cls is None else {CLASS: path if cls is None else _path(cls, path)}
        return whole | {ARGUMENTS: inner} | self._mappings(None, rest, {})


def _kept(given: Mapping[str, Any], arguments: Mapping[str, Argument]) -> dict[str, Any]:
    """Those of the arguments of another class that this one takes too; of a dataclass those of its fields."""
    found = {}
    for key, value in given.items():
        if key not in arguments:
            continue
        hint = arguments[key].hint
        if accepts(hint, value):
            found[key] = value
        elif isinstance(value, Mapping) and (inner := _kept(value, fields_of(hint, value) or {})):
            found[key] = inner
    return found


def _path(cls: type, path: str | None) -> str:
    return path if path is not None and "." in path else f"{cls.__module__}.{cls.__qualname__}"


def _of_entries(hint: Any) -> Any:
    """The type of the entries of a list, or of the values of a mapping."""
    for choice in choices(hint):
        if get_origin(choice) is not None and get_args(choice):
            return get_args(choice)[-1 if get_origin(choice) is dict else 0]
    return Any


def _of_type(text: Text, hint: Any) -> Any:
    if str in choices(hint) and not accepts(hint, text.value):
        return text.text
    return text.value


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Text) else value
