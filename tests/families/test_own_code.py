"""Engines generate with a model whose code is stored with its weights, as training scores it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlflow.errors import UserError
from rlflow.models.causal_lm import ScoringModel
from rlflow.rollout import RankInfo, RolloutEngine, TransformersEngine, VLLMEngine
from rlflow.run.pretrained import load_config
from tests.families.gap import follow_three_syncs
from tests.own_code import copies_in, write_own_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("engine", [TransformersEngine(), VLLMEngine(kv_cache_gib=0.25)], ids=["transformers", "vllm"])
def test_logprobs_are_training_s_after_each_sync(engine: RolloutEngine, tmp_path: Path) -> None:
    folder = write_own_model(tmp_path / "own", was_run=tmp_path / "was_run")
    with copies_in(tmp_path / "copies"):
        model = ScoringModel.load(folder, torch.float32, CPU, trust_remote_code=True)
        engine.setup(str(folder), RankInfo(torch.float32, CPU, trust_remote_code=True))
    follow_three_syncs(engine, model)
    engine.close()


def test_an_engine_runs_no_code_that_is_not_trusted(tmp_path: Path) -> None:
    folder = write_own_model(tmp_path / "own", was_run=tmp_path / "was_run")
    with pytest.raises(UserError, match="then set `trust_remote_code` to true"):
        TransformersEngine().setup(str(folder), RankInfo(torch.float32, CPU))
    assert not (tmp_path / "was_run").exists()


def test_vllm_needs_the_decoder_s_name_and_an_error_says_so_before_it_is_built(tmp_path: Path) -> None:
    folder = write_own_model(tmp_path / "own", was_run=tmp_path / "was_run")
    with copies_in(tmp_path / "copies"):
        VLLMEngine().check_model(load_config(folder, trust_remote_code=True))
        described = json.loads((folder / "config.json").read_text())
        del described["auto_map"]["AutoModel"]
        (folder / "config.json").write_text(json.dumps(described))
        with pytest.raises(UserError, match=r"'own', is of code stored with it that names no `AutoModel` in"):
            VLLMEngine().check_model(load_config(folder, trust_remote_code=True))
