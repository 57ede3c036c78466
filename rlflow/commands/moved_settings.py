"""Settings of algorithms that had another name, and how they are written now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlflow.config.arguments import arguments_of
from rlflow.config.classes import class_named
from rlflow.config.merging import ARGUMENTS, CLASS
from rlflow.errors import UserError
from rlflow.models.arguments import model_parameters
from rlflow.module import RLModule

SECTION = "module"
TRAINER = "trainer"
MOVED_OF_TRAINER = {"keep_checkpoints": "save_last"}

OF_THE_MODEL = (
    "model",
    "optimizer",
    "lora",
    "moe",
    "epochs",
    "samples_per_update",
    "gradient_checkpointing",
    "temperature",
)
MOVED = {name: f"actor.{name}" for name in OF_THE_MODEL} | {
    "actor_start_step": "actor.start_step",
    "reference_path": "reference",
    "critic_path": "critic.model",
    "critic_optimizer": "critic.optimizer",
    "critic_lora": "critic.lora",
    "critic_loss_aggregation": "critic.loss_aggregation",
    "teacher_path": "teacher",
    "reward_model_path": "reward_model",
    "clip_low": "clip.low",
    "clip_high": "clip.high",
    "dual_clip": "clip.dual",
    "kl_coef": "kl.coef",
    "kl_kind": "kl.kind",
    "kl_in_reward": "kl.in_reward",
    "kl_target": "kl.target",
    "kl_horizon": "kl.horizon",
}


def refuse_moved(tree: Mapping[str, Any]) -> None:
    """Refuse a config of before, and say how it is written now.

    Args:
        tree: Files and options merged.

    Raises:
        UserError: It has settings of these names, and the algorithm that it names has none such.
    """
    trainer = tree.get(TRAINER)
    for name, new in MOVED_OF_TRAINER.items():
        if isinstance(trainer, Mapping) and name in trainer:
            raise UserError(f"`{TRAINER}.{name}` is now `{TRAINER}.{new}`; write so, see docs/upgrade.md")
    section = tree.get(SECTION)
    written, path = (section.get(key) if isinstance(section, Mapping) else None for key in (ARGUMENTS, CLASS))
    if not isinstance(written, Mapping) or not isinstance(path, str):
        return
    try:
        cls = class_named(path, [RLModule])
    except UserError:  # reported where classes are looked for
        return
    known, models = arguments_of(cls), model_parameters(cls)
    trained = "actor" if "actor" in models or not models else next(iter(models))
    now = {
        name: MOVED[name].replace("actor.", f"{trained}.") for name in written if name in MOVED and name not in known
    }
    moved = {name: path for name, path in now.items() if path.split(".")[0] in known}
    if moved:
        before, new = (", ".join(f"`{name}`" for name in names) for names in (moved, moved.values()))
        are = "is" if len(moved) == 1 else "are"
        raise UserError(f"`{SECTION}.{ARGUMENTS}` has {before}, which {are} now {new}; write so, see docs/upgrade.md")
