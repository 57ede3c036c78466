"""The scores of each reward, and the treatment of failures."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rlflow.data.generated import ReasoningGym
from rlflow.errors import UserError
from rlflow.rewards import (
    CallableReward,
    CodeTests,
    ExactMatch,
    HTTPReward,
    Judge,
    MathVerify,
    ReasoningGymScore,
    Reward,
    RewardInput,
    SampleReward,
    Scores,
    SumValue,
    WeightedSum,
)
from rlflow.rewards.reward import OnError, scored


def length(response: str, row: dict[str, Any]) -> float:
    return len(response)


def inverse(response: str, row: dict[str, Any]) -> float:
    return 1 / len(response)


def test_exact_match_ignores_whitespace_at_the_ends_only() -> None:
    rows = [{"answer": "4 2"}] * 4

    assert ExactMatch().score(RewardInput(["4 2", " 4 2\n", "42", "4 2."], rows)).total == [1, 1, 0, 0]


def test_exact_match_reads_numbers_of_the_named_column() -> None:
    assert ExactMatch("n").score(RewardInput(["42", "41"], [{"n": 42}] * 2)).total == [1, 0]


def test_a_row_without_the_column_is_an_error_under_either_policy() -> None:
    with pytest.raises(
        UserError,
        match=r'has no column `answers`, which the reward reads; columns found: question, answer\..* "answer"',
    ):
        ExactMatch("answers", on_error="zero").score(RewardInput(["1"], [{"question": "", "answer": "1"}]))


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("so it is $\\frac{1}{2}$", "0.5", 1),
        ("The answer is \\boxed{\\frac{\\sqrt{8}}{2}}", "\\sqrt{2}", 1),
        ("\\boxed{(x+1)^2}", "x^2+2x+1", 1),
        ("she sold 48 + 24 = 72", "She sold 48+24 = <<48+24=72>>72 clips.\n#### 72", 1),
        ("1,234", "1234", 1),
        ("$\\boxed{[1, 2)}$", "[1, 2)", 1),
        ("\\boxed{3}", "$3$", 1),
        ("\\boxed{0.51}", "\\frac{1}{2}", 0),
        ("no idea", "72", 0),
        ("", "72", 0),
    ],
)
def test_math_verify_compares_as_mathematics(text: str, answer: str, score: float) -> None:
    assert MathVerify().score(RewardInput([text], [{"answer": answer}])).total == [score]


def test_an_answer_that_is_not_mathematics_is_the_datasets_fault() -> None:
    with pytest.raises(UserError, match="column `answer` holds '', no expression"):
        MathVerify(on_error="zero").score(RewardInput(["1"], [{"answer": ""}]))


def test_math_verify_reads_the_answer_of_a_group_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import math_verify

    read, parse = list[str](), math_verify.parse
    monkeypatch.setattr(math_verify, "parse", lambda text: read.append(text) or parse(text))
    texts, answer = ["$7301$", "$7302$", "$14602 / 2$"], "7301"  # an answer of this test alone
    assert MathVerify().score(RewardInput(texts, [{"answer": answer}] * 3)).total == [1.0, 0.0, 1.0]
    assert read.count("\\boxed{7301}") == 1
    assert len(read) == 4


@pytest.mark.parametrize("task", ["chain_sum", "gcd", "countdown", "spell_backward"])
def test_reasoning_gym_gives_the_right_answer_full_marks_and_a_wrong_one_less(task: str) -> None:
    source = ReasoningGym(task, size=5, validation_size=0)
    rows = [source[row] for row in range(len(source))]

    assert ReasoningGymScore(task).score(RewardInput([row["answer"] for row in rows], rows)).total == [1.0] * len(rows)
    assert max(ReasoningGymScore(task).score(RewardInput(["?"] * len(rows), rows)).total) < 1


def test_reasoning_gyms_own_partial_marks_come_through() -> None:
    # chain_sum: an answer inside other text is worth its share of the text, 2 of 3 characters.
    assert ReasoningGymScore("chain_sum").score(RewardInput(["46x"], [{"answer": "46"}])).total == [2 / 3]


def test_an_unknown_task_is_named_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"`task` 'chain_sam' .* Did you mean .chain_sum.\?"):
        ReasoningGymScore("chain_sam").score(RewardInput(["1"], [{"answer": "1"}]))


def test_a_function_is_called_with_response_and_row() -> None:
    def starts(response: str, row: dict[str, Any]) -> bool:
        return response.startswith(row["first"])

    assert CallableReward(starts).score(RewardInput(["ab", "ba"], [{"first": "a"}] * 2)) == Scores([1.0, 0.0])


def test_a_function_is_found_by_its_dotted_path() -> None:
    assert CallableReward("tests.rewards.test_rewards.length").score(RewardInput(["abc"], [{}])).total == [3.0]


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("length", "is not a path of a module and a name"),
        ("nowhere.length", "there is no module nowhere"),
        ("tests.rewards.test_rewards.lengths", 'test_rewards has no lengths. Did you mean "length"?'),
        ("tests.rewards.test_rewards.__doc__", "no function; name one"),
    ],
)
def test_a_path_that_leads_nowhere_is_named_before_anything_is_scored(path: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint.replace("?", r"\?")):
        CallableReward(path)


def test_a_function_in_the_users_folder_that_cannot_be_imported_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_broken_rewards.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(UserError, match="No module named 'no_such_library'"):
        CallableReward("my_broken_rewards.brevity")


def test_a_reward_that_raises_names_the_sample() -> None:
    with pytest.raises(UserError) as raised:
        CallableReward(inverse).score(RewardInput(["ab", ""], [{"n": 0}, {"n": 1}]))

    assert str(raised.value) == (
        "reward `inverse` failed on sample 1 with ZeroDivisionError: division by zero (response '', row {'n': 1});"
        " correct it, or set `on_error` to zero or drop"
    )
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_what_a_reward_raises_is_reported_in_one_line() -> None:
    def verbose(response: str, row: dict[str, Any]) -> float:
        raise RuntimeError("first\n  second")

    with pytest.raises(UserError, match="RuntimeError: first second"):
        CallableReward(verbose).score(RewardInput(["a\nb"], [{"q": "c\nd"}]))


@pytest.mark.parametrize("returned", [math.nan, math.inf, 1e39, None, "1", [1.0]])
def test_a_score_that_is_not_a_finite_number_is_an_error(returned: Any) -> None:
    with pytest.raises(UserError, match=r"failed on sample 0 .* it returned"):
        CallableReward(lambda response, row: returned).score(RewardInput(["a"], [{}]))


def test_under_zero_a_failed_sample_scores_0_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    reward = CallableReward(inverse, on_error="zero")

    with caplog.at_level(logging.WARNING):
        assert reward.score(RewardInput(["ab", "", "abcd", ""], [{}] * 4)) == Scores(
            [0.5, 0.0, 0.25, 0.0], failed={1: "zero", 3: "zero"}
        )
    assert "2 of 4 samples were scored 0; reward `inverse` failed on sample 1" in caplog.text


def test_samples_that_training_leaves_out_are_named(caplog: pytest.LogCaptureFixture) -> None:
    reward = CallableReward(inverse, on_error="drop")

    assert reward.drops
    with caplog.at_level(logging.WARNING):
        scores = reward.score(RewardInput(["ab", "", "abcd", ""], [{}] * 4))
    assert scores == Scores([0.5, 0.0, 0.25, 0.0], failed={1: "drop", 3: "drop"})
    assert "2 of 4 samples were dropped; reward `inverse` failed on sample 1" in caplog.text
    assert not CallableReward(inverse, on_error="zero").drops


def test_of_two_parts_of_a_sum_the_one_that_drops_decides() -> None:
    zeros, drops = (CallableReward(inverse, on_error=how) for how in ("zero", "drop"))
    for parts in ({"a": zeros, "b": drops}, {"a": drops, "b": zeros}):
        reward = WeightedSum(parts, {"a": 1, "b": 1})
        assert reward.drops
        assert reward.score(RewardInput(["", "a"], [{}] * 2)).failed == {0: "drop"}
    alone = WeightedSum({"a": drops, "match": ExactMatch()}, {"a": 1, "match": 1})
    assert alone.drops
    assert alone.score(RewardInput(["", "a"], [{"answer": "a"}] * 2)).failed == {0: "drop"}
    assert not WeightedSum({"match": ExactMatch()}, {"match": 1}).drops


def test_a_policy_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="`on_error` is 'ignore'; give raise, zero or drop"):
        CallableReward(inverse, on_error="ignore")  # type: ignore[arg-type]


def test_a_reward_of_ones_own_must_say_that_it_drops_samples() -> None:
    class Own(Reward):
        drops = False

        def score(self, responses: RewardInput) -> Scores:
            return Scores([0.0] * len(responses), failed={2: "drop"})

    with pytest.raises(UserError, match="Own drops sample 2, and its property `drops` is False"):
        scored(Own(), RewardInput(["a", "b", "c"], [{}] * 3))
    Own.drops = True  # type: ignore[assignment]
    assert scored(Own(), RewardInput(["a", "b", "c"], [{}] * 3)).dropped == [2]


def test_a_reward_of_ones_own_that_raises_is_named_with_the_place() -> None:
    class Own(Reward):
        def score(self, responses: RewardInput) -> Scores:
            return Scores([row["worth"] for row in responses.rows])

    with pytest.raises(UserError, match=r"^Own raised KeyError: 'worth' \(test_rewards.py:\d+\); correct it$"):
        scored(Own(), RewardInput(["a"], [{}]))


def test_a_weighted_sum_adds_up_and_shows_its_parts() -> None:
    reward = WeightedSum({"match": ExactMatch(), "length": CallableReward(length)}, {"match": 1.0, "length": -0.1})

    scores = reward.score(RewardInput(["42", "421"], [{"answer": "42"}] * 2))
    assert scores.total == pytest.approx([1 - 0.2, 0 - 0.3])
    assert scores.parts == {"match": [1.0, 0.0], "length": [2.0, 3.0]}


def test_a_weighted_sum_counts_the_errors_of_its_parts() -> None:
    reward = WeightedSum(
        {"a": CallableReward(inverse, on_error="zero"), "b": CallableReward(inverse, on_error="zero")}, {"a": 1, "b": 1}
    )

    assert reward.score(RewardInput(["", "a"], [{}] * 2)).failed == {0: "zero"}


@pytest.mark.parametrize(
    ("policies", "total", "failed"),
    [(("zero", "zero"), 2, "zero"), (("drop", "zero"), 0, "drop"), (("zero", "drop"), 0, "drop")],
)
def test_in_a_weighted_sum_a_sample_gets_the_strictest_policy_of_the_parts_that_fail(
    policies: tuple[OnError, OnError], total: float, failed: str
) -> None:
    parts: dict[str, Reward] = {
        "a": CallableReward(inverse, on_error=policies[0]),
        "b": CallableReward(inverse, on_error=policies[1]),
        "c": CallableReward(lambda response, row: 2.0),
    }
    scores = scored(WeightedSum(parts, {"a": 1, "b": 1, "c": 1}), RewardInput(["", "a"], [{}] * 2))
    assert scores == Scores([total, 4], {"a": [0, 1], "b": [0, 1], "c": [total, 2]}, {0: failed})  # type: ignore[dict-item]


@pytest.mark.parametrize("weights", [{}, {"matches": 1.0}, {"match": 1.0, "length": 1.0}])
def test_every_part_of_a_sum_needs_its_weight(weights: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"`parts` are \[match\] but `weights` are for"):
        WeightedSum({"match": ExactMatch()}, weights)


class Gives(Reward):
    """A reward that gives its arguments as scores, whatever the samples are."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def score(self, responses: RewardInput) -> Scores:
        return cast(Scores, self.given)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (Scores([1.0]), "Gives returned 1 scores as `total` for 2 samples; return one for each"),
        (Scores([1.0, 2.0], {"p": [1.0, 1.0, 1.0]}), "Gives returned 3 scores as `p` for 2 samples; return one"),
        ([1.0, 2.0], "Gives returned [1.0, 2.0] for 2 samples; return `rlflow.rewards.Scores`"),
        (Scores([1.0, math.nan]), "Gives failed on sample 1 (`total`): it returned nan (response 'b', row {'n': 1})"),
        (Scores([1e308, 1.0]), "Gives failed on sample 0 (`total`): it returned 1e+308, which float32 cannot hold ("),
        (Scores([1.0, 1.0], {"p": [1.0, -1e39]}), "Gives failed on sample 1 (`p`): it returned -1e+39, which float32"),
        (Scores([1.0, 1.0], failed={1: cast(Any, "skip")}), "Gives has 'skip' for sample 1; give places below 2, and"),
        (Scores([1.0, 1.0], failed={2: "zero"}), "Gives has 'zero' for sample 2; give places below 2, and zero or"),
        (Scores([1.0, cast(float, None)]), "Gives failed on sample 1 (`total`): it returned None, not a number ("),
    ],
)
def test_scores_that_cannot_be_trained_on_are_reported_with_reward_and_sample(given: Any, line: str) -> None:
    with pytest.raises(UserError) as raised:
        scored(Gives(given), RewardInput(["a", "b"], [{"n": 0}, {"n": 1}]))
    assert str(raised.value).startswith(line)


def test_a_part_of_a_weighted_sum_is_checked_and_named() -> None:
    reward = WeightedSum({"match": ExactMatch(), "given": Gives(Scores([math.inf, 0.0]))}, {"match": 1, "given": 0})
    with pytest.raises(UserError, match=r"Gives failed on sample 0 \(`total`\): it returned inf"):
        reward.score(RewardInput(["a", "b"], [{"answer": "a"}] * 2))


def test_the_largest_number_of_float32_is_a_score() -> None:
    largest = torch.finfo(torch.float32).max
    assert scored(Gives(Scores([largest, -largest])), RewardInput(["a", "b"], [{}, {}])).total == [largest, -largest]


def test_no_samples_have_no_scores() -> None:
    reward = WeightedSum({"match": ExactMatch()}, {"match": 1.0})

    assert reward.score(RewardInput([], [])) == Scores([], {"match": []})


def test_the_score_of_a_dict_is_the_sum_of_its_parts() -> None:
    def two(response: str, row: dict[str, Any]) -> dict[str, float]:
        return {"right": float(response == row["answer"]), "brevity": -0.5 * len(response)}

    scores = CallableReward(two).score(RewardInput(["42", "421"], [{"answer": "42"}] * 2))
    assert scores == Scores([0.0, -1.5], {"right": [1.0, 0.0], "brevity": [-1.0, -1.5]})


def test_a_sample_without_the_part_that_others_have_is_named() -> None:
    def sometimes(response: str, row: dict[str, Any]) -> dict[str, float]:
        return {"right": 1.0} if response else {"right": 0.0, "empty": 1.0}

    for policy in ("raise", "zero", "drop"):
        with pytest.raises(UserError, match=r"gave sample 1 a part `empty`, unlike the samples before \(response ''"):
            CallableReward(sometimes, on_error=cast(OnError, policy)).score(RewardInput(["a", ""], [{}] * 2))


@pytest.mark.parametrize("returned", [math.nan, None])
def test_a_part_that_is_not_a_finite_number_is_named(returned: Any) -> None:
    with pytest.raises(UserError, match=r"failed on sample 0 with \w+: part `brevity`: it returned (nan|None)"):
        CallableReward(lambda response, row: {"right": 1.0, "brevity": returned}).score(RewardInput(["a"], [{}]))


def test_under_zero_a_failed_sample_has_0_as_each_of_its_parts() -> None:
    def two(response: str, row: dict[str, Any]) -> dict[str, float]:
        return {"right": 1.0, "brevity": 1 / len(response)}

    scores = CallableReward(two, on_error="zero").score(RewardInput(["ab", ""], [{}] * 2))
    assert scores == Scores([1.5, 0.0], {"right": [1.0, 0.0], "brevity": [0.5, 0.0]}, {1: "zero"})


@pytest.mark.parametrize("name", ["mean", "errors", "outcome", "overlong", "model"])
def test_a_part_is_not_called_as_another_metric(name: str) -> None:
    reward = WeightedSum({name: CallableReward(length)}, {name: 1.0})
    with pytest.raises(UserError, match=f"has a part `{name}`, and another number is logged under this name"):
        scored(reward, RewardInput(["a"], [{}]))


@pytest.mark.parametrize(
    ("question", "response", "points"),
    [
        ("5 + 9 - 2", "12", 1.0),
        ("0 - 9 - 9", "-18", 1.0),
        ("5 + 9 - 2", "13", 0.0),
        ("5 + 9 - 2", " 12", 0.0),
        ("12", "12", 0.0),  # no sum
        ("5 + + 9", "14", 0.0),
        ("5 + 9; 2", "14", 0.0),
        ("", "0", 0.0),
    ],
)
def test_a_sum_is_computed_and_what_is_not_a_sum_has_no_value(question: str, response: str, points: float) -> None:
    reward = SumValue("metadata.expression")
    assert reward.score(RewardInput([response], [{"metadata": {"expression": question}}])).total == [points]


def test_a_column_that_a_reward_steps_into_and_that_is_not_there_is_named() -> None:
    line = (
        r"the row \{'metadata': .* has no column `metadata\.expresion`, which the reward reads; columns found: metadata"
    )
    with pytest.raises(UserError, match=line):
        SumValue("metadata.expresion").score(RewardInput(["1"], [{"metadata": {"expression": "1 + 0"}}]))


@pytest.mark.parametrize("reward", [ExactMatch(on_error="zero"), SumValue("answer"), CodeTests("answer")], ids=str)
def test_null_is_not_an_answer(reward: SampleReward) -> None:
    with pytest.raises(
        UserError, match="column `answer`, which the reward reads, is null, so no response could be right"
    ):
        reward.score(RewardInput(["None"], [{"answer": None}]))


def test_a_reward_names_the_columns_that_it_reads_and_which_may_be_null() -> None:
    sent = HTTPReward("http://localhost:1", columns=["answer", "hint"])
    assert sent.reads == {"answer": True, "hint": True}
    both = {"match": ExactMatch(), "sent": sent}
    assert WeightedSum(both, dict.fromkeys(both, 1.0)).reads == {"answer": False, "hint": True}
    judge = Judge("http://localhost:1", "judge", prompt="{task}: {response} {criteria} {form}")
    assert judge.reads == {"task": True}
