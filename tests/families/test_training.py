"""Every family's packed forward, gradient, update and files, against transformers' own forward of single rows."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlflow import CausalLM, LoRA, UserError
from rlflow.cli import main
from rlflow.models.causal_lm import ScoringModel
from rlflow.models.optimizer import Optimizer
from rlflow.models.packing import pack
from rlflow.testing.derivative import wide_casts
from rlflow.values.layout import Layout
from tests.families.models import ALL, FAMILIES
from tests.ranks import RankPool
from tests.slow import slow_but
from tests.strategies.reference import ROWS, TEMPERATURE, TOKENS, distance, plain_update
from tests.strategies.strategy_update import Stage, one_update, rows_of, save_after_update
from tests.strategies.subsets import side_by_side

CPU = torch.device("cpu")
CLIP = 0.5
SGD = Optimizer(name="sgd", lr=0.1, gradient_clipping=CLIP)
Family = Callable[[str], Path]


@cache
def reference(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradient of one update in float64, a row at a time by transformers' eager forward, and the weights after it."""
    with wide_casts():
        gradients, _, weights = plain_update(folder, lambda p: torch.optim.SGD(p, lr=0.1), CLIP, 1, "eager")
    return gradients[0], weights


@torch.no_grad()
def own_logprobs(folder: Path, dtype: torch.dtype = torch.float64) -> Tensor:
    """`[R]`, row after row, by the eager forward of each alone."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **plain)
    found = []
    for prompt, response, _ in ROWS:
        with wide_casts():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        found.append((logits / TEMPERATURE).log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0])
    return torch.cat(found)


def packed_logprobs(model: ScoringModel) -> Tensor:
    """`[R]`, by one packed forward."""
    logprobs: Tensor = model(*pack(rows_of(list(range(len(ROWS))))).arguments(), TEMPERATURE)[0]
    return logprobs


@pytest.mark.parametrize("name", ALL)
def test_the_packed_forward_and_its_gradient_are_those_of_single_rows(name: str, family: Family) -> None:
    folder = family(name)
    model = ScoringModel.load(folder, torch.float64, CPU)
    with wide_casts():
        logprobs = packed_logprobs(model)
        torch.testing.assert_close(logprobs.detach(), own_logprobs(folder), rtol=0, atol=1e-10)
        weights = torch.tensor([weight for _, response, weight in ROWS for _ in response])
        (-(weights * logprobs).sum() / TOKENS).backward()
    gradient = {model.hf_name(name): parameter.grad for name, parameter in model.named_parameters()}
    assert distance(gradient, reference(folder)[0]) < 1e-10  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stage", "name"), slow_but([(3, "gemma2"), ("fsdp", "gemma2")], itertools.product([0, 2, 3, "fsdp"], FAMILIES))
)
def test_an_update_on_two_ranks_is_that_of_single_rows(
    stage: Stage, name: str, family: Family, ranks2: RankPool
) -> None:
    folder = family(name)
    gradient, weights = reference(folder)
    for outcome in ranks2.run(one_update, folder, stage, "fp32", SGD):
        assert distance(outcome.gradients[0], gradient) < 1e-5
        assert distance(outcome.weights, weights) < 1e-6


@pytest.mark.parametrize(
    ("actor", "critic"),
    [
        pytest.param("gemma2", "gpt_oss"),
        pytest.param("granite", "phi3", marks=pytest.mark.slow),
        pytest.param("glm4_moe", "deepseek_v3", marks=pytest.mark.slow),
    ],
)
def test_ranks_divide_sequences_of_any_family(actor: str, critic: str, family: Family, ranks2: RankPool) -> None:
    # Each rank has half of the heads, and of their sinks.
    folders = {"actor": family(actor), "critic": family(critic)}
    layouts = {"actor": Layout((0, 1), 1), "critic": Layout((0, 1), 1), "reference": Layout((0, 1), 1)}
    for seen, _ in ranks2.run(side_by_side, folders, layouts, 2, SGD):
        for role, folder in folders.items():
            assert distance(seen[role].gradients[0], reference(folder)[0]) < 1e-5


@pytest.mark.parametrize("name", slow_but(["gemma2"], FAMILIES))
def test_a_trained_model_is_saved_loaded_and_scores_the_same(
    name: str, family: Family, ranks2: RankPool, tmp_path: Path
) -> None:
    folder = family(name)
    weights, _ = ranks2.run(save_after_update, folder, 3, SGD, tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    loaded = {key: value for key, value in model.state_dict().items() if key in weights}
    assert {*weights} == {*dict(model.named_parameters())} | {*model.state_dict()} & {*dict(model.named_buffers())}
    assert all(torch.equal(loaded[key], weight) for key, weight in weights.items())
    found = packed_logprobs(ScoringModel.load(tmp_path / "saved", torch.float32, CPU))
    torch.testing.assert_close(found.double(), own_logprobs(tmp_path / "saved"), rtol=0, atol=1e-5)
    assert float((found.double() - own_logprobs(folder)).abs().max()) > 1e-3  # it was trained


@pytest.mark.parametrize("targets", [("gate_proj", "up_proj"), ("down_proj",), ("gate",), ("q_proj", "experts")])
def test_adapters_of_experts_and_routers_are_refused(targets: tuple[str, ...], family: Family) -> None:
    with pytest.raises(
        UserError,
        match=r"^`lora\.targets` is \('\w+',.*(is not a linear layer; name linear ones|Experts\); name linear .*)$",
    ):
        CausalLM(str(family("qwen3_moe")), lora=LoRA(targets=targets)).load(family("qwen3_moe"), torch.float32, CPU)


@pytest.mark.parametrize(
    ("name", "targets", "why"),
    [
        ("qwen3_5", ("in_proj_qkv", "conv1d"), r"'model.layers.0.linear_attn.conv1d' is not a linear layer"),
        ("granitemoehybrid", ("out_proj",), r"a kernel for CUDA reads the weight of 'model.layers.0.mamba.out_proj'"),
        ("falcon_h1", ("out_proj",), r"'out_proj' is incompatible with Mamba-based models"),
    ],
)
def test_adapters_that_a_mixer_would_not_compute_are_refused(
    name: str, targets: tuple[str, ...], why: str, family: Family
) -> None:
    with pytest.raises(UserError, match=rf"^`lora\.targets` is \({targets[0]!r}.*{why}"):
        CausalLM(str(family(name)), lora=LoRA(256, targets=targets)).load(family(name), torch.float32, CPU)


@pytest.mark.parametrize("name", ALL)
def test_an_exported_model_scores_as_the_one_with_adapters(name: str, family: Family, tmp_path: Path) -> None:
    folder = family(name)
    model = CausalLM(str(folder), lora=LoRA(rank=3, alpha=7.0)).load(folder, torch.float32, CPU)
    before = packed_logprobs(model).detach()
    generator = torch.Generator().manual_seed(0)
    for weight in model.trained():
        weight.parameter.data = 0.1 * torch.randn(weight.parameter.shape, generator=generator)
    state = {weight.name: copy.deepcopy(weight.parameter.detach()) for weight in model.trained()}
    model.save_adapter(tmp_path / "model", state)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "model")
    main(["export", "--model", str(tmp_path / "model"), "--to", str(tmp_path / "out")])
    found = packed_logprobs(model).detach()
    torch.testing.assert_close(found.double(), own_logprobs(tmp_path / "out"), rtol=0, atol=1e-5)
    assert float((found - before).abs().max()) > 1e-3
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == load_file(folder / "model.safetensors").keys()
