"""Rows are tokenised once: by all ranks together, and kept for the steps and for later runs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tokenizers import pre_tokenizers

from rlflow.data import loader
from rlflow.data.loader import Loader, scan_together
from rlflow.data.prompts import PromptData
from rlflow.data.scan import NUMBERS, TokenizedRows, cache_folder, keep_counted, key_of, read_counted
from rlflow.databuffer.transport import Transport
from rlflow.environments.environment import Environment
from rlflow.errors import UserError
from rlflow.models.tiny import tiny_tokenizer, write_tiny_model
from rlflow.rewards import ByDataset, CallableReward, CodeTests, ExactMatch, MathVerify, WeightedSum
from rlflow.rewards.reward import Reward
from rlflow.rollout.transformers import TransformersEngine
from tests.controller.runs import ZERO2, Fit, failing_fit, grpo
from tests.data.list_source import Listed
from tests.ranks import RankPool

ROWS = [{"question": "1" * (1 + row % 7), "answer": str(row)} for row in range(11)]


class Digested(Listed):
    """Rows in memory with a digest, as files have."""

    def digest(self) -> str | None:
        return json.dumps(self.rows)


class DigestedEngine(TransformersEngine):
    """Fails if it is ever given a model."""

    def setup(self, *_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")


def load(rows: list[dict[str, Any]], ranks: int = 1, tokenizer: Any = None, **settings: Any) -> tuple[Loader, Digested]:
    source = Digested(rows)
    given = {"max_prompt_length": 6, "overlong_rows": "drop", **settings}
    data = PromptData(source, **given).resolved()
    source.reads.clear()
    return Loader(source, data, tokenizer or tiny_tokenizer(), seed=0, ranks=ranks), source


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache; four rows are many."""
    monkeypatch.setattr(loader, "FEW_ROWS", 4)
    monkeypatch.setenv("RLFLOW_CACHE", str(tmp_path / "cache"))
    folder = cache_folder()
    assert folder is not None
    return folder


class Slow(Listed):
    """Rows that take a while to read."""

    def read(self, rows: Any) -> Any:
        time.sleep(0.5)
        return super().read(rows)


def test_tokenizing_that_takes_long_is_named_and_what_does_not_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load(ROWS)
    monkeypatch.setattr("rlflow.loggers.console.PATIENCE_S", 0.05)
    Loader(slow := Slow(ROWS), PromptData(slow).resolved(), tiny_tokenizer(), seed=0)
    assert capsys.readouterr().out == f"tokenizing 11 rows of {slow.name} ...\n"


def together(rows: list[list[dict[str, Any]]], folder: str) -> tuple[list[int], str, list[int], str]:
    """The results of rank `r` for its `rows[r]`: kept rows, digest, the rows that it read, and the error, if any."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "FEW_ROWS", 4)
        patch.setenv("RLFLOW_CACHE", f"{folder}/{rank}")
        found, source = load(rows[rank], ranks=dist.get_world_size())
        assert not found.is_scanned
        try:
            scan_together([found, None], Transport(), keeps=rank == 0)
        except UserError as error:
            return [], "", source.reads, str(error)
    return found.scan.kept.tolist(), found.scan.digest, source.reads, ""


def test_each_rank_counts_its_share_and_knows_what_one_alone_would(ranks3: RankPool, tmp_path: Path) -> None:
    alone, _ = load(ROWS)
    of_ranks = ranks3.run(together, [ROWS] * 3, str(tmp_path))

    assert [row for row in range(11) if row % 7 < 6] == alone.scan.kept.tolist()
    assert [(kept, digest) for kept, digest, _, _ in of_ranks] == 3 * [(alone.scan.kept.tolist(), alone.scan.digest)]
    assert [reads for _, _, reads, _ in of_ranks] == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10]]


def test_one_rank_of_a_machine_keeps_the_rows(ranks3: RankPool, tmp_path: Path) -> None:
    ranks3.run(together, [ROWS] * 3, str(tmp_path))
    assert [path.parent.parent.name for path in tmp_path.rglob("*.*")] == ["0"]


def _drawn(folder: str) -> list[list[int]]:
    """The prompts of all rows, which ranks of one machine have tokenised together and read without a tokenizer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "FEW_ROWS", 4)
        patch.setattr("rlflow.data.scan.TRAVELLING", 3)
        patch.setenv("RLFLOW_CACHE", folder)
        found, _ = load(ROWS, ranks=dist.get_world_size(), prompts_per_step=10, shuffle=False)
        scan_together([found], Transport(), keeps=dist.get_rank() == 0)
    found.encode = None  # type: ignore[assignment]
    return [ids.tolist() for ids in found.batch(0, 0, 1)[0].prompt_ids.rows()]


def test_ranks_of_one_machine_read_the_tokens_that_others_found(ranks3: RankPool, tmp_path: Path) -> None:
    kept = [row["question"] for row in ROWS if len(row["question"]) <= 6]
    assert ranks3.run(_drawn, str(tmp_path)) == 3 * [[[ord(letter) for letter in text] for text in kept]]


def test_a_row_that_one_rank_cannot_read_ends_all_ranks_alike(ranks3: RankPool, tmp_path: Path) -> None:
    rows = [*ROWS[:5], {"answer": "5"}, *ROWS[6:9], {"answer": "9"}, ROWS[10]]
    errors = [error for *_, error in ranks3.run(together, [rows] * 3, str(tmp_path))]
    assert errors == 3 * ["listed, row 5 has no column `question`; columns found: answer."]


def test_ranks_with_other_rows_count_their_own_and_the_difference_is_found(ranks3: RankPool, tmp_path: Path) -> None:
    other = [*ROWS[:-1], {"question": "2", "answer": "10"}]
    of_ranks = ranks3.run(together, [ROWS, ROWS, other], str(tmp_path))
    digests = [digest for _, digest, _, _ in of_ranks]
    assert digests[0] == digests[1] != digests[2] == load(other)[0].scan.digest


def _resumes_alone(folder: str) -> list[int]:
    """Rank 0 has the counts from a run before, the others do not; the rows that each reads."""
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loader, "FEW_ROWS", 4)
            patch.setenv("RLFLOW_CACHE", f"{folder}/0")
            load(ROWS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "FEW_ROWS", 4)
        patch.setenv("RLFLOW_CACHE", f"{folder}/{dist.get_rank()}")
        found, source = load(ROWS, ranks=3)
        assert found.is_scanned == (dist.get_rank() == 0)
        scan_together([found, None], Transport(), keeps=True)
    assert found.is_scanned
    return source.reads


def test_machines_that_have_no_counts_are_helped_by_those_that_have(ranks3: RankPool, tmp_path: Path) -> None:
    assert ranks3.run(_resumes_alone, str(tmp_path)) == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10]]


def test_a_later_run_reads_no_row_for_its_lengths(cache: Path) -> None:
    first, _ = load(ROWS)
    second, source = load(ROWS, ranks=3)

    assert source.reads == []
    assert second.scan.kept.tolist() == first.scan.kept.tolist()
    assert second.scan.digest == first.scan.digest


def test_limits_are_not_part_of_what_is_stored(cache: Path) -> None:
    load(ROWS)
    found, source = load(ROWS, max_prompt_length=2)
    assert source.reads == []
    assert found.scan.kept.tolist() == [0, 1, 7, 8]


def test_few_rows_are_counted_directly_and_not_stored(cache: Path) -> None:
    assert load(ROWS[:4], ranks=3)[0].is_scanned
    assert not cache.exists()


def _shorter_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@pytest.mark.parametrize(
    "other",
    [
        {"rows": [*ROWS[:-1], {"question": "2", "answer": "x"}]},
        {"rows": ROWS, "tokenizer": _shorter_tokenizer()},
        {"rows": ROWS, "response": "answer"},
        {"rows": ROWS, "prompt": "answer"},
    ],
    ids=["rows", "tokenizer", "response", "prompt"],
)
def test_other_data_tokens_or_columns_are_counted_again(cache: Path, other: dict[str, Any]) -> None:
    load(ROWS)
    _, source = load(**other)
    assert len(source.reads) == len(ROWS)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_cut, _flip, lambda path: path.write_bytes(b"")], ids=["cut", "flip", "empty"])
def test_a_damaged_file_is_written_again(cache: Path, damage: Any) -> None:
    first, _ = load(ROWS)
    damage(next(cache.glob("*.rows")))

    second, source = load(ROWS)
    assert len(source.reads) == len(ROWS)
    assert second.scan.digest == first.scan.digest
    assert load(ROWS)[1].reads == []


@pytest.mark.parametrize("rows", [1, 2, 4, 50])
def test_a_whole_file_of_another_number_of_rows_is_not_read(cache: Path, rows: int) -> None:
    numbers = torch.full((3, NUMBERS), 2, dtype=torch.int32)
    keep(numbers)
    assert read_counted("key", 3) is not None
    assert read_counted("key", rows) is None


def test_rows_of_another_version_are_counted_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(ROWS)
    monkeypatch.setattr("rlflow.data.scan.VERSION", "another")
    assert len(load(ROWS)[1].reads) == len(ROWS)


def test_runs_that_store_the_same_counts_concurrently_never_show_half_a_file(cache: Path) -> None:
    numbers = torch.arange(NUMBERS * 500_000, dtype=torch.int32).view(-1, NUMBERS)
    numbers[:, :3] = 2  # each row has 6 token ids
    keep(numbers)
    writers = [threading.Thread(target=lambda: [keep(numbers) for _ in range(6)]) for _ in range(3)]
    for writer in writers:
        writer.start()
    found = list(_until_ended(writers))
    assert len(found) > 3
    assert all(each is not None and torch.equal(each.numbers, numbers) for each in found)
    assert all(each is not None and torch.equal(each.ids, numbers[:, :6].flatten()) for each in found)
    assert sorted(path.name for path in cache.iterdir()) == ["key.rows"]


def keep(numbers: torch.Tensor) -> None:
    """Keep these numbers, and six of each row as token ids, in two pieces, the second one first."""
    ids = numbers[:, :6].flatten()
    keep_counted("key", numbers, [(4, ids[4:]), (0, ids[:4])])


def _until_ended(writers: list[threading.Thread]) -> Iterator[TokenizedRows | None]:
    while any(writer.is_alive() for writer in writers):
        yield read_counted("key", 500_000)


def test_a_cache_that_cannot_be_written_is_reported_and_the_run_continues(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.parent.write_text("no folder")
    assert load(ROWS)[0].is_scanned
    assert capsys.readouterr().err.startswith("tokens of prompts are not stored for later runs (")


def _too_long(run: Fit) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "FEW_ROWS", 4)
        return failing_fit(run).error


def test_prompts_too_long_for_the_model_end_all_ranks_before_a_weight_is_loaded(
    ranks2: RankPool, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "policy", hidden_size=64, layers=1, max_position=32)
    (model / "model.safetensors").unlink()
    source = Digested([{"question": "1" * (20 + row)} for row in range(6)])
    run = Fit(grpo(model), PromptData(source, prompts_per_step=2), tmp_path / "run", ZERO2, DigestedEngine())
    errors = ranks2.run(_too_long, run)
    assert errors[0] == errors[1]
    assert "a prompt of 25 tokens and a response of up to 12" in errors[0]


def test_first_rows_that_ranks_will_scan_must_have_what_an_environment_takes(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "FEW_ROWS", 4)
    rows = [{"question": "?", "begin": 1} for _ in range(6)]
    data, environment = (
        PromptData(Digested(rows), chat_template=True).resolved(),
        Environment("tests.environments.games.CountDown"),
    )
    with pytest.raises(UserError, match=r"row 0: `.*CountDown.reset` takes `start`, which .* \(it has question, begin"):
        Loader(data.train, data, tiny_tokenizer(), seed=0, ranks=2, environment=environment)


def test_a_conversation_s_first_prompt_is_counted_with_template_and_tools() -> None:
    """Of the row's own environment: one has a tool, the other answers messages and has none."""
    classes = {"words": "tests.environments.games.WordGame", "counting": "tests.environments.games.CountDown"}
    rows = [{"question": "?", "task": task, "start": 1, "word": "a"} for task in ("counting", "words")]
    data = PromptData(rows, chat_template=True, prompts_per_step=2, shuffle=False).resolved()
    loaded = Loader(data.train, data, tiny_tokenizer(), seed=0, environment=Environment(classes, column="task"))
    asked = 1 + len("user\n?") + 2 + 1 + len("assistant\n")  # a token for each character, and for each special token
    assert loaded.scan.longest_prompt == 1 + len("system\nTools: guess(word)") + 2 + asked
    assert loaded.batch(0, 0, 1)[0].prompt_ids.lengths.tolist() == [asked, asked]  # which other nodes may read
    alone = Loader(Listed(rows[:1]), data, tiny_tokenizer(), seed=0, environment=Environment(classes, column="task"))
    assert alone.scan.longest_prompt == asked


def test_a_first_prompt_that_is_too_long_with_its_tools_is_refused_before_the_run() -> None:
    data = PromptData([{"question": "?"}], chat_template=True, prompts_per_step=1, max_prompt_length=30).resolved()
    assert Loader(data.train, data, tiny_tokenizer(), seed=0).scan.longest_prompt == 20
    said = "1 of 1 rows exceed `data.max_prompt_length` 30 .* raise `data.max_prompt_length` to at least 48"
    with pytest.raises(UserError, match=said):
        Loader(data.train, data, tiny_tokenizer(), 0, environment=Environment("tests.environments.games.WordGame"))


class Reading(CallableReward):
    """Reads these columns."""

    def __init__(self, reads: dict[str, bool]) -> None:
        super().__init__(lambda response, row: 0.0)
        self.reads = reads


def scored(row: dict[str, Any], reads: dict[str, bool], ranks: int = 1, reward: Reward | None = None) -> Loader:
    """A loader of four good rows and this one, whose columns a reward reads."""
    data = PromptData(Digested([{**row, "question": "1+1=", "answer": "2"}] * 4 + [row])).resolved()
    return Loader(data.train, data, tiny_tokenizer(), seed=0, ranks=ranks, reward=reward or Reading(reads))


def test_a_row_without_the_reward_s_column_is_named_before_the_first_step(cache: Path) -> None:
    line = "row 4 has no column `answer`, which the reward reads; columns found: question. Correct or remove the row"
    for ranks in (1, 2):
        with pytest.raises(UserError, match=line):
            scored({"question": "1+1="}, {"answer": False}, ranks)


def test_null_is_refused_where_the_reward_cannot_score_it(cache: Path) -> None:
    null = {"question": "1+1=", "answer": None}
    with pytest.raises(UserError, match="row 4: column `answer`, which the reward reads, is null"):
        scored(null, {"answer": False})
    assert scored(null, {"answer": True}).is_scanned


def test_counts_that_are_kept_are_of_one_reward_s_columns(cache: Path) -> None:
    row = {"question": "1+1="}
    assert scored(row, {}).is_scanned
    with pytest.raises(UserError, match="row 4 has no column `answer`"):
        scored(row, {"answer": False})


class Refusing(ExactMatch):
    """A user's reward, which refuses one answer."""

    def __init__(self, refused: int) -> None:
        super().__init__()
        self.refused = refused

    def check(self, row: dict[str, Any]) -> None:
        if row["answer"] == self.refused:
            raise UserError(f"column `answer` is {self.refused}")


@pytest.mark.parametrize(
    ("reward", "answer", "said"),
    [
        (MathVerify(), "", "holds '', no expression that math-verify can read"),
        (CodeTests("answer"), 7, "is 7; CodeTests takes a text of Python, or a list of mappings"),
    ],
    ids=str,
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_row_that_a_reward_cannot_score_is_named_before_the_first_step(
    reward: Reward, answer: Any, said: str, ranks: int, cache: Path
) -> None:
    row = {"question": "1+1=", "answer": answer}
    for asked in (reward, WeightedSum({"a": reward}, {"a": 1.0})):
        with pytest.raises(UserError, match=f"row 4: column `answer` {said}"):
            scored(row, {}, ranks, asked)


BOTH = {"answer": False, "tests": False}


@pytest.mark.parametrize(
    ("accepts", "refuses"),
    [
        (ExactMatch(), CodeTests("answer")),
        (Refusing(8), Refusing(7)),
        (ByDataset({"a": Refusing(8)}, "of"), ByDataset({"a": Refusing(7)}, "of")),
        (
            WeightedSum({"all": Reading(BOTH), "runs": CodeTests("tests"), "right": ExactMatch("answer")}),
            WeightedSum({"all": Reading(BOTH), "runs": CodeTests("answer"), "right": ExactMatch("tests")}),
        ),
    ],
    ids=lambda reward: type(reward).__name__,
)
def test_counts_that_are_kept_are_of_one_reward_s_check(
    accepts: Reward, refuses: Reward, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlflow.data.loader.FEW_ROWS", 1)
    row = {"question": "1+1=", "answer": 7, "tests": "assert True", "of": "a"}
    assert scored(row, {}, reward=accepts).is_scanned
    with pytest.raises(UserError, match="row 4: column `answer` is 7"):
        scored(row, {}, reward=refuses)


def test_the_renderer_and_form_of_tool_calls_are_in_the_key_of_stored_tokens() -> None:
    """Without an environment too: token ids of another renderer would be read."""
    tokenizer, rows = tiny_tokenizer(), [{"messages": [{"role": "user", "content": "1+1"}]}]
    ways: list[dict[str, Any]] = [{}, {"renderer": "qwen3"}, {"tool_calls": "mistral"}]
    keys = [key_of(data.train, data, tokenizer) for data in (PromptData(rows, **way) for way in ways)]
    assert len({*keys}) == 3


class Inheriting(MathVerify):
    """A user's reward with the check of rlflow's."""


@pytest.mark.parametrize(("reward", "is_stored"), [(Inheriting(), True), (Refusing(8), False)], ids=["theirs", "own"])
def test_ranks_share_a_user_s_own_check_and_a_later_run_repeats_it(
    reward: Reward, is_stored: bool, cache: Path
) -> None:
    row = {"question": "1+1=", "answer": "7"}
    assert not scored(row, {}, 2, reward).is_scanned
    scored(row, {}, 1, reward)
    assert scored(row, {}, 2, reward).is_scanned == is_stored
