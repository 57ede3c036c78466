"""Models that read pictures: packed rows score as transformers' own forward of each alone, and train its weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from rlflow import CausalLM, LoRA, UserError
from rlflow.models.causal_lm import ScoringModel
from rlflow.models.optimizer import Optimizer
from rlflow.models.packing import pack, take
from rlflow.models.picture_processor import PictureReader
from rlflow.testing.derivative import wide_casts
from rlflow.values.batch import TokenRows
from rlflow.values.picture import Picture
from rlflow.values.ragged import Ragged
from tests.families.towers import TOWERS, Rows, rows_of, write_tower
from tests.ranks import RankPool
from tests.slow import slow_but
from tests.strategies.reference import distance
from tests.strategies.strategy_update import Outcome, Stage, all_weights, launch

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("towers")
    return cache(lambda name: write_tower(name, folder / name))


def responses_to(rows: Rows) -> list[list[int]]:
    """A response of random tokens to each prompt; one of them has a placeholder, as a policy may sample it."""
    generator = torch.Generator().manual_seed(3)
    found = [torch.randint(32, 120, (5 + row,), generator=generator).tolist() for row in range(len(rows.prompts))]
    found[0][2] = rows.processor.placeholder_id
    return found


def token_rows(rows: Rows, responses: Sequence[Sequence[int]]) -> tuple[TokenRows, Callable[..., list[Picture]]]:
    """The rows as a step has them, and the album of their pictures."""
    every = list(dict.fromkeys(picture for of_row in rows.pictures for picture in of_row))
    numbers = Ragged.from_lists([[every.index(picture) for picture in of_row] for of_row in rows.pictures])
    prompts, written = Ragged.from_lists(rows.prompts), Ragged.from_lists(responses)
    return TokenRows.padded(prompts, written, numbers), lambda asked: [every[number] for number in asked]


def own_logprobs(model: Any, rows: Rows, responses: Sequence[Sequence[int]]) -> Tensor:
    """`[R]`, row after row, by transformers' own forward of each; a sampled placeholder is embedded as it is."""
    found = []
    for prompt, pictures, response in zip(rows.prompts, rows.pictures, responses, strict=True):
        ids, seen = torch.tensor([[*prompt, *response]]), dict[str, Any]()
        sampled = (ids[0] == model.config.image_token_id).nonzero()[sum(map(rows.processor.features, pictures)) :, 0]
        shown = ids.index_fill(1, sampled, 65)
        if pictures:
            made = rows.images(images=[[each.opened() for each in pictures]], return_tensors="pt")
            seen = {name: made[name] for name in rows.images.model_input_names if name in made}
            seen["pixel_values"] = seen["pixel_values"].double()
            if "image_grid_thw" in seen:
                seen["mm_token_type_ids"] = (shown == model.config.image_token_id).int()
        hook = model.get_input_embeddings().register_forward_pre_hook(lambda module, given, ids=ids: (ids,))
        logits = model(input_ids=shown, use_cache=False, **seen).logits[0, len(prompt) - 1 : -1]
        hook.remove()
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize(
    ("shares", "name"), slow_but([(True, "idefics3"), (True, "qwen3_vl")], itertools.product([True, False], TOWERS))
)
def test_packed_rows_with_pictures_and_their_gradient_are_those_of_single_rows(
    shares: bool, name: str, tower: Callable[[str], Path]
) -> None:
    folder = tower(name)
    rows = rows_of(folder)
    responses = responses_to(rows)
    tokens, album = token_rows(rows, responses)
    model = ScoringModel.load(folder, torch.float64, CPU)
    assert model.processor is not None
    line = pack(tokens, shares and not model.has_mixers, PictureReader(model.processor, album))
    weights = torch.randn(len(line.targets), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    own = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    with wide_casts():
        expected = own_logprobs(own, rows, responses)
        (weights * expected).sum().backward()
        found = model(*line.arguments(), pictures=line.pictures, prefixes=line.prefixes)[0]
        (weights * found).sum().backward()
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=0, atol=1e-10)
    reference = {key: parameter.grad for key, parameter in own.named_parameters()}
    gradient = {model.hf_name(key): parameter.grad for key, parameter in model.named_parameters()}
    tower_names = {model.hf_name(key) for key, of in model.named_parameters() if of in {*model.tower_parameters()}}
    assert distance(gradient, reference) < 1e-10
    # Softmax does not change with a bias of keys, so the gradient of such a bias is rounding around 0.
    for key in (key for key in tower_names if not key.endswith("k_proj.bias")):
        gap = float((gradient[key] - reference[key]).abs().max() / reference[key].abs().max())  # type: ignore[union-attr,operator]
        assert gap < 1e-10, key


@pytest.mark.parametrize("name", slow_but(["qwen3_vl"], ["idefics3", "qwen3_vl", "qwen3_5"]))
def test_each_row_has_the_pixels_and_positions_of_its_own_pictures(name: str, tower: Callable[[str], Path]) -> None:
    folder = tower(name)
    rows = rows_of(folder)
    responses = responses_to(rows)
    swapped = [rows.pictures[{0: 4, 4: 0}.get(row, row)] for row in range(6)]  # of one size
    tokens, album = token_rows(rows, responses)
    model = ScoringModel.load(folder, torch.float32, CPU)
    assert model.processor is not None
    line = pack(tokens, False, PictureReader(model.processor, album))
    own = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    with torch.no_grad():
        found = model(*line.arguments(), pictures=line.pictures)[0].double()
        expected = own_logprobs(own, rows, responses)
        of_others = own_logprobs(own, replace(rows, pictures=swapped), responses)
    lengths = [len(response) for response in responses]
    gaps = [float(gap.max()) for gap in (found - expected).abs().split(lengths)]
    assert max(gaps) < 1e-4, gaps
    moved = [float(gap.max()) for gap in (of_others - expected).abs().split(lengths)]
    assert [row for row, gap in enumerate(moved) if gap > 1e-3] == [0, 4]


MICRO_BATCHES = [[[0, 1], [2]], [[3], [4, 5]]]  # of two ranks: in the first, the second rank has no picture
SGD = Optimizer(name="sgd", lr=0.1, gradient_clipping=1e9)


def one_update(folder: Path, stage: Stage, settings: dict[str, Any]) -> Outcome:
    """An update on rows with pictures, on a rank; the loss is the mean of all log-probabilities."""
    rows = rows_of(folder)
    responses = responses_to(rows)
    handle = CausalLM(str(folder), optimizer=SGD, **settings)
    strategy, outcome = launch(stage), Outcome()
    handle.album = token_rows(rows, responses)[1]
    strategy.setup_role("actor", handle, folder)
    own = MICRO_BATCHES[torch.distributed.get_rank()]
    for part, numbers in enumerate(own):
        tokens, _ = token_rows(rows, responses)
        with handle.training():
            logprobs = handle.logprobs(take(tokens, torch.tensor(numbers)))
        strategy.backward("actor", logprobs.sum() / sum(map(len, responses)), last=part == len(own) - 1)
    outcome.gradients.append({key: value.clone() for key, value in strategy.gradients("actor").items()})
    strategy.step("actor")
    outcome.weights = all_weights(strategy, "actor")
    return outcome


@cache
def reference_of(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradient of that update in float64, and the weights after it, by transformers' forward of each row."""
    rows = rows_of(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    with wide_casts():
        own_logprobs(model, rows, responses_to(rows)).mean().backward()
    gradient = {key: parameter.grad for key, parameter in model.named_parameters()}
    weights = {key: (of - 0.1 * of.grad).detach() for key, of in model.named_parameters()}
    return gradient, weights  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("stage", "name"),
    slow_but(
        [(3, "qwen3_vl")],
        itertools.product([0, 2, 3, "fsdp"], ["idefics3", "qwen3_vl", "qwen3_5"]),
    ),
)
def test_an_update_on_two_ranks_of_which_one_has_no_picture_is_that_of_single_rows(
    stage: Stage, name: str, tower: Callable[[str], Path], ranks2: RankPool
) -> None:
    gradient, weights = reference_of(tower(name))
    for outcome in ranks2.run(one_update, tower(name), stage, {}):
        assert distance(outcome.gradients[0], gradient) < 1e-5
        assert distance(outcome.weights, weights) < 1e-6


@pytest.mark.parametrize("stage", slow_but([3], [0, 2, 3, "fsdp"]))
def test_a_frozen_tower_keeps_its_weights_while_the_decoder_is_trained(
    stage: Stage, tower: Callable[[str], Path], ranks2: RankPool
) -> None:
    folder = tower("idefics3")
    _, weights = reference_of(folder)
    model = ScoringModel.load(folder, torch.float32, CPU)
    frozen = {model.hf_name(key): of for key, of in model.named_parameters() if of in {*model.tower_parameters()}}
    assert len(frozen) == 38
    for outcome in ranks2.run(one_update, folder, stage, {"freeze_vision_tower": True}):
        assert all(torch.equal(outcome.weights[key], weight) for key, weight in frozen.items())
        decoder = outcome.weights.keys() - frozen.keys()
        assert distance({key: outcome.weights[key] for key in decoder}, {key: weights[key] for key in decoder}) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3, "fsdp"])
def test_a_tower_moves_by_its_own_learning_rate_and_the_decoder_by_the_other(
    stage: Stage, tower: Callable[[str], Path], ranks2: RankPool
) -> None:
    folder = tower("qwen3_vl")
    gradient, weights = reference_of(folder)
    model = ScoringModel.load(folder, torch.float32, CPU)
    of_tower = {model.hf_name(key) for key, of in model.named_parameters() if of in {*model.tower_parameters()}}
    expected = {key: of - (0.3 * gradient[key] if key in of_tower else 0.0) for key, of in weights.items()}  # 0.1 + 0.3
    for outcome in ranks2.run(one_update, folder, stage, {"vision_tower_lr": 0.4}):
        assert distance(outcome.gradients[0], gradient) < 1e-5
        moved = {key: outcome.weights[key] - weights[key] for key in of_tower}
        assert distance(moved, {key: -0.3 * gradient[key] for key in of_tower}) < 1e-3  # of float32 weights
        assert distance(outcome.weights, expected) < 1e-6


def test_adapters_are_of_the_decoder_and_start_as_the_model_itself(tower: Callable[[str], Path]) -> None:
    folder = tower("idefics3")
    rows = rows_of(folder)
    tokens, album = token_rows(rows, responses_to(rows))
    scores = []
    for lora in (None, LoRA(), LoRA(targets=("q_proj",))):
        handle = CausalLM(str(folder), lora=lora)
        handle.album = album
        model = handle.load(folder, torch.float32, CPU)
        handle.attach(model, handle.plan)
        if lora is not None:
            adapted = {name for name, of in model.named_parameters() if of.requires_grad}
            assert len(adapted) == 2 * (14 if lora.targets == "all-linear" else 2)  # A and B; 7 layers of each of two
            assert all("text_model" in name for name in adapted)
        with torch.no_grad():
            scores.append(handle.logprobs(tokens))
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(scores[2], scores[0], rtol=0, atol=1e-5)


def test_a_model_has_no_divergence_from_itself_on_rows_with_pictures(tower: Callable[[str], Path]) -> None:
    folder = tower("idefics3")
    rows = rows_of(folder)
    tokens, album = token_rows(rows, responses_to(rows))
    both = []
    for trainable in (True, False):
        handle = CausalLM(str(folder), trainable=trainable)
        handle.album = album
        handle.attach(handle.load(folder, torch.float32, CPU), handle.plan)
        both.append(handle)
    with torch.no_grad():
        assert float(both[0].kl(tokens, both[1]).abs().max()) < 1e-6
        with pytest.raises(UserError, match="is given prompts that have places for images without the images; score"):
            both[0].logprobs(TokenRows(tokens.prompt_ids, tokens.response_ids, tokens.lengths))
