"""Lightning's loggers in a run: the real W&B in offline mode and TensorBoard, by reading back what they wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers import TensorBoardLogger as LightningTensorBoardLogger
from lightning.pytorch.loggers import WandbLogger as LightningWandbLogger
from PIL import Image, ImageColor
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlflow.errors import UserError
from rlflow.loggers import TensorBoardLogger, WandbLogger
from rlflow.loggers.lightning import LightningLogger, _lacks_a_key
from rlflow.values.picture import Picture

BLOCK = (
    32768  # the file is a LevelDB log: blocks of records, a record's header being crc (4 bytes), length (2), type (1)
)
HEADER = 7
FULL, LAST = 1, 4
SAID = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2", "reward": 0.5, "ended": "over"}]
SAMPLES = [
    {"prompt": "1+1=", "response": "2", "reward": 1.0, "messages": SAID},
    {"prompt": "p", "response": "", "reward": 0, "messages": []},
]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def record(logger: LightningLogger, folder: Path, values: dict[int, float], first_step: int = 0) -> None:
    """Log `x` of some steps and samples of the first, as a run does."""
    logger.start(folder, first_step)
    logger.log_config({"seed": 3, "module": {"class_path": "rlflow.algorithms.GRPO"}})
    for step, value in values.items():
        logger.log_metrics({"x": value}, step)
    logger.log_samples(SAMPLES, next(iter(values)))
    logger.finalize("success")


class Recorded:
    """The content of a folder's `.wandb` files: runs, the config, and history in its order."""

    def __init__(self, folder: Path) -> None:
        import wandb
        from wandb.proto.wandb_internal_pb2 import Record

        wandb.teardown()  # as at the end of a process: its service writes the file after `finish` returned
        self.runs: list[tuple[str, str, str]] = []
        self.config: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.exit_codes: list[int] = []
        self.artifacts: dict[str, Path] = {}  # files of artifacts, by their paths there
        for file in sorted(folder.rglob("run-*.wandb"), key=lambda file: file.stat().st_mtime_ns):
            for payload in records(file.read_bytes()):
                record = Record.FromString(payload)
                if record.HasField("run"):
                    self.runs.append((record.run.project, record.run.display_name, record.run.run_id))
                for entry in record.artifact.manifest.contents:
                    self.artifacts[entry.path] = Path(entry.local_path)
                if record.HasField("exit"):
                    self.exit_codes.append(record.exit.exit_code)
                for update in [*record.run.config.update, *record.config.update]:
                    self.config[update.key or ".".join(update.nested_key)] = json.loads(update.value_json)
                if record.HasField("history"):
                    items = record.history.item
                    self.history.append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items})

    def values(self, name: str) -> list[tuple[int, float]]:
        # `trainer/global_step` is Lightning's name for a step.
        return [(each["trainer/global_step"], each[name]) for each in self.history if name in each]


def records(data: bytes) -> Iterator[bytes]:
    """The payloads of a `.wandb` file, whose first record stands after a header of its own of the same size."""
    position, payload = HEADER, b""
    while position + HEADER <= len(data):
        if BLOCK - position % BLOCK < HEADER:
            position += BLOCK - position % BLOCK
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        payload += data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (FULL, LAST):
            yield payload
            payload = b""


def test_wandb_has_config_metrics_by_step_and_samples_as_a_table(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    record(WandbLogger(project="sums"), folder, {1: 0.5, 2: 0.75})
    recorded = Recorded(folder)
    assert [(project, name) for project, name, _ in recorded.runs] == [("sums", "tiny")]  # named after the folder
    assert recorded.config["seed"] == 3
    assert recorded.config["module"] == {"class_path": "rlflow.algorithms.GRPO"}
    assert recorded.values("x") == [(1, 0.5), (2, 0.75)]
    (file,) = folder.rglob("*.table.json")
    table = json.loads(file.read_text())
    assert table["columns"] == ["prompt", "response", "reward", "messages"]
    assert table["data"][0] == ["1+1=", "2", 1.0, "user: 1+1=\n\nassistant, reward 0.5: 2\n\n(over)"]
    assert recorded.exit_codes == [0]


def test_a_logger_of_lightning_s_records_each_run_of_a_trainer(tmp_path: Path) -> None:
    given = LightningWandbLogger(save_dir=tmp_path, project="sums", offline=True)
    ids = []
    for name, first_step in (("first", 0), ("first", 2), ("second", 0)):
        (tmp_path / name).mkdir(exist_ok=True)
        record(LightningLogger(given), tmp_path / name, {1 + first_step: 0.5}, first_step)
        ids.append(given.experiment.id)  # of the run that ended
    assert ids[0] == ids[1] != ids[2]
    recorded = Recorded(tmp_path)
    assert recorded.values("x") == [(1, 0.5), (3, 0.5), (1, 0.5)]
    assert len(recorded.runs) == 3


def test_wandb_s_table_shows_the_pictures_of_samples_and_none_where_a_row_has_none(tmp_path: Path) -> None:
    colours = {7: "red", 8: "blue"}

    def pictures(row: int) -> list[Picture]:
        file = BytesIO()
        Image.new("RGB", (1024, 512), colours[row]).save(file, format="jpeg", quality=100)
        return [Picture.read(file.getvalue())]

    logger = WandbLogger(project="cells")
    logger.pictures = pictures
    logger.start(tmp_path)
    shown = [{**SAMPLES[1], "row": row, "pictures": ["a.jpg"]} for row in colours]
    logger.log_samples([{**SAMPLES[0], "row": 6}, *shown], 1)
    logger.finalize("success")
    files = Recorded(tmp_path).artifacts
    table = json.loads(files["samples.table.json"].read_text())
    cells = [row[table["columns"].index("image 1")] for row in table["data"]]
    assert cells[0] is None
    for cell, colour in zip(cells[1:], colours.values(), strict=True):
        image = Image.open(files[cell["path"]])
        assert image.size == (256, 128)
        found, wanted = image.getpixel((5, 5)), ImageColor.getrgb(colour)
        assert all(abs(one - other) < 4 for one, other in zip(found, wanted, strict=True))


def test_a_logger_of_ones_own_that_logs_tables_has_the_samples(tmp_path: Path) -> None:
    tables = []

    class TableLogger(CSVLogger):
        def log_table(self, key: str, columns: list[str], data: list[list[Any]], *, step: int) -> None:
            tables.append((key, columns, data[1], step))

    record(LightningLogger(TableLogger(tmp_path)), tmp_path, {1: 0.0})
    assert tables == [("samples", ["prompt", "response", "reward", "messages"], ["p", "", 0, ""], 1)]


@pytest.mark.parametrize("made", ["ours", "Lightning's"])
def test_a_resumed_run_continues_its_run_of_wandb(tmp_path: Path, made: str) -> None:
    def logger() -> LightningLogger:
        return WandbLogger() if made == "ours" else LightningLogger(LightningWandbLogger(save_dir=tmp_path))

    record(logger(), tmp_path, {1: 0.0, 2: 0.0})
    record(logger(), tmp_path, {2: 1.0, 3: 1.0}, first_step=2)
    recorded = Recorded(tmp_path)
    first, *others = (run for *_, run in recorded.runs)
    assert others == [first]
    assert recorded.values("x") == [(1, 0.0), (2, 0.0), (2, 1.0), (3, 1.0)]  # step 2 is there twice


def test_a_run_of_another_folder_is_another_run_of_wandb(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        record(WandbLogger(), tmp_path / name, {1: 0.0})
    assert len({run for *_, run in Recorded(tmp_path).runs}) == 2


def test_wandb_learns_that_a_run_failed(tmp_path: Path) -> None:
    logger = WandbLogger()
    logger.start(tmp_path)
    logger.finalize("failed")
    assert Recorded(tmp_path).exit_codes == [1]


def test_the_command_line_which_may_hold_a_secret_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--logger.init_args.api_key", "opensesame"])
    record(WandbLogger(), tmp_path, {1: 0.0})
    assert Recorded(tmp_path).history
    assert sys.argv[-1] == "opensesame"
    assert not any(b"opensesame" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.fixture
def no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine where neither a mode nor a key of W&B is set."""
    import wandb

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    wandb.teardown()  # it reads its settings once in a process
    yield
    wandb.teardown()


@pytest.mark.usefixtures("no_login")
def test_online_without_a_login_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^`logger`: WandbLogger cannot start \(.*wandb login"):
        WandbLogger(mode="online").start(tmp_path)


@pytest.mark.usefixtures("no_login")
def test_without_a_login_wandb_logs_offline_and_says_so_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(WandbLogger(), tmp_path, {1: 0.5})
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"W&B has no key here, so this run is logged offline in {tmp_path}/wandb; `wandb login` ")
    assert Recorded(tmp_path).values("x") == [(1, 0.5)]


@pytest.mark.usefixtures("no_login")
def test_a_key_in_netrc_or_the_environment_or_a_mode_is_left_to_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _lacks_a_key()
    for name, value in (("WANDB_API_KEY", "k" * 40), ("WANDB_API_KEY", "malformed"), ("WANDB_MODE", "online")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not _lacks_a_key()
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {'k' * 40}\n")
    assert not _lacks_a_key()


def test_a_logger_that_is_only_named_imports_neither_wandb_nor_lightnings_trainer() -> None:
    code = (
        "import sys; from rlflow.loggers import WandbLogger, TensorBoardLogger; WandbLogger(), TensorBoardLogger();"
        " sys.exit('wandb' in sys.modules or 'lightning' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def scalars(folder: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("x")]


@pytest.mark.parametrize("made", ["ours", "Lightning's"])
def test_a_resumed_run_keeps_its_tensorboard_folder_and_replaces_repeated_steps(tmp_path: Path, made: str) -> None:
    def logger() -> LightningLogger:
        return TensorBoardLogger() if made == "ours" else LightningLogger(LightningTensorBoardLogger(tmp_path))

    record(logger(), tmp_path, {1: 0.0, 2: 0.0, 3: 0.0})
    record(logger(), tmp_path, {2: 1.0, 3: 1.0}, first_step=2)
    folder = "tensorboard" if made == "ours" else "lightning_logs/version_0"
    assert scalars(tmp_path / folder) == [(1, 0.0), (2, 1.0), (3, 1.0)]
    assert "seed: 3" in (tmp_path / folder / "hparams.yaml").read_text()


def test_tensorboard_is_readable_before_the_run_ends(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    logger.start(tmp_path)
    logger.log_metrics({"x": 0.5}, step=1)
    assert scalars(tmp_path / "tensorboard") == [(1, 0.5)]
    logger.finalize("success")


def test_a_damaged_file_of_ids_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "loggers.json").write_text("[")
    with pytest.raises(UserError, match=r"loggers.json cannot be read .*; remove it, and loggers begin new runs"):
        TensorBoardLogger().start(tmp_path)


def test_mlflow_continues_its_run(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    from lightning.pytorch.loggers import MLFlowLogger

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    record(LightningLogger(MLFlowLogger(tracking_uri=uri)), tmp_path, {1: 0.0, 2: 0.0})
    record(LightningLogger(MLFlowLogger(tracking_uri=uri)), tmp_path, {2: 1.0, 3: 1.0}, first_step=2)
    client = mlflow.tracking.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("lightning_logs").experiment_id])
    assert [each.step for each in client.get_metric_history(run.info.run_id, "x")] == [1, 2, 2, 3]
