"""Problems of reasoning-gym: distinct, the same at every reading, validation apart from training."""

from __future__ import annotations

import pytest
import reasoning_gym

from rlflow.data.generated import ReasoningGym, ReasoningGymHints, ReasoningGymPairs
from rlflow.errors import UserError

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # 10 x 10 x {+, -}: 200 problems


def rows(source: ReasoningGym) -> list[dict]:
    return [source[row] for row in range(len(source))]


def questions(source: ReasoningGym) -> list[str]:
    return [row["question"] for row in rows(source)]


def test_each_question_is_there_once() -> None:
    source = ReasoningGym("chain_sum", size=3000, validation_size=0, config=SUMS)

    # A problem is missed by 3,000 draws out of 200 with probability 0.995^3000 = 3e-7.
    assert len(source) == len(set(questions(source))) == 200


def test_training_and_validation_share_no_question_and_make_up_the_whole() -> None:
    train = ReasoningGym("chain_sum", size=3000, validation_size=50, config=SUMS)
    validation = ReasoningGym("chain_sum", size=3000, validation_size=50, config=SUMS, split="validation")

    assert len(validation) == 50
    assert len(set(questions(train)) | set(questions(validation))) == 200
    assert not set(questions(train)) & set(questions(validation))


def test_validation_is_as_hard_as_training() -> None:
    # Half of the draws have one digit but only about 200 of 1,560 distinct problems do: were validation the first
    # distinct problems, most of its one-digit share would be missing from training.
    config = {**SUMS, "max_digits": 2}
    splits = [
        ReasoningGym("chain_sum", size=3000, validation_size=400, config=config, split=split)
        for split in ("train", "validation")
    ]
    easy = [sum(row["metadata"]["num_digits"] == 1 for row in rows(split)) / len(split) for split in splits]

    assert easy == pytest.approx([0.13, 0.13], abs=0.04)


def test_the_same_arguments_give_the_same_problems_and_another_seed_others() -> None:
    first, again, other = (
        ReasoningGym("chain_sum", size=100, seed=seed, validation_size=10, config={"min_digits": 4})
        for seed in (0, 0, 1)
    )

    assert rows(first) == rows(again)
    assert not set(questions(first)) & set(questions(other))  # reasoning-gym's own neighbouring seeds share all but one


def test_the_answer_of_a_row_is_worth_the_whole_reward() -> None:
    source = ReasoningGym("chain_sum", size=20, validation_size=0)
    score = reasoning_gym.get_score_answer_fn("chain_sum")

    assert [score(row["answer"], row) for row in rows(source)] == [1.0] * len(source)


def test_an_unknown_task_is_named_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"`task` 'chain_sums' .* Did you mean .chain_sum.\?"):
        len(ReasoningGym("chain_sums"))


@pytest.mark.parametrize("config", [{"max_term": 3}, {"min_terms": 3, "max_terms": 2}])
def test_a_setting_that_the_task_refuses_is_named(config: dict[str, int]) -> None:
    with pytest.raises(UserError, match=r"chain_sum refuses .*max_term"):
        len(ReasoningGym("chain_sum", config=config))


def test_too_few_distinct_problems_for_validation_are_counted() -> None:
    with pytest.raises(UserError, match="200 distinct problems in 3000 draws, no more than `validation_size` 200"):
        len(ReasoningGym("chain_sum", size=3000, validation_size=200, config=SUMS))


def test_a_negative_validation_size_is_refused() -> None:
    with pytest.raises(UserError, match="`validation_size` is -1"):
        ReasoningGym("chain_sum", validation_size=-1)


def test_a_task_that_scores_by_more_than_json_carries_is_refused() -> None:
    with pytest.raises(UserError, match="rearc scores by Python objects that JSON does not carry"):
        len(ReasoningGym("rearc", size=1))


def test_pairs_are_the_problems_of_the_same_split_with_a_wrong_answer_more() -> None:
    settings = {"task": "chain_sum", "size": 300, "validation_size": 40, "config": SUMS, "split": "validation"}
    pairs = rows(ReasoningGymPairs(**settings))
    score = reasoning_gym.get_score_answer_fn("chain_sum")

    assert [{key: pair[key] for key in pair if key != "rejected"} for pair in pairs] == rows(ReasoningGym(**settings))
    assert all(score(pair["rejected"], pair) < 1.0 for pair in pairs)
    assert all(-9 <= int(pair["rejected"]) <= 18 for pair in pairs), "another problem's answer"
    assert len({pair["rejected"] for pair in pairs}) > 10


def test_columns_that_pairs_add_to_problems_are_not_in_plain_problems() -> None:
    assert "rejected" in ReasoningGymPairs("chain_sum", size=40, validation_size=5)[0]
    assert "rejected" not in ReasoningGym("chain_sum", size=40, validation_size=5)[0]


def test_the_seed_draws_the_wrong_answers() -> None:
    first, again = (rows(ReasoningGymPairs("chain_sum", size=50, validation_size=0)) for _ in range(2))
    assert first == again


def test_a_problem_without_a_wrong_answer_is_named() -> None:
    with pytest.raises(UserError, match=r"chain_sum has no wrong answer to .* among 100 answers of other problems"):
        len(ReasoningGymPairs("chain_sum", size=1, validation_size=0))


def test_half_of_the_problems_have_a_hint_in_their_prompt() -> None:
    settings = {"task": "chain_sum", "size": 300, "validation_size": 40, "config": SUMS, "split": "validation"}
    column, hint = "metadata.expression", "{answer}, {prompt}"
    hinted = rows(ReasoningGymHints(**settings, column=column, hint=hint))

    assert [{key: row[key] for key in row if key != "prompt"} for row in hinted] == rows(ReasoningGym(**settings))
    plain = [row["prompt"] == row["metadata"]["expression"] for row in hinted]
    assert 10 < sum(plain) < 30
    for row, is_plain in zip(hinted, plain, strict=True):
        assert is_plain or row["prompt"] == f"{row['answer']}, {row['metadata']['expression']}"
    assert hinted == rows(ReasoningGymHints(**settings, column=column, hint=hint)), "the seed draws them"
