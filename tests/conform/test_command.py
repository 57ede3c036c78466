"""`rlflow conform` as a user calls it: exit codes, the table, and one line for what cannot be examined."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from rlflow.cli import main

LOSSES = """
import torch

def right(logprobs, old_logprobs, advantages, mask):
    ratio = (logprobs - old_logprobs).exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (loss * mask).sum() / mask.sum()

def named_otherwise(a, b, advantages, mask, weight):
    return weight * right(a, b, advantages, mask)

def wrong(logprobs, old_logprobs, advantages, mask):
    return -right(logprobs, old_logprobs, advantages, mask)

def by_rank(loss, mask):
    return (loss * mask).sum() / mask.sum()

def zeta(logprobs, old_logprobs, advantages, mask, zeta): ...
def shape(logprobs, old_logprobs, advantages, mask): return logprobs[:, :2]
def nan(logprobs, old_logprobs, advantages, mask): return logprobs.sum() * float("nan")
def no_gradient(logprobs, old_logprobs, advantages, mask): return logprobs.detach().sum()
def draws(logprobs, old_logprobs, advantages, mask): return (torch.rand_like(logprobs) * logprobs).sum()
def raises(logprobs, old_logprobs, advantages, mask): raise KeyError("x")
def nothing(logprobs, old_logprobs, advantages, mask): ...
def changes(logprobs, old_logprobs, advantages, mask):
    advantages.mul_(2)
    return (logprobs * advantages).sum()

class Loss: ...
"""


@pytest.fixture(autouse=True)
def _in_a_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "others_losses.py").write_text(LOSSES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["conform", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_loss_that_conforms_has_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--algorithm", "GRPO", "--loss", "others_losses:right") == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "loss: others_losses:right compared with grpo (arXiv 2402.03300)"
    assert printed[-1] == "  it conforms (returns scalar)"


def test_a_loss_that_differs_has_code_1_and_names_the_term(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--loss", "others_losses:wrong") == 1
    assert "  differs  sign  the objective without the minus, so it is descended" in capsys.readouterr().out


def test_the_example_of_the_page_prints_what_the_page_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "conform.md").read_text()
    code, command, printed = re.findall(r"```\w+\n(.*?)```", page, re.DOTALL)[:3]
    (tmp_path / "my_losses.py").write_text(code)
    assert run(*shlex.split(command)[2:]) == 1
    assert capsys.readouterr().out == printed


def test_the_loss_of_the_page_that_takes_counts_conforms_in_parts(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "conform.md").read_text()
    wrong, _, _, right, command = re.findall(r"```\w+\n(.*?)```", page, re.DOTALL)[:5]
    (tmp_path / "my_losses_in_parts.py").write_text(wrong + right)
    assert run(*shlex.split(command.replace("my_losses", "my_losses_in_parts"))[2:]) == 0


def test_an_option_says_that_a_trainer_averages_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--aggregation", "others_losses:by_rank", "--ranks", "mean") == 1
    assert "  differs  denominator of ranks  each part divides by its own count" in capsys.readouterr().out


def test_options_map_parameters_with_other_names() -> None:
    given = "--names.a", "logprobs", "--names.b", "old_logprobs", "--settings.weight", "1.0"
    assert run("--loss", "others_losses:named_otherwise", *given) == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("zeta", "has a parameter `zeta`, which is none of advantages, "),
        ("shape", "returned the shape [4, 2] on 'on-policy, rows of one length'; one number or [4, 6] is expected"),
        ("nan", "returned NaN on 'on-policy, rows of one length'; finite numbers are expected"),
        ("no_gradient", "a value without a gradient to `logprobs`; compute the loss from `logprobs` without `detach`"),
        ("draws", "draws random numbers"),
        ("raises", "raised KeyError on 'on-policy, rows of one length': 'x'; correct the function"),
        ("nothing", "returned None, a NoneType; a tensor is expected"),
        ("changes", "changes its argument advantages `[4, 6]`; change a copy instead"),
        ("gone", "others_losses has no gone"),
        ("Loss", "which is not a function"),
    ],
)
def test_what_cannot_be_examined_is_one_line(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--loss", f"others_losses:{name}") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("rlflow: error: ")
    assert said in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give one function or more"),
        (("--museum", "--loss", "others_losses:right"), "give one function or more"),
        (("--algorithm", "grop", "--loss", "others_losses:right"), "Did you mean grpo?"),
        (("--loss", "others_losses:right", "--names.c", "logprobs"), "`--names` has 'c'"),
        (("--loss", "others_losses:right", "--names.mask", "rewards"), "`--names.mask` is 'rewards'"),
        (("--aggregation", "torch:mean"), "the parameters of torch:mean cannot be read"),
    ],
)
def test_a_wrong_option_is_one_line(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--loss", "trl.GRPOTrainer"), 0, "it conforms (returns scalar)"),
        (("--loss", "trl.GRPOTrainer", "--settings.loss_type", "bnpo"), 1, "denominator of ranks"),
        (("--algorithm", "DrGRPO", "--loss", "trl.GRPOTrainer", "--settings.loss_type", "dr_grpo"), 0, "it conforms"),
        (("--advantages", "trl.GRPOTrainer"), 0, "convention  epsilon  0.0001 is added to the divisor"),
        (("--logprobs", "trl.GRPOTrainer"), 2, "its loss and its advantages can be examined"),
        (("--loss", "trl.GRPOTrainer", "--settings.zeta", "3"), 2, "which GRPOConfig does not know"),
    ],
)
def test_the_page_says_of_trl_what_conform_says(
    arguments: tuple[str, ...], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == code
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
