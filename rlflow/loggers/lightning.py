"""Lightning's loggers in a run: Weights & Biases, TensorBoard, MLflow and others, imported when one is named."""

from __future__ import annotations

import json
import os
import sys
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlflow.errors import UserError, one_line, require
from rlflow.loggers.logger import Logger
from rlflow.loggers.transcript import transcript
from rlflow.values.picture import Picture

if TYPE_CHECKING:
    from lightning.fabric.loggers.logger import Logger as FabricLogger
else:

    class FabricLogger(ABC):  # noqa: B024 (it only knows them)
        """The base of Lightning's loggers, known by its name: they are imported when one is named."""

        @classmethod
        def __subclasshook__(cls, other: type) -> bool:
            names = (f"{each.__module__}.{each.__qualname__}" for each in other.__mro__)
            return "lightning.fabric.loggers.logger.Logger" in names


LoggerLike = Logger | FabricLogger  # what a user gives
RUNS_FILE = "loggers.json"
PICTURES_SHOWN, PICTURE_SIDE = 4, 256  # of a sample in W&B's table; pixels of the longer side


class LightningLogger(Logger):
    """Sends a run to a logger of Lightning, or with its interface. Samples are sent if the logger has `log_table`.

    A run that is resumed in its folder continues the logger's own run of W&B, TensorBoard or MLflow. The id of that run
    is in `loggers.json` of the folder. Any other logger starts a new run. For steps that are repeated, TensorBoard
    hides the earlier values; W&B and MLflow show both values.

    A config names the class of Lightning, or a short name. The run then constructs this class around it:

        logger:
          - mlflow
          - {class_path: wandb, init_args: {project: sums, mode: offline}}

    Args:
        logger: Logger of Lightning, such as `lightning.pytorch.loggers.MLFlowLogger`.

    Attributes:
        place: Place among the run's loggers, by which its id is found in a resume.
        pictures: The run's function from the place of a row in the training data to the row's pictures; None for none.
        say: Shows a line to the user.
    """

    place = 0
    pictures: Callable[[int], Sequence[Picture]] | None = None
    say: Callable[[str], None] = print

    def __init__(self, logger: FabricLogger) -> None:
        self._given = logger

    def start(self, folder: Path, first_step: int = 0) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its own crash reports; read when it is imported
        from lightning.pytorch.loggers import WandbLogger as LightningWandbLogger

        self._logger = self._made(folder)
        self._wandb = self._logger if isinstance(self._logger, LightningWandbLogger) else None
        if self._wandb is not None and getattr(self._wandb._experiment, "_is_finished", False):
            self._wandb._experiment = None  # of an earlier run in this process; this one is another of W&B's
            self._wandb._wandb_init["id"] = self._wandb._id
        runs, key = _read_runs(folder), f"{self.place} {type(self._logger).__name__}"
        self._resumes = key in runs
        try:
            with _command_line_hidden():
                if self._resumes:
                    _resume(self._logger, runs[key], first_step)
                if self._wandb is not None:
                    self._wandb_run = self._wandb.experiment  # which starts it
                runs[key] = self._logger.version
        except Exception as error:
            raise UserError(
                f"`logger`: {type(self._logger).__name__} cannot start ({one_line(error)}); fix that, or leave it out"
            ) from error
        (folder / RUNS_FILE).write_text(json.dumps(runs, indent=2) + "\n")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._logger.log_metrics(dict(metrics), step)
        self._logger.save()

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        log_table = getattr(self._logger, "log_table", None)  # Lightning's for W&B has it, and one of your own may
        if log_table is not None and rows:
            # A conversation is one text; a row may lack what others have, such as pictures.
            shown = [{**row, "messages": transcript(row["messages"])} | self._shown(row) for row in rows]
            columns = [*dict.fromkeys(name for row in shown for name in row)]
            log_table("samples", columns, [[row.get(name) for name in columns] for row in shown], step=step)

    def log_config(self, config: Mapping[str, Any]) -> None:
        if not self._resumes:  # MLflow refuses other values; what changed is in `config.yaml` and was reported
            self._logger.log_hyperparams(dict(config))

    def log_graph(self, text: str) -> None:
        from lightning.fabric.loggers.tensorboard import TensorBoardLogger

        if self._resumes:
            return
        if self._wandb is not None:
            import wandb

            self._wandb_run.log({"graph": wandb.Html(f"<pre>{escape(text)}</pre>", inject=False)})
        elif isinstance(self._logger, TensorBoardLogger):
            self._logger.experiment.add_text("graph", f"```\n{text}\n```")

    def finalize(self, status: str) -> None:
        self._logger.finalize(status)
        if self._wandb is not None:  # Lightning leaves that to the end of the process
            self._wandb_run.finish(exit_code=int(status != "success"))

    def _shown(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The pictures of a sample, scaled down, as columns that W&B shows."""
        if self._wandb is None or self.pictures is None or "pictures" not in row:
            return {}
        import wandb

        found = dict[str, Any]()
        for number, picture in enumerate(self.pictures(row["row"])[:PICTURES_SHOWN], 1):
            image = picture.opened()
            image.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
            found[f"image {number}"] = wandb.Image(image, file_type="png")
        return found

    def _made(self, folder: Path) -> FabricLogger:
        """The logger, for a run in this folder."""
        return self._given


@dataclass(eq=False)
class WandbLogger(LightningLogger):
    """Logs to Weights & Biases: metrics, the config and a table of samples, by `trainer/global_step`.

    Its files are in the run's folder.

    Args:
        project: Name of the project.
        name: Name of the run; None for the name of the run's folder.
        entity: User or team; None for the login's default.
        mode: `offline` writes only to the run's folder; `wandb sync` can send the data later. `online` needs a login.
            None is as `WANDB_MODE` or W&B's settings say, else `online` with a login and `offline` without one.
    """

    project: str = "rlflow"
    name: str | None = None
    entity: str | None = None
    mode: Literal["online", "offline"] | None = None

    def __post_init__(self) -> None:
        require("wandb", "WandbLogger", "wandb")

    def _made(self, folder: Path) -> FabricLogger:
        import wandb
        from lightning.pytorch.loggers import WandbLogger as LightningWandbLogger

        mode = self.mode
        if mode is None and _lacks_a_key():
            mode = "offline"
            self.say(
                f"W&B has no key here, so this run is logged offline in {folder / 'wandb'}; `wandb login` before a run"
                " sends it, `wandb sync` sends it later"
            )
        return LightningWandbLogger(
            name=self.name or folder.name,
            save_dir=folder,
            project=self.project,
            entity=self.entity,
            mode=mode,  # its own `offline` would set an environment variable
            # Output is in the run's log already, and the code is the user's: neither is sent.
            settings=wandb.Settings(console="off", disable_code=True, silent=True),
        )


class TensorBoardLogger(LightningLogger):
    """Logs to TensorBoard, in `tensorboard/` of the run's folder: metrics as scalars, the config as hyperparameters."""

    def __init__(self) -> None:
        require("tensorboard", "TensorBoardLogger", "tensorboard")

    def _made(self, folder: Path) -> FabricLogger:
        from lightning.pytorch.loggers import TensorBoardLogger as LightningTensorBoardLogger

        return LightningTensorBoardLogger(folder, name="tensorboard", version="", default_hp_metric=False)


def _lacks_a_key() -> bool:
    """Whether W&B would ask for a key: no mode is set, and neither environment, netrc nor its settings have a key."""
    try:  # no public function of W&B looks a key up without the network
        from wandb.errors import AuthenticationError
        from wandb.sdk import wandb_setup
        from wandb.sdk.lib import wbauth
    except ImportError:  # in another version
        return False
    settings = wandb_setup.singleton().settings
    if os.environ.get("WANDB_MODE") or settings.mode != "online":
        return False
    try:
        found = wbauth.authenticate_session(host=settings.base_url, source="rlflow", prompt=False, update_session=False)
    except AuthenticationError:
        return False  # a key that is malformed: W&B says so when it starts
    return found is None


def _read_runs(folder: Path) -> dict[str, str | int | None]:
    """The ids of the loggers' runs that were started in a run's folder."""
    file = folder / RUNS_FILE
    try:
        return dict(json.loads(file.read_text())) if file.exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({one_line(error)}); remove it, and loggers begin new runs") from error


def _resume(logger: FabricLogger, run: Any, first_step: int) -> None:
    """Let a logger continue its run.

    Lightning's take an id in their constructors alone, so it is set where they have it.
    """
    from lightning.fabric.loggers.tensorboard import TensorBoardLogger
    from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

    if isinstance(logger, WandbLogger):
        logger._wandb_init["id"] = run
    elif isinstance(logger, MLFlowLogger):
        logger._run_id = run
    elif isinstance(logger, TensorBoardLogger):
        logger._version = run
        logger._kwargs.setdefault("purge_step", first_step)


@contextmanager
def _command_line_hidden() -> Iterator[None]:
    """A context in which W&B does not record the command line, which may hold a secret; the config has all of it."""
    given = sys.argv
    sys.argv = given[:1]
    try:
        yield
    finally:
        sys.argv = given
