"""Functions of the user's as rewards: their arguments, and the other forms of a reward."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import Any

import numpy
import pytest

from rlflow.errors import UserError
from rlflow.rewards import CallableReward, ExactMatch, Reward, RewardInput, Scores, TrainerState, WeightedSum, as_reward
from rlflow.rewards.reward import scored

CONVERSATION = [
    {"role": "user", "content": "6 * 7?"},
    {"role": "assistant", "content": "use a tool"},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "42"},
]


def exact(response: str, answer: str) -> float:
    return float(response.strip() == answer)


def brief(completion: str) -> float:
    return -0.5 * len(completion)


def everything(response: str, **columns: Any) -> dict[str, float]:
    return {name: float(value) for name, value in columns.items()}


def hangs(response: str) -> float:
    while True:
        pass


def of(function: Any, responses: RewardInput) -> list[float]:
    return scored(as_reward(function), responses).total


class TestWhatAFunctionIsGiven:
    def test_columns_are_given_by_name(self) -> None:
        assert of(exact, RewardInput(["42 ", "41"], [{"answer": "42"}] * 2)) == [1.0, 0.0]

    def test_columns_are_given_by_position_to_positional_only_parameters(self) -> None:
        def by_place(response: str, answer: str, /) -> float:
            return exact(response, answer)

        assert of(by_place, RewardInput(["42 ", "41"], [{"answer": "42"}] * 2)) == [1.0, 0.0]

    def test_the_prompt_is_given_as_the_dataset_has_it(self) -> None:
        seen: list[Any] = []

        def keep(prompt: Any) -> float:
            seen.append(prompt)
            return 0.0

        for row, column in (({"prompt": "a"}, None), ({"question": "b"}, None), ({"x": {"y": "c"}}, "x.y")):
            of(keep, RewardInput([""], [row], column))
        of(keep, RewardInput([""], [{"prompt": [{"role": "user", "content": "d"}]}]))
        assert seen == ["a", "b", "c", [{"role": "user", "content": "d"}]]

    def test_messages_are_the_conversation_of_the_response(self) -> None:
        def last(messages: list[dict[str, Any]]) -> float:
            return float(len(messages) * 10 + len(messages[-1]["content"]))

        assert of(last, RewardInput(["42"], [{"prompt": "6 * 7?"}])) == [22.0]
        assert of(last, RewardInput(["42"], [{"prompt": "6 * 7?"}], conversations=[CONVERSATION])) == [42.0]

    def test_row_is_the_whole_row_and_info_is_its_column(self) -> None:
        def both(row: dict[str, Any], info: dict[str, Any]) -> float:
            return len(row) + 10.0 * len(info)

        assert of(both, RewardInput(["", ""], [{"n": 1}, {"n": 1, "info": {"a": 1, "b": 2}}])) == [1.0, 22.0]

    def test_keyword_arguments_are_all_columns(self) -> None:
        scores = scored(as_reward(everything), RewardInput(["x"], [{"a": 1, "b": 2}]))
        assert (scores.total, scores.parts) == ([3.0], {"a": [1.0], "b": [2.0]})

    def test_each_call_is_given_lists_of_its_own(self) -> None:
        def pops(response: str, tests: list[str]) -> float:
            return float(tests.pop() == response)

        def pops_all(completions: list[str], tests: list[list[str]]) -> list[float]:
            return [pops(each, of) for each, of in zip(completions, tests, strict=True)]

        for function in (pops, pops_all):
            assert of(function, RewardInput(["42", "42"], [{"tests": ["41", "42"]}] * 2)) == [1.0, 1.0]

    def test_a_parameter_without_a_column_has_its_default(self) -> None:
        def scaled(response: str, scale: float = 3.0) -> float:
            return scale

        assert of(scaled, RewardInput(["", ""], [{}, {"scale": 5.0}])) == [3.0, 5.0]

    def test_a_column_with_a_reserved_name_is_given_with_one_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        reward = as_reward(lambda response: float(response))
        with caplog.at_level(logging.WARNING):
            assert scored(reward, RewardInput(["x", "x"], [{"response": 7}] * 2)).total == [7.0, 7.0]
        assert caplog.text.count("is given the dataset's column `response`") == 1
        with caplog.at_level(logging.WARNING):
            for column in (None, "prompt"):
                of(lambda prompt, info: 0.0, RewardInput(["x"], [{"prompt": "p", "info": {}}], column))
        assert caplog.text.count("is given the dataset's column") == 1

    def test_an_async_function_is_called_for_all_samples_together(self) -> None:
        async def slow(response: str) -> float:
            await asyncio.sleep(0.2)
            return float(response)

        begun = time.monotonic()
        assert of(slow, RewardInput(["1", "2", "3", "4", "5"], [{}] * 5)) == [1, 2, 3, 4, 5]
        assert time.monotonic() - begun < 0.8

    def test_a_function_in_a_worker_is_given_columns_too(self) -> None:
        path = f"{__name__}.exact"
        reward = CallableReward(path, timeout_s=10.0)
        assert scored(reward, RewardInput(["42", "41"], [{"answer": "42"}] * 2)).total == [1.0, 0.0]


class TestWhatCannotBeCalled:
    def test_an_unknown_parameter_is_read_of_every_row_before_the_run(self) -> None:
        assert as_reward(exact).reads == {"answer": True}
        with pytest.raises(UserError, match=r"failed on sample 0 with TypeError: exact.* argument: 'answer'"):
            of(exact, RewardInput(["42"], [{"question": "", "answers": "42"}]))

    def test_a_missing_prompt_column_is_an_error(self) -> None:
        with pytest.raises(UserError, match=r"reads the prompt.*\(n\); name it by `data.prompt`"):
            of(lambda prompt: 0.0, RewardInput(["42"], [{"n": 1}]))

    @pytest.mark.parametrize("returned", [None, float("nan"), [1.0], "1", {}])
    def test_a_score_that_is_not_a_number_is_an_error(self, returned: Any) -> None:
        with pytest.raises(UserError, match=r"^reward `<lambda>` failed on sample 0 with .*it returned"):
            of(lambda response: returned, RewardInput(["42"], [{}]))

    def test_a_function_that_hangs_is_killed(self) -> None:
        reward = CallableReward(f"{__name__}.hangs", timeout_s=0.5)
        with pytest.raises(UserError, match=r"took longer than 0.5 s"):
            scored(reward, RewardInput(["42"], [{}]))

    @pytest.mark.parametrize(
        ("value", "line"),
        [
            ([], "`reward` is a sum of no rewards; give at least one"),
            ({}, "`reward` is a sum of no rewards; give at least one"),
            (5, "`reward` is 5; give a function, its dotted path, a Reward, or a list or dict of these"),
            ([5], "`reward` is 5; give a function"),
            (ExactMatch, "`reward` is the class ExactMatch; give an instance"),
            (f"{__name__}.exakt", "test_functions has no exakt. Did you mean"),
            ("nowhere.exact", "`reward` is 'nowhere.exact', but there is no module nowhere"),
            ("exact", "`reward` is 'exact', and no reward is known by that name. Did you mean"),
        ],
    )
    def test_what_is_not_a_reward_is_refused_in_one_line(self, value: Any, line: str) -> None:
        with pytest.raises(UserError) as raised:
            as_reward(value)
        assert line in str(raised.value)


class TestSums:
    def test_a_list_is_a_sum(self) -> None:
        scores = scored(as_reward([exact, f"{__name__}.brief"]), RewardInput(["42", "421"], [{"answer": "42"}] * 2))
        assert scores.total == [0.0, -1.5]
        assert scores.parts == {"exact": [1.0, 0.0], "brief": [-1.0, -1.5]}

    def test_parts_of_one_name_are_numbered(self) -> None:
        reward = as_reward([exact, exact, ExactMatch(), exact])
        assert isinstance(reward, WeightedSum)
        assert list(reward.parts) == ["exact", "exact_2", "ExactMatch", "exact_3"]

    def test_a_dict_names_the_parts(self) -> None:
        scores = scored(as_reward({"right": exact, "short": brief}), RewardInput(["42"], [{"answer": "42"}]))
        assert (scores.total, scores.parts) == ([0.0], {"right": [1.0], "short": [-1.0]})

    def test_a_path_of_a_class_of_rewards_is_one(self) -> None:
        assert isinstance(as_reward("rlflow.rewards.ExactMatch"), ExactMatch)
        reward: Reward = ExactMatch()
        assert as_reward(reward) is reward


class TestTheFormOfTRL:
    """The functions are rewritten after the examples of TRL 1.16's documentation, `docs/source/grpo_trainer.md`,
    "Using a custom reward function": https://huggingface.co/docs/trl/grpo_trainer#using-a-custom-reward-function
    """

    texts = RewardInput(
        [" blue.", " in the sky."],
        [{"prompt": "The sky is"}, {"prompt": "The sun is"}],
        token_ids=lambda: [[6303, 13], [304, 279, 12884, 13]],
        state=TrainerState(global_step=3, max_steps=10, epoch=0.5),
    )

    def test_example_1_scores_token_ids(self) -> None:
        def reward_func(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
            return [float(len(ids)) for ids in completion_ids]

        assert of(reward_func, self.texts) == [2.0, 4.0]

    def test_example_1_1_scores_characters(self) -> None:
        def reward_func(completions: list[str], **kwargs: Any) -> list[float]:
            return [float(len(completion)) for completion in completions]

        assert of(reward_func, self.texts) == [6.0, 12.0]

    def test_example_2_scores_the_format_of_messages(self) -> None:
        def format_reward_func(completions: list[Any], **kwargs: Any) -> list[float]:
            contents = [completion[0]["content"] for completion in completions]
            return [1.0 if each.startswith("<think>") and each.endswith("</answer>") else 0.0 for each in contents]

        prompts = [[{"role": "user", "content": "What is the result of (1 + 2) * 4?"}]] * 2
        texts = ["<think>1 + 2 = 3, times 4 is 12.</think><answer>(1 + 2) * 4 = 12</answer>", "It is 12."]
        assert of(format_reward_func, RewardInput(texts, [{"prompt": each} for each in prompts])) == [1.0, 0.0]

    def test_example_3_compares_with_a_column(self) -> None:
        def reward_func(completions: list[str], ground_truth: list[str], **kwargs: Any) -> list[float]:
            found = [each.rpartition("\\boxed{")[2].partition("}")[0] for each in completions]
            return [1.0 if each == truth else 0.0 for each, truth in zip(found, ground_truth, strict=True)]

        rows = [{"prompt": "2x + 3 = 7", "ground_truth": "2"}, {"prompt": "3x = 5", "ground_truth": "5"}]
        texts = [r"The solution is \boxed{2}.", r"The solution is \boxed{6}."]
        assert of(reward_func, RewardInput(texts, rows)) == [1.0, 0.0]
        assert as_reward(reward_func).reads == {"ground_truth": True}

    def test_example_4_leaves_out_functions_that_return_none(self) -> None:
        def math_reward_func(prompts: Any, completions: Any, task: list[str], **kwargs: Any) -> list[float | None]:
            return [1.0 if each == "math" else None for each in task]

        def coding_reward_func(prompts: Any, completions: Any, task: list[str], **kwargs: Any) -> list[float | None]:
            return [0.25 if each == "coding" else None for each in task]

        rows = [{"prompt": "2 + 2?", "task": "math"}, {"prompt": "Sort", "task": "coding"}]
        reward = as_reward([math_reward_func, coding_reward_func])
        scores = scored(reward, RewardInput(["4", "sorted"], rows))
        assert (scores.total, scores.absent) == ([1.0, 0.25], frozenset())
        assert scores.parts == {"math_reward_func": [1.0, None], "coding_reward_func": [None, 0.25]}

    def test_a_sample_that_no_function_applies_to_is_a_failure(self) -> None:
        def never(completions: list[str], **kwargs: Any) -> list[float | None]:
            return [None if "blue" in each else 1.0 for each in completions]

        for value in (never, [never, never]):
            reward = as_reward(value)
            with pytest.raises(UserError, match=r"returned None for sample 0 \(response ' blue\.'"):
                reward.settled(scored(reward, self.texts), self.texts)
        drops = CallableReward(never, on_error="drop")
        for reward in (drops, WeightedSum({"a": drops, "b": CallableReward(never, on_error="zero")})):
            assert reward.settled(scored(reward, self.texts), self.texts).failed == {0: "drop"}

    def test_example_5_awaits_a_coroutine(self) -> None:
        async def async_reward_func(prompts: Any, completions: list[str], **kwargs: Any) -> list[float]:
            await asyncio.sleep(0.01)
            return [1.0 if "blue" in each else 0.0 for each in completions]

        assert of(async_reward_func, self.texts) == [1.0, 0.0]

    def test_a_function_reads_the_trainer_state_and_logs_values(self) -> None:
        def curriculum(completions: list[str], trainer_state: Any, log_extra: Any, log_metric: Any) -> list[float]:
            log_extra("length", [len(each) for each in completions])
            log_metric("progress", trainer_state.global_step / trainer_state.max_steps)
            return [trainer_state.epoch] * len(completions)

        scores = scored(as_reward({"only": curriculum}), self.texts)
        assert scores == Scores(
            [0.5, 0.5], {"only": [0.5, 0.5]}, metrics={"progress": [0.3]}, columns={"length": [6, 12]}
        )

    def test_a_conversation_is_what_follows_the_prompt(self) -> None:
        def kept(completions: list[Any]) -> list[float]:
            assert completions[0] == CONVERSATION[1:]
            return [1.0]

        rows = [{"prompt": CONVERSATION[:1]}]
        assert of(kept, RewardInput(["42"], rows, conversations=[CONVERSATION])) == [1.0]

    def test_a_function_in_a_worker_reads_the_state_and_logs_too(self) -> None:
        reward = CallableReward(f"{__name__}.lengths", timeout_s=20.0)
        scores = scored(reward, self.texts)
        assert (scores.total, scores.metrics, scores.columns) == ([6.0, 12.0], {"step": [3.0]}, {"n": [6, 12]})

    def test_a_function_is_not_called_without_samples(self) -> None:
        def mean(completions: list[str], answer: list[str]) -> list[float]:
            return [1 / len(completions)] * len(answer)

        assert scored(as_reward(mean), RewardInput([], [])) == Scores([])

    @pytest.mark.parametrize(
        ("returned", "line"),
        [
            ([1.0], "it returned 1 scores for 2 samples"),
            (1.0, "it returned 1.0 for 2 samples"),
            (None, "it returned None for 2 samples"),
            ([1.0, float("nan")], "failed on sample 1 with ValueError: it returned nan"),
            (["1", "2"], "failed on sample 0 with TypeError: it returned '1', not a number"),
        ],
    )
    def test_what_is_not_a_list_of_numbers_is_an_error(self, returned: Any, line: str) -> None:
        def wrong(completions: list[str], **kwargs: Any) -> Any:
            return returned

        with pytest.raises(UserError) as raised:
            of(wrong, self.texts)
        assert line in str(raised.value)
        count = 1 if "nan" in line else 2
        assert len(scored(CallableReward(wrong, on_error="zero"), self.texts).failed) == count


def test_a_cancelled_call_is_a_failure_of_its_sample() -> None:
    def cancelled(response: str) -> float:
        raise asyncio.CancelledError  # which is not an `Exception`

    reward = CallableReward(cancelled, on_error="zero")
    assert scored(reward, RewardInput(["a", "b"], [{}] * 2)).failed == {0: "zero", 1: "zero"}


async def lengths(completions: list[str], trainer_state: Any, log_extra: Any, log_metric: Any) -> list[float]:
    log_metric("step", trainer_state.global_step)
    log_extra("n", [len(each) for each in completions])
    return [float(len(each)) for each in completions]


def test_a_short_name_is_a_reward_of_rlflow() -> None:
    assert isinstance(as_reward("exact_match"), ExactMatch)
    assert isinstance(as_reward(["sum_value", lambda response: 0.0]), WeightedSum)


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("math_verfy", 'no reward is known by that name. Did you mean "math_verify"?'),
        ("judge", "Judge needs `url`, `model`; give the object"),
        (lambda completions, prompt: [0.0 for _ in completions], "TRL's form, which gives lists: `prompts`"),
    ],
)
def test_what_names_no_reward_is_refused_in_one_line(value: Any, line: str) -> None:
    with pytest.raises(UserError, match=re.escape(line)):
        as_reward(value)


def test_values_of_one_name_that_two_functions_log_are_both_recorded() -> None:
    def first(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("kind", ["a" for _ in completions])
        return [1.0 for _ in completions]

    def second(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("kind", ["b" for _ in completions])
        return [1.0 for _ in completions]

    assert as_reward([first, second]).score(RewardInput(["x"], [{}])).columns == {"kind": ["a"], "second/kind": ["b"]}


def test_an_async_function_is_called_where_a_loop_is_running_as_in_a_notebook() -> None:
    async def one(response: str) -> float:
        return 1.0

    async def cell() -> list[float]:
        return as_reward(one).score(RewardInput(["x"], [{}])).total

    assert asyncio.run(cell()) == [1.0]


def test_an_array_of_numpy_is_a_list_of_numbers() -> None:
    def scores(completions: list[str]) -> Any:
        return numpy.array([0.5 for _ in completions])

    assert as_reward(scores).score(RewardInput(["x"], [{}])).total == [0.5]
