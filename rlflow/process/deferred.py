"""Packages that are imported for one of their submodules, and executed only when more of them is used.

`import lightning.fabric` first executes `lightning`, which is its trainer, and asks for the version of torchmetrics,
which brings transformers: seconds of every process, for nothing that rlflow uses.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

DEFERRED = ("lightning", "torchmetrics")
SAID_BY_THE_WHOLE = ("__all__",)  # among names that tools look for in every module they meet


class DeferredPackage(ModuleType):
    """A package whose submodules can be imported; it is executed when another attribute is asked for."""

    def __getattr__(self, name: str) -> Any:
        """Attribute of the package, which is executed now, unless it is a submodule that is being imported."""
        if (submodule := sys.modules.get(f"{self.__name__}.{name}")) is not None:
            return submodule
        if name.startswith("__") and name not in SAID_BY_THE_WHOLE:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def defer(package: str) -> None:
    """Let imports of the package's submodules not execute it; does nothing if it is imported or not installed."""
    if package in sys.modules or (spec := find_spec(package)) is None:
        return
    module = module_from_spec(spec)
    module.__class__ = DeferredPackage
    vars(module)["__version__"] = version(package)
    sys.modules[package] = module


for _package in DEFERRED:
    defer(_package)
