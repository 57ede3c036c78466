"""Calls each hook of all callbacks of a run, and collects their states by name."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec

from rlflow.callbacks.callback import Callback, RunningTrainer
from rlflow.errors import UserError
from rlflow.lightning_names import CALLBACK_HOOKS
from rlflow.module import RLModule

P = ParamSpec("P")
HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


class Callbacks:
    """Calls the hooks of all callbacks, in their order.

    Args:
        given: The user's callbacks.
        trainer: Trainer that the hooks receive.
        module: Module that the hooks receive.
    """

    def __init__(self, given: Sequence[Callback], trainer: RunningTrainer, module: RLModule) -> None:
        self._given = given
        self._trainer = trainer
        self._module = module

    def call(
        self,
        hook: Callable[Concatenate[Callback, RunningTrainer, RLModule, P], None],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> None:
        """Call a hook, such as `Callback.on_step_end`, with trainer, module and further arguments."""
        for callback in self._given:
            getattr(callback, hook.__name__)(self._trainer, self._module, *arguments, **named)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Copies of the states of callbacks that have one, by `Callback.state_key`.

        Raises:
            UserError: One is not JSON-able.
        """
        states = {}
        for callback in self._given:
            if state := callback.state_dict():
                try:
                    states[callback.state_key] = json.loads(json.dumps(state))
                except TypeError as error:
                    raise UserError(
                        f"the `state_dict` of the callback {callback.state_key} cannot be saved ({error}); return"
                        " numbers, texts, lists and dicts of texts to them"
                    ) from error
        return states

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Give each callback the state saved under its key; callbacks may have been added or removed since.

        Returns:
            A line for each state without a callback, which is dropped, and each callback without a state.
        """
        present = {callback.state_key: callback for callback in self._given}
        for key in present.keys() & states.keys():
            present[key].load_state_dict(states[key])
        stateful = {key for key, callback in present.items() if callback.state_dict()}
        return [
            *(
                f"the checkpoint has a state of the callback {key}, which this run does not have; it is dropped"
                for key in states.keys() - present.keys()
            ),
            *(
                f"the checkpoint has no state of the callback {key}, which starts without one"
                for key in sorted(stateful - states.keys())
            ),
        ]


def check_callbacks(callbacks: Iterable[Callback]) -> None:
    """Refuse callbacks that cannot be called, or whose states could not be distinguished.

    Raises:
        UserError: A hook takes other arguments; or two callbacks that keep a state have one `state_key`.
    """
    stateful = (callback for callback in callbacks if type(callback).state_dict is not Callback.state_dict)
    keys = Counter(callback.state_key for callback in stateful)
    for key, count in keys.items():
        if count > 1:
            raise UserError(
                f"{count} callbacks have the `state_key` {key!r}, so a checkpoint could hold the state of only one;"
                " override `state_key`, so that each has its own"
            )
    for callback in callbacks:
        for name in HOOKS:
            _check_hook(callback, name)
        for name in dir(callback):
            if (name.startswith("on_") or name in CALLBACK_HOOKS) and name not in HOOKS:
                instead = CALLBACK_HOOKS.get(name)
                fix = f"write `{instead}`" if instead else f"the hooks are {', '.join(HOOKS)}"
                raise UserError(f"`{name}` of the callback {type(callback).__qualname__} is never called; {fix}")


def _check_hook(callback: Callback, name: str) -> None:
    expected = list(inspect.signature(getattr(Callback, name)).parameters)  # self, trainer, module, ...
    try:
        inspect.signature(getattr(callback, name)).bind(*expected[1:])
    except TypeError:
        written = ", ".join(inspect.signature(getattr(type(callback), name)).parameters)
        raise UserError(
            f"`{name}({written})` of the callback {type(callback).__qualname__} does not take what it is called with;"
            f" write `def {name}({', '.join(expected)})`"
        ) from None
