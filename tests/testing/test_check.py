"""`check` names the node of each planted fault, and says nothing of right algorithms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlflow import CausalLM, UserError
from rlflow.algorithms import GRPO
from rlflow.commands.check import main
from rlflow.commands.configuration import Configured, call_configured
from rlflow.process.status import CommandExit
from rlflow.testing import check
from rlflow.testing.check import COLUMNS, CheckColumn, Report, examine
from rlflow.testing.derivative import apart
from tests.testing.plants import PLANTS, Broken, MeanOverMicroBatch, MeansOrder, PicturesOfTheNextRow, RowBefore

NOT_SHARDED = tuple(column for column in COLUMNS if column.way.strategy == "plain")
ALONE = tuple(column for column in NOT_SHARDED if column.way.ranks == 1)


RIGHT = [
    *("maxrl", "gail", "self_distillation", "on_policy_distillation", "raft", "remax", "dapo", "cpgd", "gdpo", "dpo"),
    *("reward_model_training", "off_policy_sequence_masking", "reinforce_plus_plus", "agent_calculator", "hinted_sft"),
    *("grpo_lora", "workflow_grpo", "vlm_quickstart_grpo"),
]
CONFIGS = Path(__file__).parents[2] / "configs"


def grpo(algorithm: type[GRPO] = GRPO) -> GRPO:
    return algorithm(CausalLM("tiny"), reward=len, group_size=4)


def only(*names: str) -> tuple[CheckColumn, ...]:
    return tuple(column for column in COLUMNS if column.name in names)


def named(report: Report) -> dict[str, str | None]:
    """The node that each wrong column names."""
    return {line.name: line.node for line in report.wrong}


def test_no_difference_is_reported_for_grpo_in_one_process() -> None:
    report = examine(grpo(), columns=ALONE)
    assert named(report) == {}
    assert all(line.apart is not None and line.apart < 1e-8 for line in report.lines)
    assert [line.name for line in report.lines] == ["derivative", *(column.name for column in ALONE)]


def test_a_mean_over_the_micro_batch_is_named() -> None:
    report = examine(grpo(MeanOverMicroBatch), columns=only("micro-batches"))
    assert named(report) == {"micro-batches": "actor_loss"}


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_named_with_its_node(plant: type[GRPO]) -> None:
    column, node = PLANTS[plant]
    assert named(examine(grpo(plant), columns=NOT_SHARDED))[column] == node


def configured_report(name: str, columns: tuple[CheckColumn, ...]) -> Report:
    """The report on the algorithm of one of our configs."""

    def check(found: Configured) -> Report:
        images = found.data.images is not None
        return examine(found.module, row=found.data.train.read([0])[0], images=images, columns=columns)

    return call_configured(check, ["--config", str(CONFIGS / f"{name}.yaml")])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "ppo", "tree_rl", "self_play", "score_centering"])
def test_no_difference_is_reported_for_our_largest_algorithms_in_any_column(name: str) -> None:
    assert named(configured_report(name, COLUMNS)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_no_difference_is_reported_for_right_algorithms_that_are_unusual(name: str) -> None:
    assert named(configured_report(name, NOT_SHARDED)) == {}


@pytest.mark.slow
def test_pictures_that_moved_are_named_and_others_are_right() -> None:
    moved, right = (
        examine(grpo(algorithm), images=True, columns=only("micro-batches", "order of groups"))
        for algorithm in (PicturesOfTheNextRow, GRPO)
    )
    assert set(named(moved).values()) == {"actor_loss"}
    assert (named(right), "recorded images stand for the data's" in str(right)) == ({}, True)


@pytest.mark.slow
def test_the_message_of_an_assertion_has_the_table() -> None:
    with pytest.raises(AssertionError, match=r"micro-batches .* DIFFERS: `actor_loss` gives"):
        check(grpo(MeanOverMicroBatch))


def test_a_dependence_that_is_meant_is_no_error_and_the_table_says_so() -> None:
    named_twice = examine(grpo(RowBefore), columns=only("order")), examine(grpo(MeansOrder), columns=only("order"))
    assert [named(report) for report in named_twice] == [{"order": "advantages"}, {}]
    assert "meant: `advantages`" in str(named_twice[1])


def test_an_unknown_column_is_refused() -> None:
    with pytest.raises(UserError, match=r"`depends_on` names 'ordre'\. Did you mean"):
        examine(grpo(), depends_on=["ordre"])


def test_a_node_that_raises_is_one_line_and_no_report() -> None:
    with pytest.raises(UserError, match=r"the step cannot run: `advantages` raised ZeroDivisionError: .*; correct it$"):
        examine(grpo(Broken), columns=())


@pytest.mark.slow
def test_the_command_ends_with_1_where_a_column_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.yaml").write_text(
        "module:\n  class_path: tests.testing.plants.MeanOverLocalRows\n"
        "  init_args: {actor: some/model, reward: exact_match}\n"
        "data: {train: rows.jsonl}\ntrainer: {max_steps: 1}\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"question": "2+3=", "answer": "5"}\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandExit) as ended:
        main(["--config", "my.yaml"])
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert "seeded models of 2 layers stand for `actor`" in said
    assert [line.split()[0] for line in said.splitlines() if "DIFFERS" in line] == ["ranks", "zero2", "fsdp2"]


def test_the_derivative_of_a_cubic_is_its_gradient_and_nothing_else() -> None:
    x = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)

    def loss() -> float:
        return float((x**3).sum())

    assert apart([x], [3 * x**2], loss) < 1e-8  # d x^3 = 3 x^2
    assert apart([x], [3 * x**2 + torch.tensor([0.0, 0.0, 1e-3])], loss) > 1e-5
    assert x.tolist() == [1.0, -2.0, 3.0]
