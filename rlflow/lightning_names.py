"""Names of Lightning's trainer, modules and callbacks that rlflow's do not have, and what to write instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from rlflow.errors import UserError, did_you_mean

Class = TypeVar("Class", bound=type)
Given = ParamSpec("Given")
Result = TypeVar("Result")

_FEWER = "give fewer rows"
_ENDS = "a run ends by `max_steps`, `max_epochs`, `max_seconds` or a callback"
# Arguments of Lightning's `Trainer`.
TRAINER_ARGUMENTS = {
    "accumulate_grad_batches": "an update is `samples_per_update` of a model; memory is `token_budget` of the strategy",
    "barebones": "each part is switched off by an argument of its own",
    "benchmark": "set `torch.backends.cudnn.benchmark`",
    "check_val_every_n_epoch": "a run is counted in steps; give `val_check_interval`",
    "default_root_dir": "give `run_dir`",
    "detect_anomaly": "steps whose gradient is not finite are skipped; `rlflow replay` runs one of their nodes again",
    "deterministic": "call `torch.use_deterministic_algorithms`; `seed` decides what is random",
    "enable_autolog_hparams": "the whole configuration is always logged",
    "enable_checkpointing": "give `save_every_n_steps`, or leave it out for none",
    "enable_model_summary": "`rlflow graph` shows models and nodes",
    "enable_progress_bar": "a terminal shows a bar, and a file a line for each step",
    "gradient_clip_algorithm": "gradients are clipped by their norm, `gradient_clipping` of a model's `optimizer`",
    "gradient_clip_val": "give `gradient_clipping` of a model's `optimizer`",
    "inference_mode": "nodes that do not train never record gradients",
    "limit_predict_batches": _FEWER,
    "limit_test_batches": _FEWER,
    "limit_train_batches": "give `max_steps`, or fewer rows",
    "max_time": "give `max_seconds`, or the callback Timer, which counts resumed runs too",
    "min_epochs": _ENDS,
    "min_steps": _ENDS,
    "model_registry": "`rlflow export` makes a folder that can be uploaded",
    "num_sanity_val_steps": "a whole validation comes before the first step",
    "overfit_batches": "give few rows, such as `rows[:8]`",
    "plugins": "write a strategy of your own",
    "reload_dataloaders_every_n_epochs": "rows are read once; a `curriculum` or weights by step change what is drawn",
    "sync_batchnorm": "language models have no batch norms",
    "use_distributed_sampler": "rows are always divided over the ranks",
}
# Keys of Lightning's command line and configs, by the section that they are in.
_OWN_KEY = "it is a key of its own: `{0}`, not `trainer.{0}`"
CONFIG_KEYS = {
    "": {
        "ckpt_path": "give `trainer.ckpt_path` to resume; other commands read a model, `--module.actor RUN`",
        "lr_scheduler": "give `schedule` of a model's optimizer, such as `module.actor.optimizer.schedule`",
        "model": "the algorithm is `module`, and its models are arguments of it, such as `module.actor`",
        "optimizer": "give `optimizer` of a model, such as `module.actor.optimizer`",
        "seed_everything": "give `seed`",
    },
    "trainer": TRAINER_ARGUMENTS | {name: _OWN_KEY.format(name) for name in ("callbacks", "logger", "strategy")},
}
_TRAIN, _VALIDATION, _PROMPTS = (
    f"rows or a LightningDataModule are the second argument, `{name}`" for name in ("train", "validation", "prompts")
)
_MODEL = "the algorithm is the first argument, `module`; rows are the second, `{}`"
_WEIGHTS_ONLY = "leave it out; how a checkpoint is read is not a setting"
_RUN_S_MODEL = "set the module's `model` to the folder of the run"
# Arguments of the methods of Lightning's `Trainer`.
METHOD_ARGUMENTS = {
    "fit": {
        "model": _MODEL.format("train"),
        "train_dataloaders": _TRAIN,
        "val_dataloaders": "rows to validate on are the third argument, `validation`",
        "datamodule": _TRAIN,
        "ckpt_path": "it is an argument of `Trainer`",
        "weights_only": _WEIGHTS_ONLY,
    },
    "validate": {
        "model": _MODEL.format("validation"),
        "dataloaders": _VALIDATION,
        "datamodule": _VALIDATION,
        "ckpt_path": _RUN_S_MODEL,
        "verbose": "leave it out; metrics are always printed",
        "weights_only": _WEIGHTS_ONLY,
    },
    "predict": {
        "model": _MODEL.format("prompts"),
        "dataloaders": _PROMPTS,
        "datamodule": _PROMPTS,
        "ckpt_path": _RUN_S_MODEL,
        "return_predictions": "responses are in `<run_dir>-predict/responses.jsonl`",
        "weights_only": _WEIGHTS_ONLY,
    },
}
METHOD_ARGUMENTS["test"] = METHOD_ARGUMENTS["validate"]
# Methods of Lightning's modules that rlflow does not call, with the beginnings of its hooks' names.
MODULE_HOOKS = ("on_train_", "on_validation_", "on_test_", "on_predict_", "on_fit_", "on_before_", "on_after_")
MODULE_METHODS = {
    "training_step": 'write a node `@node(role="actor", type="train")` that returns the loss of each token',
    "test_step": "`Trainer.test` scores with the module's reward",
    "predict_step": "`Trainer.predict` generates by itself",
    "train_dataloader": "give the rows to `Trainer.fit`",
    "val_dataloader": "give the rows to `Trainer.fit`",
    "configure_callbacks": "give them to the `Trainer`",
    "configure_model": "models are the module's attributes, such as `self.actor = CausalLM(...)` in `__init__`",
    "configure_gradient_clipping": "set `gradient_clipping` of a model's `optimizer`",
    "prepare_data": "prepare the rows before the run, and give them to `Trainer.fit`",
    "setup": "do it in `__init__`, or in `on_fit_start` of a `Callback`",
    "teardown": "do it in `on_fit_end` of a `Callback`",
    "optimizer_step": "updates are made by the strategy; set `optimizer`, or write `configure_optimizers`",
    "lr_scheduler_step": "schedulers go by their number of updates; set `optimizer`, or write `configure_optimizers`",
}
# Hooks of Lightning's callbacks that are not called, and what is.
CALLBACK_HOOKS = {
    "setup": "on_fit_start",
    "teardown": "on_fit_end",
    "on_train_start": "on_fit_start",
    "on_train_end": "on_fit_end",
    "on_train_batch_start": "on_task_start",
    "on_train_batch_end": "on_step_end",
    "on_train_epoch_end": "on_step_end",
    "on_validation_epoch_end": "on_validation_end",
    "on_save_checkpoint": "state_dict",
    "on_load_checkpoint": "load_state_dict",
}


def with_known_arguments(cls: Class) -> Class:
    """The trainer's class, whose constructor and methods refuse arguments of Lightning's and name what to give instead.

    Raises:
        UserError: By the constructor, `fit`, `validate`, `test` or `predict`; it was given another argument.
    """
    cls.__init__ = _answering(cls.__init__, cls.__name__, TRAINER_ARGUMENTS)  # type: ignore[misc]
    for method, answers in METHOD_ARGUMENTS.items():
        setattr(cls, method, _answering(getattr(cls, method), f"{cls.__name__}.{method}", answers))
    return cls


def _answering(call: Callable[Given, Result], name: str, answers: Mapping[str, str]) -> Callable[Given, Result]:
    known = inspect.signature(call).parameters

    @functools.wraps(call)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        for argument in kwargs:
            if argument not in known:
                hint = instead_of(argument, answers) or did_you_mean(argument, known)
                raise UserError(f"{name} has no argument `{argument}`.{hint}")
        return call(*args, **kwargs)

    return called


def instead_of(argument: str, answers: Mapping[str, str]) -> str:
    """Advice for an argument or key of Lightning's, after a space; empty for others."""
    text = answers.get(argument, "")
    return f" {text[:1].upper()}{text[1:]}" if text else ""
