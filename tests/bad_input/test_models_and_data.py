"""Models, data and rewards that cannot work end in one line that names the key or the row; exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
import transformers
from transformers import LlamaConfig, MambaConfig, MixtralConfig, PhiConfig, PretrainedConfig, Qwen2MoeConfig

from rlflow.models.tiny import tiny_tokenizer, write_tiny_model
from rlflow.run.pretrained import load_tokenizer, stop_tokens
from tests.bad_input.refusal import Case, Refused, ids, refusal
from tests.own_folder import rewarded_by, write

CASES: list[Case] = [
    (
        "a rejected response that nobody reads",
        {"data.rejected": "answer"},
        "`data.rejected` is 'answer', and GRPO reads `batch` as Batch, whose rows have one response",
    ),
    (
        "pairs without a rejected side",
        {"module": {"class_path": "rlflow.algorithms.DPO", "init_args": {"actor": "tiny"}}, "data.response": "answer"},
        "rows.jsonl, line 1 has no column `rejected`; columns found: question, answer. Name the",
    ),
    (
        "a cycle",
        {"module.class_path": "my_algorithm.Cyclic"},
        "`advantages` waits for itself: `advantages` -> `rewards` -> `advantages`. Break the cycle",
    ),
    (
        "a missing input",
        {"module.class_path": "my_algorithm.WithoutInput"},
        'my_algorithm.py:24: `advantages` reads `rewrads`, which no node makes. Did you mean "rewards"?',
    ),
    (
        "an unknown role",
        {"module.class_path": "my_algorithm.WithoutRole", "module.init_args.kl.coef": 0.1},
        "`ref_logprobs` has role 'actr', which names no model handle of the module. Did you mean \"actor\"?",
    ),
    (
        "a missing model",
        {"module.init_args.actor.model": "nowhere"},
        "`module.init_args.actor.model` is 'nowhere', which is neither a folder nor a Hugging Face name; give",
    ),
    (
        "a missing critic",
        {"module.class_path": "rlflow.algorithms.PPO", "module.init_args.critic.model": "nowhere"},
        "`module.init_args.critic.model` is 'nowhere', which is neither a folder nor a Hugging Face name; give",
    ),
    (
        "a model folder that is none",
        {"module.init_args.actor.model": "not_a_model"},
        "`module.init_args.actor.model` is 'not_a_model', which has no config.json; give a model's folder",
    ),
    (
        "a missing dataset",
        {"data.train.init_args.path": "nowhere.jsonl"},
        "`data.train.init_args.path` is 'nowhere.jsonl', and there is no such file in ",
    ),
    (
        "a line that is not JSON",
        {"data.train.init_args.path": "not_json.jsonl"},
        "not_json.jsonl, line 2 is not JSON (Expecting ',' delimiter: line 1 column 15 (char 14)):"
        """ '{"question": 1+1='; correct or remove the line""",
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
        "8 of 8 rows exceed `data.max_prompt_length` 3 tokens, the first of them rows.jsonl, line 1. To",
    ),
    (
        "a prompt and a response beyond the model",
        {"module.init_args.max_response_length": 2045},
        "`actor` reads a prompt of 4 tokens and a response of up to 2045, 2049 tokens, and its model takes 2048"
        " (`max_position_embeddings` of its config.json); lower `module.init_args.max_response_length` to at most 2044,"
        " or `data.max_prompt_length`, or take",
    ),
    (
        "a row beyond the model",
        {
            "module": {"class_path": "rlflow.algorithms.SFT", "init_args": {"actor": "tiny"}},
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
        "`rollout.init_args.block_size` is 48, and vLLM's attention on the CPU takes multiples of 32; give one, or"
        " leave it out",
    ),
    (
        "fewer tokens at once than responses",
        {
            "rollout": {
                "class_path": "rlflow.rollout.VLLMEngine",
                "init_args": {"max_num_batched_tokens": 255, "max_num_seqs": 256},
            }
        },
        "`rollout.init_args.max_num_batched_tokens` is 255, and up to `rollout.init_args.max_num_seqs`, 256,",
    ),
]


@pytest.mark.parametrize(("changes", "line"), [case[1:] for case in CASES], ids=ids(CASES))
def test_a_wrong_model_or_dataset_is_refused_in_one_line_before_a_model_is_loaded(
    refused: Refused,
    changes: dict[str, Any],
    line: str,
) -> None:
    assert line in refused(changes)


@pytest.mark.parametrize(
    ("config", "rollout", "line"),
    [
        (
            MambaConfig(),
            "TransformersEngine",
            "`module.init_args.actor.model` is of the type 'mamba': it carries a state from",
        ),
        (PhiConfig(), "TransformersEngine", "`module.init_args.actor.model` is of the type 'phi': it has a bias"),
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
        (
            LlamaConfig(hidden_size=64, num_attention_heads=4),
            "VLLMEngine",
            "`rollout` is VLLMEngine, and the model, of the type 'llama', has attention heads of the size 16, and",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_an_unsupported_family_is_refused_in_one_line_without_its_weights(
    folder: Path, capfd: pytest.CaptureFixture[str], config: PretrainedConfig, rollout: str, line: str
) -> None:
    config.save_pretrained(folder / "family")
    tiny_tokenizer().save_pretrained(folder / "family")
    engine = {"class_path": f"rlflow.rollout.{rollout}"}
    write(folder / "my.yaml", {"module.init_args.actor.model": str(folder / "family"), "rollout": engine})
    capfd.readouterr()
    assert line in refusal(capfd, "fit", "--config", "my.yaml")


@pytest.mark.parametrize(
    ("tokenizer", "line"),
    [
        (None, "a folder without its tokenizer's files, so no text could be read: there is no merges.txt and no tok"),
        ('{"a": 1}', "whose tokenizer cannot be loaded (KeyError: 'added_tokens'); check its files"),
        ("{", "whose tokenizer cannot be loaded (Expecting property name"),
        ('{"added_tokens": [], "model": 3}', "whose tokenizer cannot be loaded (AttributeError: "),
    ],
    ids=["missing", "another", "torn", "a wrong part"],
)
def test_a_model_without_its_tokenizer_is_refused_with_its_folder(
    folder: Path, refused: Refused, tokenizer: str | None, line: str
) -> None:
    file = write_tiny_model(folder / "mine", layers=1) / "tokenizer.json"
    file.unlink() if tokenizer is None else file.write_text(tokenizer)
    found = refused({"module.init_args.actor.model": str(folder / "mine")})
    assert f"is '{folder / 'mine'}', {line}" in found


def gated(*_: Any, **__: Any) -> str:
    raise huggingface_hub.errors.GatedRepoError(
        "no token", response=httpx.Response(403, request=httpx.Request("GET", "https://nowhere"))
    )


def test_a_generation_config_may_be_missing_and_not_be_torn(
    folder: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_model(folder / "mine", layers=1)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert stop_tokens(Path("nobody/nothing"), load_tokenizer(model), (7,)) == (0, 7)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for call in ("hf_hub_download", "get_session"):
        monkeypatch.setattr(transformers.utils.hub, call, gated)
    assert stop_tokens(Path("nobody/nothing"), load_tokenizer(model), (7,)) == (0, 7)
    (model / "generation_config.json").write_text("{")
    found = refused({"module.init_args.actor.model": str(model)})
    assert f"is '{model}', whose generation config cannot be loaded (It looks like" in found


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
def test_a_reward_that_fails_is_reported_with_its_sample(
    folder: Path, capfd: pytest.CaptureFixture[str], function: str, reason: str
) -> None:
    write(folder / "my.yaml", rewarded_by(function))
    line = refusal(capfd, "fit", "--config", "my.yaml")
    assert f"reward `my_rewards.{function}` failed on sample 0 with {reason} (response " in line
    assert "row {'question': " in line
    assert "; correct it, or set `on_error` to zero or drop (rank 0, node `rewards`, " in line


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        ("my_odd_rewards.none", "failed on sample 0 with TypeError: it returned None, not a number (response "),
        ("my_odd_rewards.several", "failed on sample 0 with TypeError: it returned [1.0], not a number (response "),
        ({"of": "my_odd_rewards.said"}, "failed on sample 0 with TypeError: it returned '1', not a number (response "),
        ("my_odd_rewards.short", "it returned 1 scores for "),
        ("my_odd_rewards.unknown", "has no column `anser`, which the reward reads; columns found: question, answer."),
        ("my_odd_rewards.nobody", "my_odd_rewards has no nobody. Did you mean"),
        (["my_odd_rewards.none", "nowhere.none"], "there is no module nowhere"),
        ({}, "`module.init_args.reward` is a sum of no rewards; give at least one"),
    ],
    ids=str,
)
def test_a_bare_function_that_cannot_score_is_one_line(
    folder: Path, capfd: pytest.CaptureFixture[str], reward: Any, reason: str
) -> None:
    (folder / "my_odd_rewards.py").write_text(ODD_REWARDS)
    write(folder / "my.yaml", {"module.init_args.reward": reward})
    assert reason in refusal(capfd, "fit", "--config", "my.yaml")


ODD_REWARDS = """
def none(response): ...
def several(response): return [1.0]
def said(response): return "1"
def short(completions, **kwargs): return [1.0]
def unknown(response, anser): return 1.0
def body(response): return 1.0
"""


def test_a_reward_that_calls_exit_is_reported_with_its_rank_and_task(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(folder / "my.yaml", rewarded_by("exits"))
    line = refusal(capfd, "fit", "--config", "my.yaml")
    assert line.startswith("rank 0 called `sys.exit(0)` (step 1, run rewards: rank 0, ")


ASKS = """
from rlflow import Batch, PerSample, Rollout, node
from rlflow.algorithms import GRPO


class NoResponse(GRPO):
    @node(generates="actor")
    def rollout(self, batch: Batch) -> Rollout:
        return self.actor.generate(batch, n=0)


class NoToken(GRPO):
    @node(generates="actor")
    def rollout(self, batch: Batch) -> Rollout:
        return self.actor.generate(batch, n=2, max_new_tokens=0)


class TooLong(GRPO):
    @node(generates="actor")
    def rollout(self, batch: Batch) -> Rollout:
        return self.actor.generate(batch, n=2, max_new_tokens=400)


class NoLevel(GRPO):
    @node
    def rewards(self, rollout: Rollout) -> PerSample:
        return rollout.group_of("question").float()
"""


@pytest.mark.parametrize(
    ("name", "found", "where"),
    [
        ("NoResponse", "`n` is 0; generate 1 response to each row or more", "rollout`, my_asks.py:7"),
        ("NoToken", "`max_new_tokens` is 0; a response has at least one token", "rollout`, my_asks.py:13"),
        (
            "TooLong",
            "`max_new_tokens` is 400 and `module.init_args.max_response_length` is 4, for",
            "rollout`, my_asks.py:19",
        ),
        ("NoLevel", "rows of `rollout` have no level 'question'; theirs are batch, rollout", "rewards`, my_asks.py:25"),
    ],
)
def test_what_only_the_run_can_know_is_reported_with_rank_node_and_line(
    folder: Path, capfd: pytest.CaptureFixture[str], name: str, found: str, where: str
) -> None:
    (folder / "my_asks.py").write_text(ASKS)
    write(folder / "my.yaml", {"module.class_path": f"my_asks.{name}"})
    line = refusal(capfd, "fit", "--config", "my.yaml")
    assert found in line
    assert f" (rank 0, node `{where})" in line
