"""Functions that may hang or leave, and programs in responses: scored where neither does harm."""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlflow.errors import UserError
from rlflow.rewards import CallableReward, CodeTests, RewardInput
from rlflow.rewards.code import program_in
from rlflow.worker.sandbox import why_not

isolated = pytest.mark.skipif(bool(why_not()), reason=f"programs cannot be isolated here: {why_not()}")


@pytest.fixture(autouse=True)
def functions_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])


def test_a_function_in_a_worker_scores_as_in_the_process() -> None:
    texts, rows = ["ab", "abcd", ""], [{"answer": "ab"}] * 3
    there = CallableReward("process_rewards.parts", timeout_s=30).score(RewardInput(texts, rows))
    assert there == CallableReward("process_rewards.parts").score(RewardInput(texts, rows))
    assert there.parts == {"long": [2, 4, 0], "right": [1, 0, 0]}


def test_a_sample_that_hangs_ends_the_run_in_one_line_or_is_scored_0() -> None:
    texts, rows = ["ab", "x", "abc"], [{}] * 3
    with pytest.raises(
        UserError, match=r"`process_rewards.hangs_on_x` failed on sample 1 with WorkerTimeout: .* longer than 3 s"
    ):
        CallableReward("process_rewards.hangs_on_x", timeout_s=3).score(RewardInput(texts, rows))
    scores = CallableReward("process_rewards.hangs_on_x", on_error="zero", timeout_s=3).score(RewardInput(texts, rows))
    assert (scores.total, scores.failed) == ([2, 0, 3], {1: "zero"})


def test_a_function_that_leaves_ends_its_worker_alone() -> None:
    scores = CallableReward("process_rewards.leaves", on_error="zero", timeout_s=30).score(
        RewardInput(["a", "b"], [{}] * 2)
    )
    assert (scores.total, scores.failed) == ([0, 0], {0: "zero", 1: "zero"})


def test_workers_score_side_by_side_and_live_from_step_to_step() -> None:
    reward = CallableReward("process_rewards.waits", timeout_s=30, workers=4)
    reward.score(RewardInput(["a"] * 4, [{}] * 4))  # they have started
    began = time.monotonic()
    assert reward.score(RewardInput(["a"] * 4, [{}] * 4)).total == [1.0] * 4
    assert time.monotonic() - began < 4 * 0.3
    pool: Any = reward._call.func.__self__  # type: ignore[attr-defined]
    assert [pool._free.get().starts for _ in range(4)] == [1] * 4


def test_a_copy_has_workers_of_its_own() -> None:
    reward = CallableReward("process_rewards.length", timeout_s=30)
    assert copy.deepcopy(reward).score(RewardInput(["ab"], [{}])).total == [2]


def test_what_cannot_run_in_a_worker_is_refused() -> None:
    with pytest.raises(UserError, match="no other process can import; give its dotted path"):
        CallableReward(lambda response, row: 0.0, timeout_s=1)
    with pytest.raises(UserError, match="`workers` is 2 without `timeout_s`"):
        CallableReward("process_rewards.length", workers=2)
    with pytest.raises(UserError, match="process_rewards has no lengths"):
        CallableReward("process_rewards.lengths", timeout_s=1)


GOOD = "So:\n```python\ndef double(x):\n    return 2 * x\n```\n"
PRINTS = "```\nprint(2 * int(input()))\n```"


@isolated
def test_a_program_is_scored_by_its_tests() -> None:
    rows = [{"tests": "assert double(2) == 4\nassert double(-1) == -2"}] * 5
    texts = [
        GOOD,
        GOOD.replace("2 * x", "x * x"),
        "def double(x): return 2 * x",
        "```python\nimport os; os._exit(0)\n```",
        "```python\nwrong\n```\nor rather\n" + GOOD,
    ]
    assert CodeTests(timeout_s=60, max_concurrent=3).score(RewardInput(texts, rows)).total == [1, 0, 0, 0, 1]


@isolated
def test_a_program_that_does_not_end_gets_0() -> None:
    texts, rows = ["```python\nwhile True: pass\n```"], [{"tests": "assert double(2) == 4"}]
    assert CodeTests(timeout_s=1).score(RewardInput(texts, rows)).total == [0]


@pytest.mark.parametrize(
    "text",
    [
        "```python\nP\n```",
        "```Python3 title=a\nP\n```\nIt is right.",
        "```bash\npip install x\n```\nThen:\n```python\nP\n```\nprints\n```text\n1\n```\n",
        "```python\r\nP\r\n```\r\n",
        "````py\nP\n````\n```python\nnever closed",
        "```json\n```python\n{}\n```\n  ```\nP\n  ```",
        "Answer:```python\nP\n```",
        "<answer>```\nP\n```</answer>",
        "1. First:\n    ```python\n    P\n    ```",
        "text ```python\nx=1\n```\nmore\n```python\nP\n```",
        "Run `x`:```bash\nx\n```\nThen ```y```\n```python\nP\n```",
        "<think>I wrap it in ```python\nOK</think>\n```python\nP\n```",
        "It is in ``` fences:\n```python\nP\n```",
        "It is in ``` fences:\n```\nP\n```",
        "Use ```\n```python {.line}\nP\n```",
        "Answer:```\nx\n```\nThen:\n```\nP\n```",
        "Answer:```\nP\n```\nThen\n```\nnever closed",
        "Save as:```main.py\nX\n```\nthen\n```python\nP\n```",
        "```python\nP\n```---",
    ],
)
def test_the_program_is_the_last_whole_block_of_python_or_of_no_language(text: str) -> None:
    assert program_in(text) == "P\n"


def test_a_fence_with_another_language_stays_in_a_program() -> None:
    for before in ("", "Answer:"):
        assert program_in(f"{before}```python\ns='''\n```json\n'''\n```") == "s='''\n```json\n'''\n"


@pytest.mark.parametrize("text", ["", "P", "```json\n{}\n```", "```python\nP", "```python\nprint('```')", "``` P ```"])
def test_a_text_without_a_whole_block_of_python_has_no_program(text: str) -> None:
    assert program_in(text) is None


@isolated
def test_pairs_of_input_and_output_give_a_share() -> None:
    pairs = [{"input": "2\n", "output": "4\n"}, {"input": "3\n", "output": "6"}, {"input": "0\n", "output": "1\n"}]
    rows = [{"tests": pairs}]
    assert CodeTests(timeout_s=10).score(RewardInput([PRINTS], rows)).total == [2 / 3]
    assert CodeTests(timeout_s=10, all_or_nothing=True).score(RewardInput([PRINTS], rows)).total == [0]


@isolated
def test_a_row_without_tests_is_named() -> None:
    with pytest.raises(UserError, match=r"column `tests` is 3; CodeTests takes a text of Python, or a list"):
        CodeTests().score(RewardInput([GOOD], [{"tests": 3}]))


@isolated
def test_a_program_may_write_errors_and_print_much_and_is_never_the_run_s_end() -> None:
    rows = [{"tests": [{"input": "3", "output": "\n".join(map(str, range(20_000)))}]}]
    prints = "import sys\nprint('debug', file=sys.stderr)\nfor i in range(20_000): print(i)"
    long = f"x = '{'a' * 300_000}'\n{prints}"
    texts = [f"```python\n{program}\n```" for program in (prints, long, "x = '\0'", prints + "\nprint(0)")]
    assert CodeTests(timeout_s=20).score(RewardInput(texts, rows * 4)).total == [1, 1, 0, 0]
    talks = GOOD.replace("def", "print('a' * 100_000)\ndef")
    assert CodeTests(timeout_s=20).score(RewardInput([talks], [{"tests": "assert double(2) == 4"}])).total == [1]
