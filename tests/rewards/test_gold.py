"""Gold answers are scored before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow import Trainer, UserError
from rlflow.algorithms import GRPO
from rlflow.rewards import CallableReward, ExactMatch, MathVerify, ReasoningGymScore, Reward, WeightedSum
from rlflow.rewards.gold import check_gold

ROWS = [{"question": "2+2=", "answer": "4"}, {"question": "2+3=", "answer": "5 apples"}]
PLACES = ["sums, row 0", "sums, row 1"]


def whole_number(response: str) -> float:
    return float(response.isdigit())


def tokens(text: str) -> list[int]:
    return [*text.encode()]


def as_bytes(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
    """In TRL's form."""
    return [float(bytes(ids).decode() == text) for text, ids in zip(completions, completion_ids, strict=True)]


def of_sums(completions: list[str], task: list[str], **_: object) -> list[float | None]:
    """Applies to one task alone."""
    return [1.0 if each == "sums" else None for each in task]


def half(response: str) -> float:
    return 0.5


def test_a_gold_answer_below_the_best_reward_is_refused_with_its_place() -> None:
    with pytest.raises(UserError, match=r"`whole_number` gives 1 of 2 .*: 0 for '5 apples' \(sums, row 1\)"):
        check_gold(CallableReward(whole_number, gold="answer"), ROWS, PLACES, None, tokens)


def test_a_function_of_trl_s_form_reads_the_tokens_of_a_gold_answer() -> None:
    assert check_gold(CallableReward(as_bytes, gold="answer"), ROWS, PLACES, None, tokens) == 2


def test_a_gold_answer_of_a_row_that_the_function_does_not_apply_to_is_not_scored() -> None:
    rows = [{**row, "task": task} for row, task in zip(ROWS, ("sums", "words"), strict=True)]
    assert check_gold(CallableReward(of_sums, gold="answer"), rows, PLACES, None, tokens) == 1


def test_each_part_of_a_sum_is_asked_for_its_own_gold_answers() -> None:
    brevity = CallableReward(half)  # knows none, so its half of the best reward is not a fault
    assert check_gold(WeightedSum({"right": ExactMatch(), "brevity": brevity}), ROWS, PLACES, None, tokens) == 2
    with pytest.raises(UserError, match="`half` gives 2 of 2"):
        check_gold(
            WeightedSum({"right": ExactMatch(), "half": CallableReward(half, gold="answer")}),
            ROWS,
            PLACES,
            None,
            tokens,
        )


@pytest.mark.parametrize(
    ("reward", "row"),
    [
        (MathVerify(), {"answer": r"\frac{1}{2}"}),
        (MathVerify(), {"answer": "She has 2 + 2 = 4 apples.\n#### 4"}),
        (ReasoningGymScore("chain_sum"), {"question": "1 + 1 =", "answer": "2", "metadata": {}}),
    ],
)
def test_answers_in_the_forms_of_datasets_get_the_best_reward(reward: Reward, row: dict[str, object]) -> None:
    assert check_gold(reward, [row], ["a row"], None, tokens) == 1


def test_a_run_whose_gold_answers_are_wrong_ends_before_its_first_step(tmp_path: Path) -> None:
    module = GRPO("tiny", reward=CallableReward(whole_number, gold="answer"), group_size=2, max_response_length=2)
    with pytest.raises(UserError, match="gold answers less than 1"):
        Trainer(tmp_path / "run", accelerator="cpu", max_steps=1).fit(module, ROWS * 16)
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()
