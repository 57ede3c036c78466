"""Every mistake of a user's ends in one line that names the key or the row, the value, and what to do; exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralConfig, PhiConfig, PretrainedConfig, Qwen2MoeConfig, Qwen3_5TextConfig

from rlflow.cli import main
from rlflow.models.scoring import ScoringModel
from rlflow.models.tiny import tiny_tokenizer
from tests.own_folder import REMOVED, make, rewarded_by, write


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())  # `main` puts the folder there
    for name in ("my_algorithm", "my_rewards", "broken_algorithm", "leaving_algorithm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def refusal(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the command ends in."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    errors = capfd.readouterr().err
    assert ended.value.code == 2, errors
    (line,) = (line for line in errors.split("\n") if line and "\r" not in line)  # transformers' bar has \r
    assert line.startswith("rlflow: error: "), errors
    return line.removeprefix("rlflow: error: ")


BEFORE_ANY_MODEL: list[tuple[str, dict[str, Any], str]] = [
    ("a misspelt section", {"modle": 3}, '`modle` (3) is no known key. Did you mean "module"?'),
    (
        "a misspelt key",
        {"trainer.max_step": 3},
        '`trainer.max_step` (3) is no known key. Did you mean "max_steps"?',
    ),
    (
        "a misspelt argument of a class",
        {"module.init_args.group_sise": 3},
        '`module.init_args.group_sise` (3) is no known key. Did you mean "group_size"?',
    ),
    (
        "a misspelt argument of a class within a class",
        {"module.init_args.reward.init_args": {"anwser": "a"}},
        "`module.init_args.reward.init_args.anwser` ('a') is no known key. Did you mean \"answer\"?",
    ),
    (
        "a misspelt argument in a list",
        {"callbacks": [{"class_path": "rlflow.callbacks.EarlyStopping", "init_args": {"monitr": "x"}}]},
        "`callbacks.0.init_args.monitr` ('x') is no known key. Did you mean \"monitor\"?",
    ),
    (
        "a misspelt field",
        {"module.init_args.optimizer": {"weight_decai": 0.1}},
        '`module.init_args.optimizer.weight_decai` (0.1) is no known key. Did you mean "weight_decay"?',
    ),
    (
        "a key like none",
        {"seeds_of_everything": 1},
        "`seeds_of_everything` (1) is no known key. Known here: callbacks, config, data, ",
    ),
    ("a text for an integer", {"trainer.devices": "two"}, "`trainer.devices` is 'two'; give an integer"),
    (
        "a text for a number",
        {"module.init_args.optimizer": {"lr": "fast"}},
        "`module.init_args.optimizer.lr` is 'fast'; give a number",
    ),
    ("a fraction for an integer", {"data.prompts_per_step": 3.5}, "`data.prompts_per_step` is 3.5; give an integer"),
    (
        "none of the choices",
        {"trainer.accelerator": "gpu"},
        "`trainer.accelerator` is 'gpu'; give one of 'auto', 'cpu',",
    ),
    (
        "none of the numbers",
        {"strategy": {"class_path": "rlflow.strategies.DeepSpeedStrategy", "init_args": {"stage": 5}}},
        "`strategy.init_args.stage` is 5; give one of 0, 1, 2, 3",
    ),
    (
        "one entry for a list",
        {"logger": {"class_path": "rlflow.loggers.CSVLogger"}},
        "`logger` is {'class_path'",
    ),
    ("a section left out", {"data": REMOVED}, "`data.train` is missing; set it"),
    ("an argument left out", {"module.init_args.model": REMOVED}, "`module.init_args.model` is missing; set it"),
    (
        "nothing to learn from",
        {"module.init_args.reward": REMOVED},
        "`module.init_args.reward` is not set, and GRPO learns from scores; name one, such as",
    ),
    (
        "a reference that would not be loaded",
        {"module.init_args.reference_path": "tiny"},
        "`module.init_args.reference_path` is 'tiny' and `module.init_args.kl_coef` is 0, so the reference would not be"
        " loaded;",
    ),
    (
        "an estimator that does not exist",
        {"module.init_args.kl_kind": "k4"},
        "`module.init_args.kl_kind` is 'k4'; give one of 'k1', 'k2', 'k3', 'abs', 'k3+'",
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
        {"module.init_args.kl_target": 0.1, "module.init_args.kl_coef": 0.1},
        "`module.init_args.kl_target` is 0.1, and adapts KL in the reward; set `module.init_args.kl_in_reward` to true",
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
        "`module.init_args.overlong_buffer` is 100; give a whole number of tokens from 1 to `max_response_length`, 4,",
    ),
    (
        "a coefficient of 0 that is to adapt",
        {"module.init_args.kl_target": 0.1, "module.init_args.kl_in_reward": True},
        "`module.init_args.kl_target` is 0.1 and `module.init_args.kl_coef` is 0.0, which is adapted by",
    ),
    (
        "no horizon",
        {"module.init_args.kl_horizon": 0.0},
        "`module.init_args.kl_horizon` is 0.0; it is a number of samples above 0",
    ),
    (
        "negative importance weights",
        {"module.init_args.importance": {"low": -2.0, "high": -1.0}},
        "importance `module.init_args.importance.low` is -2.0, and weights are ratios of probabilities; give 0 or more",
    ),
    (
        "a weight of no reward model",
        {"module.init_args.reward_model_coef": 0.5},
        "`module.init_args.reward_model_coef` is 0.5 without a reward model; set `module.init_args.reward_model_path`",
    ),
    (
        "a negative value clip",
        {"module.class_path": "rlflow.algorithms.PPO", "module.init_args.value_clip": -1.0},
        "`module.init_args.value_clip` is -1.0; give more than 0, or null for none",
    ),
    (
        "an actor that starts before the run",
        {"module.class_path": "rlflow.algorithms.PPO", "module.init_args.actor_start_step": -5},
        "`module.init_args.actor_start_step` is -5; give 0 or more",
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
            "module.init_args.teacher_path": "tiny",
            "module.init_args.kl_in_reward": True,
        },
        "`module.init_args.kl_in_reward` is True, which OnPolicyDistillation has no use for; leave it out",
    ),
    (
        "a sampling temperature of 0",
        {"module.init_args.temperature": 0.0},
        "`module.init_args.temperature` is 0.0; it divides the logits, so give more than 0",
    ),
    (
        "a setting that the algorithm does not use",
        {"module.class_path": "rlflow.algorithms.GSPO", "module.init_args.dual_clip": 3.0},
        "`module.init_args.dual_clip` is 3.0, which GSPO has no use for; leave it out",
    ),
    (
        "an infinite learning rate",
        {"module.init_args.optimizer": {"lr": float("inf")}},
        "`module.init_args.optimizer.lr` is inf; give at most 1000",
    ),
    (
        "a learning rate that is no number",
        {"module.init_args.optimizer": {"lr": float("nan")}},
        "`module.init_args.optimizer.lr` is nan; give 0 or more",
    ),
    (
        "a learning rate that no weight outlives",
        {"module.init_args.optimizer": {"lr": 1e38}},
        "`module.init_args.optimizer.lr` is 1e+38; give at most 1000",
    ),
    (
        "an infinite limit of the gradient",
        {"module.init_args.optimizer": {"gradient_clipping": float("inf")}},
        "`module.init_args.optimizer.gradient_clipping` is inf; give at most 1e+09, or 0 for no limit",
    ),
    (
        "an infinite temperature",
        {"module.init_args.temperature": float("inf")},
        "`module.init_args.temperature` is inf",
    ),
    ("one checkpoint", {"trainer.keep_checkpoints": 1}, "`trainer.keep_checkpoints` is 1; give 2 or more: the last"),
    ("a negative seed", {"seed": -1}, "`seed` is -1; give a number from 0 to 4,294,967,295"),
    ("a seed of 40 bits", {"seed": 2**40}, "`seed` is 1099511627776; give a number from 0 to 4,294,967,295"),
    ("a run without a folder", {"trainer.run_dir": ""}, "`trainer.run_dir` is ''; name a folder, such as runs/mine"),
    (
        "a secret under an unknown key",
        {"trainer.wandb_api_key": "opensesame"},
        "`trainer.wandb_api_key` (***) is no known key",
    ),
    (
        "a module that ends the process",
        {"module.class_path": "leaving_algorithm.GRPO"},
        "rank 0 called `sys.exit(0)` (before its first step), before the run came to its end; raise an error in its",
    ),
    ("no devices", {"trainer.devices": 0}, "`trainer.devices` is 0; give 1 or more"),
    ("less than no time", {"trainer.max_seconds": -1.0}, "`trainer.max_seconds` is -1.0; give more than 0"),
    ("a bucket of nothing", {"trainer.sync_bucket_bytes": 0}, "`trainer.sync_bucket_bytes` is 0; give 1 or more"),
    ("a group of one", {"module.init_args.group_size": 1}, "`module.init_args.group_size` is 1; group-relative"),
    (
        "a rejected response without a chosen one",
        {"data.rejected": "answer"},
        "`data.rejected` is 'answer' without `data.response`, the column of the response that was chosen; set both",
    ),
    (
        "pairs without a rejected side",
        {"module": {"class_path": "rlflow.algorithms.DPO", "init_args": {"model": "tiny"}}, "data.response": "answer"},
        "DPO reads `batch` as Pairs, and these are pairs without a rejected side: `data.rejected` is null",
    ),
    ("no prompts", {"data.prompts_per_step": 0}, "`data.prompts_per_step` is 0; a step needs at least 1 prompt"),
    ("prompts of no tokens", {"data.max_prompt_length": 0}, "`data.max_prompt_length` is 0; it counts tokens"),
    (
        "responses of no tokens",
        {"module.init_args.max_response_length": 0},
        "`module.init_args.max_response_length` is 0; give 1 or more",
    ),
    (
        "a negative clip range",
        {"module.init_args.clip_low": -0.1},
        "`module.init_args.clip_low` is -0.1 and `module.init_args.clip_high` is 0.2; give both 0 or more",
    ),
    (
        "a negative learning rate",
        {"module.init_args.optimizer": {"lr": -1.0}},
        "`module.init_args.optimizer.lr` is -1.0; give 0 or more",
    ),
    (
        "engines that do not divide the ranks",
        {"rollout": {"class_path": "rlflow.rollout.VLLMEngine", "init_args": {"tensor_parallel_size": 3}}},
        "`rollout.init_args.tensor_parallel_size` is 3, which does not divide the 1 ranks",
    ),
    (
        "an optimizer of whole matrices where ranks divide them",
        {"strategy": "fsdp", "module.init_args.optimizer": {"name": "torch.optim.Adafactor"}},
        "`module.init_args.optimizer.name` is 'torch.optim.Adafactor', which steps a matrix otherwise than its parts",
    ),
    (
        "more ranks to a copy than there are",
        {"strategy": {"class_path": "fsdp", "init_args": {"within": 2}}},
        "`strategy.init_args.within` is 2, and roles live on 1 ranks; give 1 or less",
    ),
    (
        "a misspelt short name",
        {"strategy": "fspd"},
        '`strategy` names the class fspd, which is not known without its module. Did you mean "fsdp"?',
    ),
    ("ranks for one process", {"trainer.devices": 2}, "`trainer.devices` is 2; SingleProcess runs 1."),
    (
        "a misspelt class",
        {"module.class_path": "rlflow.algorithms.GRP0"},
        'names the class rlflow.algorithms.GRP0, but rlflow.algorithms has no GRP0. Did you mean "GRPO"?',
    ),
    (
        "a misspelt class within a class",
        {"module.init_args.reward.class_path": "rlflow.rewards.ExactMatsh"},
        "`module.init_args.reward` names the class rlflow.rewards.ExactMatsh, but rlflow.rewards has no ExactMatsh."
        ' Did you mean "ExactMatch"?',
    ),
    (
        "a misspelt module",
        {"module.class_path": "my_algoritm.ShortGRPO"},
        "`module` names the class my_algoritm.ShortGRPO, but there is no module my_algoritm."
        ' Did you mean "my_algorithm"?',
    ),
    (
        "a misspelt short class",
        {"module.class_path": "GRP"},
        '`module` names the class GRP, which is not known without its module. Did you mean "GRPO"?',
    ),
    (
        "a module that cannot be imported",
        {"module.class_path": "broken_algorithm.GRPO"},
        "`module` names the class broken_algorithm.GRPO, which cannot be imported (No module named"
        " 'a_module_that_nobody_has'); mend its module",
    ),
    (
        "a class of another kind",
        {"data.train.class_path": "rlflow.rewards.ExactMatch"},
        "`data.train` names the class rlflow.rewards.ExactMatch, which is no Source; name one that is",
    ),
    (
        "arguments without a class",
        {"module": {"model": "tiny"}},
        "`module.model` ('tiny') is no key of its own; write `class_path: module.Class`",
    ),
    (
        "a misspelt function",
        rewarded_by("rases"),
        "`module.init_args.reward.init_args.function` 'my_rewards.rases': my_rewards has no function 'rases'."
        ' Did you mean "raises"?',
    ),
    (
        "a cycle",
        {"module.class_path": "my_algorithm.Cyclic"},
        "`advantages` waits for itself: `advantages` -> `rewards` -> `advantages`. Break the cycle",
    ),
    (
        "a missing input",
        {"module.class_path": "my_algorithm.WithoutInput"},
        'my_algorithm.py:23: `advantages` reads `rewrads`, which no node makes. Did you mean "rewards"?',
    ),
    (
        "an unknown role",
        {"module.class_path": "my_algorithm.WithoutRole", "module.init_args.kl_coef": 0.1},
        "`ref_logprobs` has role 'actr', which names no model handle of the module. Did you mean \"actor\"?",
    ),
    (
        "a missing model",
        {"module.init_args.model": "nowhere"},
        "`module.init_args.model` is 'nowhere', which is neither a folder nor a Hugging Face name; give",
    ),
    (
        "a missing critic",
        {"module.class_path": "rlflow.algorithms.PPO", "module.init_args.critic_path": "nowhere"},
        "`module.init_args.critic_path` is 'nowhere', which is neither a folder nor a Hugging Face name; give",
    ),
    (
        "a model folder that is none",
        {"module.init_args.model": "not_a_model"},
        "`module.init_args.model` is 'not_a_model', which has no config.json; give a model's folder",
    ),
    (
        "a missing dataset",
        {"data.train.init_args.path": "nowhere.jsonl"},
        "check `data.train.init_args.path`",
    ),
    (
        "a line that is not JSON",
        {"data.train.init_args.path": "not_json.jsonl"},
        "not_json.jsonl, line 2 is not JSON (Expecting ',' delimiter: line 1 column 15 (char 14)):"
        """ '{"question": 1+1='; mend or remove the line""",
    ),
    ("an empty dataset", {"data.train.init_args.path": "empty.jsonl"}, "empty.jsonl has no rows, so there is nothing"),
    (
        "no prompt column",
        {"data.prompt": "qestion"},
        'rows.jsonl, line 1 has no column `qestion`; columns found: question, answer. Did you mean "question"?',
    ),
    (
        "fewer rows than a step draws",
        {"data.prompts_per_step": 9},
        "rows.jsonl has 8 rows, fewer than `data.prompts_per_step` 9; lower it to at most 8",
    ),
    (
        "a prompt too long",
        {"data.max_prompt_length": 3},
        "8 of 8 rows exceed `data.max_prompt_length` 3 tokens, the first of them rows.jsonl, line 1; the",
    ),
    (
        "a prompt and a response beyond the model",
        {"module.init_args.max_response_length": 2045},
        "`actor` reads a prompt of 4 tokens and a response of up to 2045, 2049 tokens, and its model takes 2048"
        " (`max_position_embeddings` of its config.json); lower `data.max_prompt_length` or"
        " `module.init_args.max_response_length`, or take",
    ),
    (
        "a row beyond the model",
        {
            "module": {"class_path": "rlflow.algorithms.SFT", "init_args": {"model": "tiny"}},
            "data.train.init_args.path": "long.jsonl",
            "data.prompts_per_step": 1,
            "data.response": "answer",
        },
        "`actor` reads the longest row of the data, 2050 tokens, and its model takes 2048",
    ),
    (
        "a prompt and a response beyond the engine",
        {"rollout": {"class_path": "rlflow.rollout.VLLMEngine", "init_args": {"max_model_len": 7}}},
        "`rollout.init_args.max_model_len` is 7, and the longest prompt of 4 tokens and a response of up to 4 need 8;"
        " raise it, or lower `data.max_prompt_length` or `module.init_args.max_response_length`",
    ),
    (
        "an engine beyond the model",
        {"rollout": {"class_path": "rlflow.rollout.VLLMEngine", "init_args": {"max_model_len": 2049}}},
        "`rollout.init_args.max_model_len` is 2049, and the model takes 2048 tokens; lower it, or leave it out",
    ),
    (
        "a cache of keys and values that is too small",  # two blocks of 32 tokens of 1 KiB
        {"rollout": {"class_path": "rlflow.rollout.VLLMEngine", "init_args": {"kv_cache_gib": 6e-5}}},
        "`rollout.init_args.kv_cache_gib` is 6e-05, and the longest prompt of 4 tokens and a response of up to 4 need"
        " 6.1e-05 GiB; raise it",
    ),
    (
        "blocks that the CPU does not take",
        {"rollout": {"class_path": "rlflow.rollout.VLLMEngine", "init_args": {"block_size": 48}}},
        "`rollout.init_args.block_size` is 48, and vLLM's attention on the CPU takes multiples of 32",
    ),
    (
        "fewer tokens at once than responses",
        {"rollout": {"class_path": "rlflow.rollout.VLLMEngine", "init_args": {"max_num_batched_tokens": 255}}},
        "`rollout.init_args.max_num_batched_tokens` is 255, and as many as `rollout.init_args.max_num_seqs`, 256,",
    ),
    (
        "an engine of a policy that does not generate",
        {"engines": {"actr": {"class_path": "rlflow.rollout.TransformersEngine"}}},
        "`engines.actr` names 'actr', which is no policy that generates; those are actor. Did you mean \"actor\"?",
    ),
    (
        "a policy that shares its own engine",
        {"engines": {"actor": {"share": "actor"}}},
        "`engines.actor.share` is 'actor', the policy itself; name the policy whose engine it shall use",
    ),
    (
        "a way to share that is none",
        {"engines": {"actor": {"share": "opponent", "by": "turn"}}},
        "`engines.actor.by` is 'turn'; give one of 'turns', 'adapters'",
    ),
    (
        "a role that is not there",
        {"placement": {"actr": 0}},
        "`placement.actr` names no role of GRPO; its roles are rollout, actor.rollout, actor, reference.",
    ),
    (
        "a rank that is not there",
        {"placement": {"actor": "0-3"}},
        "`placement.actor` names the ranks 0-3, and the run has the ranks 0 to 0 (trainer.devices x trainer.num_nodes)",
    ),
    ("a role without ranks", {"placement": {"actor": []}}, "`placement.actor` names no ranks; name some, or leave"),
    (
        "sequences among more ranks than there are",
        {"placement": {"actor": {"sequence_parallel_size": 2}}},
        "`placement.actor.sequence_parallel_size` is 2, which does not divide the 1 ranks of `actor`; use one of [1]",
    ),
    (
        "heads that do not divide",
        {"trainer.devices": 3, "placement": {"actor": {"sequence_parallel_size": 3}}},
        "the sequence-parallel size of `actor` is 3, and its model has 4 attention heads",
    ),
    (
        "an engine across a border",
        {
            "trainer.devices": 3,
            "rollout": {"class_path": "rlflow.rollout.VLLMEngine", "init_args": {"tensor_parallel_size": 2}},
            "placement": {"rollout": "0-1", "actor": "1-2"},
        },
        "`placement` tears a rollout engine apart: ranks 0-1 share one (`rollout.init_args.tensor_parallel_size` 2),"
        " and of these only rank 1 hold `actor`; place",
    ),
    (
        "staleness where ranks do both",
        {"trainer.max_staleness": 1},
        "`trainer.max_staleness` is set and `rollout` cannot run ahead of training: rank 0 would both generate and"
        " train; place `rollout` and the trained roles on ranks of their own under `placement`",
    ),
    (
        "parts of two rollouts",
        {"module.class_path": "rlflow.algorithms.ReMax", "trainer.partial_rollout": 2},
        "`trainer.partial_rollout` is set, and `rollout` and `greedy` would have to wait for one another; leave it out",
    ),
    (
        "epochs of parts",
        {"trainer.partial_rollout": 2, "trainer.max_epochs": 2},
        "`trainer.max_epochs` is 2, and `trainer.partial_rollout` draws as many prompts as it needs, so passes over",
    ),
    ("parts of nothing", {"trainer.partial_rollout": 0}, "`trainer.partial_rollout` is 0; give 1 or more"),
    ("staleness below 0", {"trainer.max_staleness": -1}, "`trainer.max_staleness` is -1; give 0 or more steps"),
    ("no end", {"trainer.max_steps": REMOVED}, "neither `trainer.max_steps` nor `trainer.max_epochs` is set"),
    (
        "epochs where a filter draws",
        {"module.class_path": "rlflow.algorithms.DAPO", "trainer.max_epochs": 2},
        "`trainer.max_epochs` is 2, and the filter `useful` draws as many prompts as it needs, so passes over the rows"
        " do not say how many steps there are; set `trainer.max_steps` instead",
    ),
    (
        "no draws for a filter",
        {"module.class_path": "rlflow.algorithms.DAPO", "module.init_args.max_draws": 0},
        "`module.init_args.max_draws` is 0; give 1 or more",
    ),
]


@pytest.mark.parametrize(
    ("changes", "line"), [case[1:] for case in BEFORE_ANY_MODEL], ids=[c[0] for c in BEFORE_ANY_MODEL]
)
def test_a_wrong_config_is_refused_in_one_line_before_a_model_is_loaded(
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    line: str,
) -> None:
    write(folder / "my.yaml", changes)
    loaded: list[Path] = []
    monkeypatch.setattr(ScoringModel, "load", lambda path, *_: loaded.append(path))
    assert line in refusal(capfd, "fit", "--config", "my.yaml")
    assert loaded == []


@pytest.mark.parametrize(
    ("config", "rollout", "line"),
    [
        (
            Qwen3_5TextConfig(),
            "TransformersEngine",
            "`module.init_args.model` is of the type 'qwen3_5_text': it carries a state from",
        ),
        (PhiConfig(), "TransformersEngine", "`module.init_args.model` is of the type 'phi': it has a bias"),
        (
            MixtralConfig(intermediate_size=100),
            "VLLMEngine",
            "`rollout` is VLLMEngine, and the model, of the type 'mixtral', has experts whose size",
        ),
        (
            Qwen2MoeConfig(),
            "VLLMEngine",
            "`rollout` is VLLMEngine, and the model, of the type 'qwen2_moe', is a mixture of",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_family_that_cannot_be_trained_is_refused_in_one_line_though_its_weights_are_not_there(
    folder: Path, capfd: pytest.CaptureFixture[str], config: PretrainedConfig, rollout: str, line: str
) -> None:
    config.save_pretrained(folder / "family")
    tiny_tokenizer().save_pretrained(folder / "family")
    engine = {"class_path": f"rlflow.rollout.{rollout}"}
    write(folder / "my.yaml", {"module.init_args.model": str(folder / "family"), "rollout": engine})
    capfd.readouterr()
    assert line in refusal(capfd, "fit", "--config", "my.yaml")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--trainer.max_step", "3"], '`trainer.max_step` (3) is no known key. Did you mean "max_steps"?'),
        (["--trainer.max_step=3"], '`trainer.max_step` (3) is no known key. Did you mean "max_steps"?'),
        (["--sed", "3"], '`sed` (3) is no known key. Did you mean "seed"?'),
        (["--module.group_sise", "3"], '`module.group_sise` (3) is no known key. Did you mean "group_size"?'),
        (
            ["--module.init_args.optimizer.lrr", "3"],
            '`module.init_args.optimizer.lrr` (3) is no known key. Did you mean "lr"?',
        ),
        (["--trainer.devices", "many"], "`trainer.devices` is 'many'; give an integer"),
        (
            ["--trainer.balance", "of"],
            "`trainer.balance` is 'of'; give one of 'auto', 'off', or a mapping of arguments",
        ),
        (["--trainer.balance.quadratic", "x"], "`trainer.balance.quadratic` is 'x'; give a number"),
        (["--trainer.balance.quadratik", "1"], 'balance.quadratik` (null) is no known key. Did you mean "quadratic"?'),
        (["--trainer.balance.bytes_per_s", "0"], "`trainer.balance.bytes_per_s` is 0; give more than 0"),
        (["--module", "rlflow.algorithms.GRP0"], 'but rlflow.algorithms has no GRP0. Did you mean "GRPO"?'),
        (["stray"], "`stray` is neither an option nor a value of one; an option is `--key value`"),
        (["--seed"], "argument --seed: expected one argument"),
        (["--config", "nowhere.yaml"], "`--config` is 'nowhere.yaml', and there is no such file in "),
        (
            ["--config", "list.yaml"],
            "`--config` is 'list.yaml', which holds no `key: value` lines but ['seed']; mend it",
        ),
        (["--config", "torn.yaml"], "`--config` is 'torn.yaml', which is not YAML (while parsing a flow mapping"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(
    folder: Path, capfd: pytest.CaptureFixture[str], options: list[str], line: str
) -> None:
    assert line in refusal(capfd, "fit", "--config", "my.yaml", *options)


def test_an_option_is_named_where_a_file_has_the_same_key(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = "`trainer.max_steps` is 'late'; give an integer or null"
    assert line == refusal(capfd, "fit", "--config", "my.yaml", "--trainer.max_steps", "late")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["fti", "--config", "my.yaml"], "invalid choice: 'fti'"),
        (["--config", "my.yaml", "fit"], "write `rlflow COMMAND --config FILE`"),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(
    folder: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert line in refusal(capfd, *arguments)


def test_a_rank_that_the_graph_has_not_is_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = refusal(capfd, "graph", "--config", "my.yaml", "--rank", "7")
    assert line == "`--rank` is 7, but the config has the ranks 0 to 0; name one"


SHORT_ENGINE = """
from rlflow.rollout import TransformersEngine


class Short(TransformersEngine):
    def setup(self, *arguments, **place):
        super().setup(*arguments, **place)
        self._context = 7  # as vLLM's where little memory is left for its cache

    def generate(self, *arguments):
        raise AssertionError("the run has begun")
"""


def test_an_engine_whose_cache_is_too_short_is_refused_before_the_first_step(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "my_engine.py").write_text(SHORT_ENGINE)
    write(folder / "my.yaml", {"rollout": {"class_path": "my_engine.Short"}})
    line = refusal(capfd, "fit", "--config", "my.yaml")
    assert line.startswith("a prompt of 4 tokens and a response of up to 4 exceed the engine's context of 7 tokens;")
    assert "`module.init_args.max_response_length`" in line


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("raises", "KeyError: 'solution'"),
        ("nan", "ValueError: it returned nan"),
        ("returns_infinity_in_float32", "ValueError: it returned 1e+308, which float32 cannot hold"),
    ],
)
def test_a_reward_that_fails_is_told_with_its_sample(
    folder: Path, capfd: pytest.CaptureFixture[str], function: str, reason: str
) -> None:
    write(folder / "my.yaml", rewarded_by(function))
    line = refusal(capfd, "fit", "--config", "my.yaml")
    assert f"reward `my_rewards.{function}` failed on sample 0 with {reason} (response " in line
    assert "row {'question': " in line
    assert line.endswith("; mend it, or set `on_error: zero`")


def test_a_reward_that_calls_exit_is_told_with_its_rank_and_task(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(folder / "my.yaml", rewarded_by("exits"))
    line = refusal(capfd, "fit", "--config", "my.yaml")
    assert line.startswith("rank 0 called `sys.exit(0)` (step 1, run rewards: rank 0, ")


@pytest.mark.parametrize(
    ("option", "secret"),
    [
        ("--trainer.max_steps=sk-abcdefghijklmnop1234", "sk-abcdefghijklmnop1234"),
        ("--trainer.hf_tokn=hf_abcdefghijklmnop1234", "hf_abcdefghijklmnop1234"),
        ("--trainer.password=opensesame", "opensesame"),
        ("password=opensesame", "opensesame"),
    ],
)
def test_an_error_line_shows_no_secret(
    folder: Path, capfd: pytest.CaptureFixture[str], option: str, secret: str
) -> None:
    line = refusal(capfd, "fit", "--config", "my.yaml", option)
    assert secret not in line
    assert "***" in line
