"""A setting that cannot work ends in one line that names the key, the value, and what to do; exit code 2."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bad_input.refusal import Case, Refused, ids
from tests.own_folder import REMOVED

CASES: list[Case] = [
    (
        "nothing to learn from",
        {"module.init_args.reward": REMOVED},
        "`module.init_args.reward` is not set, and GRPO learns from scores; name one, such as",
    ),
    (
        "a reference that would not be loaded",
        {"module.init_args.reference": "tiny"},
        "`module.init_args.reference.model` is 'tiny' and `module.init_args.kl.coef` is 0, so it would not be loaded;",
    ),
    (
        "an estimator that does not exist",
        {"module.init_args.kl.kind": "k4"},
        "`module.init_args.kl.kind` is 'k4'; give one of 'k1', 'k2', 'k3', 'abs', 'k3+'",
    ),
    (
        "a loss aggregation that does not exist",
        {"module.init_args.loss_aggregation": "mean"},
        "`module.init_args.loss_aggregation` is 'mean'; give one of 'token-mean',",
    ),
    (
        "an importance level that does not exist",
        {"module.init_args.importance": {"level": "word"}},
        "`module.init_args.importance.level` is 'word'; give one of 'token', 'sequence', 'geometric'",
    ),
    (
        "a target of a KL that is not in the reward",
        {"module.init_args.kl.target": 0.1, "module.init_args.kl.coef": 0.1},
        "`module.init_args.kl.target` is 0.1, and adapts KL in the reward; set `module.init_args.kl.in_reward` to true",
    ),
    (
        "a treatment of cut responses that does not exist",
        {"module.class_path": "rlflow.algorithms.PPO", "module.init_args.on_truncation": "drop"},
        "`module.init_args.on_truncation` is 'drop'; give one of 'terminal', 'bootstrap', 'mask'",
    ),
    (
        "a discount above one",
        {"module.class_path": "rlflow.algorithms.PPO", "module.init_args.gamma": 1.5},
        "`module.init_args.gamma` is 1.5; give a number from 0 to 1",
    ),
    (
        "a penalty that begins before the first token",
        {"module.init_args.overlong_buffer": 100},
        "`module.init_args.overlong_buffer` is 100; give a whole number of tokens from 1 to"
        " `module.init_args.max_response_length`, 4,",
    ),
    (
        "a coefficient of 0 that is to adapt",
        {"module.init_args.kl.target": 0.1, "module.init_args.kl.in_reward": True},
        "`module.init_args.kl.target` is 0.1 and `module.init_args.kl.coef` is 0.0, which is adapted by",
    ),
    (
        "no horizon",
        {"module.init_args.kl.horizon": 0.0},
        "`module.init_args.kl.horizon` is 0.0, and `module.init_args.kl.coef` is adapted over that number of"
        " samples; give more than 0",
    ),
    (
        "negative importance weights",
        {"module.init_args.importance": {"low": -2.0, "high": -1.0}},
        "importance `module.init_args.importance.low` is -2.0, and weights are ratios of probabilities; give 0 or more",
    ),
    (
        "a weight of no reward model",
        {"module.init_args.reward_model_coef": 0.5},
        "`module.init_args.reward_model_coef` is 0.5 without a reward model; set `module.init_args.reward_model`",
    ),
    (
        "a negative value clip",
        {"module.class_path": "rlflow.algorithms.PPO", "module.init_args.value_clip": -1.0},
        "`module.init_args.value_clip` is -1.0; give more than 0, or null for none",
    ),
    (
        "an actor that starts before the run",
        {"module.class_path": "rlflow.algorithms.PPO", "module.init_args.actor.start_step": -5},
        "`module.init_args.actor.start_step` is -5; give the first step that trains, 0 or more",
    ),
    (
        "cut responses that are both left out and continued",
        {
            "module.class_path": "rlflow.algorithms.PPO",
            "module.init_args.mask_truncated": True,
            "module.init_args.on_truncation": "bootstrap",
        },
        "`module.init_args.on_truncation` is 'bootstrap' and `module.init_args.mask_truncated` is true, which leaves",
    ),
    (
        "KL in the reward of an algorithm without rewards",
        {
            "module.class_path": "rlflow.algorithms.OnPolicyDistillation",
            "module.init_args.teacher": "tiny",
            "module.init_args.kl.in_reward": True,
        },
        "`module.init_args.kl.in_reward` is true, and OnPolicyDistillation has no rewards to take it off; set",
    ),
    (
        "a sampling temperature of 0",
        {"module.init_args.actor.temperature": 0.0},
        "`module.init_args.actor.temperature` is 0.0; it divides the logits, so give a number from 0.0001 to",
    ),
    (
        "a setting that the algorithm does not use",
        {"module.class_path": "rlflow.algorithms.GSPO", "module.init_args.clip.dual": 3.0},
        "`module.init_args.clip.dual` (3.0) is not a known key. Known here: high, low",
    ),
    (
        "an infinite learning rate",
        {"module.init_args.actor.optimizer": {"lr": float("inf")}},
        "`module.init_args.actor.optimizer.lr` is inf; give at most 1000",
    ),
    (
        "a learning rate that is not a number",
        {"module.init_args.actor.optimizer": {"lr": float("nan")}},
        "`module.init_args.actor.optimizer.lr` is nan; give 0 or more",
    ),
    (
        "a learning rate that no weight outlives",
        {"module.init_args.actor.optimizer": {"lr": 1e38}},
        "`module.init_args.actor.optimizer.lr` is 1e+38; give at most 1000",
    ),
    (
        "an infinite limit of the gradient",
        {"module.init_args.actor.optimizer": {"gradient_clipping": float("inf")}},
        "`module.init_args.actor.optimizer.gradient_clipping` is inf; give at most 1e+09, or 0 for no limit",
    ),
    (
        "an infinite temperature",
        {"module.init_args.actor.temperature": float("inf")},
        "`module.init_args.actor.temperature` is inf",
    ),
    ("one checkpoint", {"trainer.save_last": 1}, "`trainer.save_last` is 1; give 2 or more: the last"),
    ("a negative seed", {"seed": -1}, "`seed` is -1; give a number from 0 to 4,294,967,295"),
    ("a seed of 40 bits", {"seed": 2**40}, "`seed` is 1099511627776; give a number from 0 to 4,294,967,295"),
    (
        "machines for one process",
        {"trainer.num_nodes": 2},
        "`trainer.num_nodes` is 2; SingleProcess runs on 1. For more use `strategy: deepspeed`",
    ),
    ("devices that no machine has", {"trainer.devices": 10**6}, "`trainer.devices` is 1000000; give at most 1,024"),
    (
        "a time that never ends",
        {"strategy": {"class_path": "deepspeed", "init_args": {"timeout_s": float("inf")}}},
        "`strategy.init_args.timeout_s` is inf; give a number of seconds from 1 to 1e+09",
    ),
    (
        "a folder that is a file",
        {"trainer.run_dir": "rows.jsonl"},
        "`trainer.run_dir` is 'rows.jsonl', which is a file; name a folder",
    ),
    (
        "a folder below a file",
        {"trainer.run_dir": "rows.jsonl/own"},
        "`trainer.run_dir` is 'rows.jsonl/own', which cannot be made (Not a directory); name",
    ),
    ("the folder itself", {"trainer.run_dir": "."}, "`trainer.run_dir` is '.'; name a folder, such as runs/mine"),
    ("a run without a folder", {"trainer.run_dir": ""}, "`trainer.run_dir` is ''; name a folder, such as runs/mine"),
    ("no devices", {"trainer.devices": 0}, "`trainer.devices` is 0; give 1 or more"),
    ("less than no time", {"trainer.max_seconds": -1.0}, "`trainer.max_seconds` is -1.0; give more than 0"),
    ("a bucket of nothing", {"trainer.sync_bucket_bytes": 0}, "`trainer.sync_bucket_bytes` is 0; give 1 or more"),
    ("a group of one", {"module.init_args.group_size": 1}, "`module.init_args.group_size` is 1; group-relative"),
    ("no prompts", {"data.prompts_per_step": 0}, "`data.prompts_per_step` is 0; a step needs at least 1 prompt"),
    ("prompts of no tokens", {"data.max_prompt_length": 0}, "`data.max_prompt_length` is 0; it counts tokens"),
    (
        "responses of no tokens",
        {"module.init_args.max_response_length": 0},
        "`module.init_args.max_response_length` is 0; give 1 or more",
    ),
    (
        "a negative clip range",
        {"module.init_args.clip.low": -0.1},
        "`module.init_args.clip.low` is -0.1 and `module.init_args.clip.high` is 0.2; give both 0 or more",
    ),
    (
        "a negative learning rate",
        {"module.init_args.actor.optimizer": {"lr": -1.0}},
        "`module.init_args.actor.optimizer.lr` is -1.0; give 0 or more",
    ),
    (
        "an optimizer of whole matrices where ranks divide them",
        {"strategy": "fsdp", "module.init_args.actor.optimizer": {"name": "torch.optim.Adafactor"}},
        "`module.init_args.actor.optimizer.name` is 'torch.optim.Adafactor', whose step for a matrix differs from the",
    ),
]


@pytest.mark.parametrize(("changes", "line"), [case[1:] for case in CASES], ids=ids(CASES))
def test_a_wrong_setting_is_refused_in_one_line_before_a_model_is_loaded(
    refused: Refused,
    changes: dict[str, Any],
    line: str,
) -> None:
    assert line in refused(changes)
