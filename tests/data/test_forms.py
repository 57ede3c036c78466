"""The same rows in any form are the same data: digest, batches and runs; what is not data is refused in one line."""

from __future__ import annotations

import datetime
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, random_split

from rlflow import Trainer
from rlflow.data import HuggingFace, PromptData, as_source
from rlflow.data.loader import Loader
from rlflow.errors import UserError
from rlflow.models.tiny import tiny_tokenizer, write_tiny_model
from tests.controller.runs import Fit, fit, grpo
from tests.ranks import RankPool

ROWS = [{"prompt": f"{a}+{a}=", "answer": str(2 * a), "extra": {"a": a, "b": [a + 0.5, None]}} for a in range(7)]


class Mapped(Dataset[dict[str, Any]]):
    """A map-style dataset of torch, whose rows hold a tuple: JSON makes it a list."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        found = self.rows[row]
        return {**found, "extra": {"a": found["extra"]["a"], "b": tuple(found["extra"]["b"])}}


class Module(LightningDataModule):
    """Rows that are there once data is prepared and set up."""

    def prepare_data(self) -> None:
        self.prepared = True

    def setup(self, stage: str) -> None:
        assert self.prepared
        assert stage == "fit"
        self.rows = ROWS

    def train_dataloader(self) -> Any:
        return DataLoader(Mapped(self.rows), batch_size=3, shuffle=True, collate_fn=list)


class WithValidation(Module):
    def val_dataloader(self) -> Any:
        return [DataLoader(Mapped(self.rows[:2]), collate_fn=list)]


def jsonl(folder: Path) -> str:
    return written(folder / "x.jsonl", ROWS)


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def folder_of_jsonl(folder: Path) -> str:
    written(folder / "parts" / "a.jsonl", ROWS[:3])
    written(folder / "parts" / "b.jsonl", ROWS[3:])
    return str(folder / "parts")


def parquet(folder: Path) -> Path:
    datasets.Dataset.from_list(ROWS).to_parquet(folder / "x.parquet")
    return folder / "x.parquet"


def folder_of_parquet(folder: Path) -> str:
    (folder / "many").mkdir()
    for name, rows in (("train-0.parquet", ROWS[:3]), ("train-1.parquet", ROWS[3:])):
        datasets.Dataset.from_list(rows).to_parquet(folder / "many" / name)
    return str(folder / "many")


def saved(folder: Path) -> str:
    other = datasets.Dataset.from_list(ROWS[:1])
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS), "test": other}).save_to_disk(folder / "saved")
    return str(folder / "saved")


KINDS = ("actor/", "reward/", "rollout/", "advantages/")  # of metrics that are neither times nor memory
FORMS: dict[str, Callable[[Path], Any]] = {
    "JSONL": jsonl,
    "Parquet": parquet,
    "folder of JSONL": folder_of_jsonl,
    "folder of Parquet": folder_of_parquet,
    "saved": saved,
    "Dataset": lambda _: datasets.Dataset.from_list(ROWS),
    "list": lambda _: ROWS,
    "source": lambda _: as_source(ROWS),
    "torch": lambda _: Mapped(ROWS),
    "subset": lambda _: random_split(Mapped([*ROWS]), [7], torch.Generator())[0].dataset,
    "LightningDataModule": lambda _: Module(),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_same_rows_in_any_form_have_the_same_digest_and_the_same_batches(form: str, tmp_path: Path) -> None:
    loaders = []
    for each in (ROWS, FORMS[form](tmp_path)):
        data = PromptData(each, prompts_per_step=3).resolved()
        loaders.append(Loader(data.train, data, tiny_tokenizer(), seed=0))
    one, other = loaders
    assert one.scan.digest == other.scan.digest
    assert one.batch(1, 0, 1)[0].rows == other.batch(1, 0, 1)[0].rows
    assert torch.equal(one.batch(1, 0, 1)[0].prompt_ids.values, other.batch(1, 0, 1)[0].prompt_ids.values)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("policy"), hidden_size=64, layers=1, max_position=256)


def test_a_run_on_the_same_rows_in_any_form_is_the_same_to_the_bit(policy: Path, tmp_path: Path) -> None:
    found = {}
    for form in ("list", "JSONL", "Parquet", "folder of JSONL", "Dataset", "torch"):
        data = PromptData(FORMS[form](tmp_path), prompts_per_step=2)
        steps = fit(Fit(grpo(policy), data, tmp_path / f"run {form}", settings={"max_steps": 2})).steps
        found[form] = [{name: x for name, x in step.items() if name.startswith(KINDS)} for step in steps]
    assert all(of == found["list"] for of in found.values())
    assert found["list"][1]["actor/grad_norm"] > 0


def test_fit_takes_rows_and_validation_rows_without_settings(policy: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{a}+1="} for a in range(32)]  # as many as a step has where nothing is said
    trainer = Trainer(str(tmp_path / "run"), max_steps=1, accelerator="cpu")
    summary = trainer.fit(grpo(policy), rows, rows[:3])
    assert (summary["steps"], summary["problems"]) == (1, 3)
    found = Trainer(str(tmp_path / "run"), accelerator="cpu").validate(grpo(policy), rows[:3])
    assert (found["problems"], found["val/reward"]) == (3, summary["reward_before"])


def test_validation_rows_in_addition_to_a_prompt_data_are_refused(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`validation` is given together with a PromptData, which has its own"):
        Trainer(str(tmp_path), max_steps=1).fit(grpo(policy), PromptData(ROWS), ROWS)


def test_a_data_module_brings_the_validation_rows_that_it_has() -> None:
    assert PromptData(Module()).validation is None
    found = PromptData(WithValidation())
    assert (len(found.train), len(found.validation or ())) == (7, 2)
    assert len(PromptData(WithValidation(), ROWS).validation or ()) == 7
    loaders = LightningDataModule.from_datasets(Mapped(ROWS), Mapped(ROWS[:3]))  # which are not methods of its class
    assert len(PromptData(loaders).validation or ()) == 3


class Bare(LightningDataModule):
    pass


class OnlyValidation(WithValidation):
    train_dataloader = LightningDataModule.train_dataloader


def test_a_data_module_needs_the_loader_that_is_used_alone() -> None:
    assert len(as_source(OnlyValidation(), "data.validation", "validation")) == 2
    for split, method in (("validation", "val_dataloader"), ("test", "test_dataloader")):
        with pytest.raises(UserError, match=rf"`data.validation` is a Bare without a `{method}`; give it one"):
            as_source(Bare(), "data.validation", split)


def test_a_data_module_is_set_up_once_so_that_a_split_at_random_has_no_row_twice() -> None:
    class Splits(Module):
        def setup(self, stage: str) -> None:
            mixed = random.sample(ROWS, len(ROWS))
            self.rows, self.held_out = mixed[:5], mixed[5:]

        def val_dataloader(self) -> Any:
            return DataLoader(Mapped(self.held_out), collate_fn=list)

    for _ in range(5):  # by chance the second set-up of two splits as the first
        data = PromptData(Splits())
        rows = [
            json.dumps(row)
            for source in (data.train, data.validation)
            if source
            for row in source.read(range(len(source)))
        ]
        assert sorted(rows) == sorted(json.dumps(row) for row in PromptData(ROWS).train.read(range(len(ROWS))))


def test_a_loader_that_draws_some_rows_alone_is_refused() -> None:
    class Sampled(Module):
        def train_dataloader(self) -> Any:
            return DataLoader(Mapped(self.rows), sampler=SubsetRandomSampler([0, 1]), collate_fn=list)

    with pytest.raises(UserError, match="`train_dataloader` draws rows by SubsetRandomSampler"):
        PromptData(Sampled())


def test_a_row_that_a_dataset_cannot_give_is_named() -> None:
    class Broken(Mapped):
        def __getitem__(self, row: int) -> dict[str, Any]:
            raise OSError("the disk is gone")

    with pytest.raises(UserError, match=r"`data.train`, row 1 cannot be read \(OSError: the disk is gone\)"):
        PromptData(Broken(ROWS)).train[1]


def test_ranks_after_the_first_of_a_machine_do_not_prepare_data(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = []

    class Counts(Module):
        def prepare_data(self) -> None:
            prepared.append(1)

        def setup(self, stage: str) -> None:
            self.rows = ROWS

    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        PromptData(Counts())
    assert prepared == [1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # as vLLM leaves it
    PromptData(Counts())
    for name, value in (("TORCHELASTIC_RUN_ID", "none"), ("SLURM_STEP_TASKS_PER_NODE", "2(x16)")):
        with monkeypatch.context() as launched:
            launched.setenv(name, value)
            with pytest.raises(UserError, match="is a Counts with a `prepare_data`, and torchrun or Slurm started sev"):
                PromptData(Counts())
            assert len(PromptData(LightningDataModule.from_datasets(Mapped(ROWS))).train) == 7


class Late(Module):
    """A dataset whose rows are there half a second after it began to prepare them."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def prepare_data(self) -> None:
        time.sleep(0.5)
        self.file.write_text(json.dumps(ROWS))

    def setup(self, stage: str) -> None:
        self.rows = json.loads(self.file.read_text())


def rows_that_were_late(file: Path) -> int:
    with pytest.MonkeyPatch.context() as ranks:
        ranks.setenv("LOCAL_RANK", str(torch.distributed.get_rank()))
        return len(PromptData(Late(file)).train)


def test_the_ranks_of_an_earlier_run_wait_until_data_is_prepared(tmp_path: Path, ranks2: RankPool) -> None:
    assert ranks2.run(rows_that_were_late, tmp_path / "rows.json") == [len(ROWS)] * 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("openai/gsm8k", ("openai/gsm8k", "train", None)),
        ("openai/gsm8k/main", ("openai/gsm8k", "train", "main")),
        ("openai/gsm8k/main[test]", ("openai/gsm8k", "test", "main")),
        ("a-b/c_d-1.5[train[:90%]]", ("a-b/c_d-1.5", "train[:90%]", None)),
    ],
)
def test_a_name_of_the_hub_may_have_a_subset_and_a_split(text: str, expected: tuple[str, str, str | None]) -> None:
    source = as_source(text)
    assert isinstance(source, HuggingFace)
    assert (source.path, source.split, source.subset) == expected
    held_out = as_source(text, "data.validation", "validation")
    assert isinstance(held_out, HuggingFace)
    assert held_out.split == ("validation" if "[" not in text else expected[1])


class Streams(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Any:
        return iter(ROWS)


def stream() -> Any:
    return datasets.Dataset.from_list(ROWS).to_iterable_dataset()


class TwoLoaders(Module):
    def train_dataloader(self) -> Any:
        return [super().train_dataloader()] * 2


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "stream": (stream, "`data.train` is of type IterableDataset, which streams, .*; load it whole"),
    "torch stream": (Streams, "`data.train` is of type Streams, which streams, .*; load it whole"),
    "splits": (lambda: datasets.DatasetDict({"a": stream(), "b": stream()}), "which has the splits a, b; give one"),
    "columns": (lambda: {"prompt": ["1"]}, "`data.train` is of type dict; give a list of dicts"),
    "number": (lambda: 3, "`data.train` is of type int; give a list of dicts"),
    "loader": (lambda: DataLoader(Mapped(ROWS)), "`data.train` is of type DataLoader; give a list of dicts"),
    "loaders": (TwoLoaders, "`data.train` is a TwoLoaders, whose `train_dataloader` gives .*, not one loader"),
    "no loader": (OnlyValidation, "`data.train` is a OnlyValidation without a `train_dataloader`; give it one"),
    "other file": (lambda: __file__, "whose name ends in '.py'; give a JSON Lines or Parquet file"),
    "no file": (lambda: "rows.csv", "`data.train` is 'rows.csv', and there is no such file in .* Give a JSON Lines or"),
    "nothing": (lambda: "", "`data.train` is '', which names nothing; give a JSON Lines or Parquet file"),
}


@pytest.mark.parametrize(("form", "line"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_data_is_refused_in_one_line(form: Callable[[], Any], line: str) -> None:
    with pytest.raises(UserError, match=line) as raised:
        PromptData(form())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ([], r"a folder with no file that ends in .jsonl or .parquet; give"),
        (["a.jsonl", "b.parquet"], r"a folder with files that end in .jsonl and .parquet; give a folder of one form"),
        (["train.jsonl", "test_1.jsonl"], "a folder with files of the splits test and train; give the files of one"),
        (["train/0.parquet", "test/0.parquet"], "a folder with files of the splits test and train; give the files of"),
    ],
)
def test_a_folder_that_is_not_one_dataset_of_one_format_and_split_is_refused(
    files: list[str], line: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=f"`data.train` is '{tmp_path}', {line}"):
        PromptData(str(tmp_path))


GOOD = {"prompt": "1"}


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([], "`data.train` has no rows, so there is nothing to train on; check the dataset"),
        ([GOOD, ["1"]], r"`data.train`, row 1 is \['1'\], not a mapping; give each row as {column: value, ...}"),
        ([GOOD, None], "`data.train`, row 1 is None, not a mapping"),
        ([{"text": "1"}], "row 0 has no column `prompt` or `question`; columns found: text"),
        ([GOOD, {"question": "1"}], "`data.train`, row 1 has no column `prompt`; columns found: question."),
        ([GOOD, {**GOOD, "at": datetime.date(2024, 1, 2)}], r"row 1: column `at` is datetime.date\(2024, 1, 2\)"),
        ([GOOD, {**GOOD, "bytes": b"1"}], "row 1: column `bytes` is b'1' .*; write it as a text or numbers, or remove"),
        ([GOOD, {**GOOD, "x": torch.tensor(1)}], r"row 1: column `x` is tensor\(1\)"),
        ([GOOD, {"prompt": "\ud83d"}], r"row 1: column `prompt` is '\\ud83d' \(.* surrogates not allowed\)"),
        ([GOOD, {"prompt": 1}], "`data.train`, row 1: column `prompt` is 1, not a text"),
    ],
)
@pytest.mark.parametrize("form", [list, Mapped])
def test_a_row_that_cannot_be_read_is_named_with_its_column(
    rows: list[Any], line: str, form: Any, tmp_path: Path
) -> None:
    if form is Mapped:
        rows = [{**row, "extra": {"a": 0, "b": []}} if isinstance(row, dict) else row for row in rows]
    with pytest.raises(UserError, match=line) as raised:
        loaded(rows if form is list else Plain(rows))
    assert "\n" not in str(raised.value)


class Plain(Mapped):
    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.rows[row]


def test_a_picture_and_a_time_of_a_dataset_are_named_with_row_and_column() -> None:
    times = datasets.Dataset.from_list([{"prompt": "1", "when": datetime.datetime(2024, 1, 2)}])
    with pytest.raises(UserError, match=r"`data.train`, row 0: column `when` is datetime.datetime\(2024, 1, 2"):
        loaded(times)
    with pytest.raises(UserError, match=r"`data.train`, row 0: column `n` is tensor\(1\)"):
        loaded(datasets.Dataset.from_list([{"prompt": "1", "n": 1}]).with_format("torch", columns=["n", "prompt"]))


def loaded(data: Any) -> Loader:
    of = PromptData(data, prompts_per_step=1).resolved()
    return Loader(of.train, of, tiny_tokenizer(), seed=0)
