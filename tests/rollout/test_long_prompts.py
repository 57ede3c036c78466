"""Prompts of 1 to 1,500 tokens, more at once than a step computes: whole or in parts, they get the same responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rlflow.rollout.vllm.engine
from rlflow.models.tiny import write_tiny_model
from rlflow.rollout import (
    Completion,
    EngineSubprocess,
    RankInfo,
    RolloutEngine,
    Sampling,
    TransformersEngine,
    VLLMEngine,
)
from rlflow.rollout.vllm.process import RewindableGenerator
from tests.ranks import RankPool
from tests.rollout.trained import buckets, load, logprob_gap, perturb, setup

LENGTHS = [1, 2, 31, 32, 33, 100, 255, 256, 257, 400, 777, 1500] * 2
SEEDS = list(range(100, 100 + len(LENGTHS)))
SAMPLING = Sampling(24, 1.0, (0,))
AT_ONCE = 8192  # tokens of a step, more than there are
IN_PARTS = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "long", max_position=2048)


@pytest.fixture(scope="module")
def at_once(folder: Path) -> Iterator[RolloutEngine]:
    """vLLM, which computes every prompt at once."""
    engine = setup(vllm(AT_ONCE), folder)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(folder: Path, at_once: RolloutEngine) -> list[Completion]:
    """The expected responses, of the engine that computes every prompt whole."""
    assert sum(LENGTHS) < AT_ONCE
    at_once.update_weights(buckets(trained(folder)), 0)
    with random_numbers() as entered:
        completions = at_once.generate(prompts(), SEEDS, SAMPLING, 0)
    assert not any(generator.rewinds for generator in entered)
    return completions


def vllm(budget: int, **settings: Any) -> VLLMEngine:
    return VLLMEngine(kv_cache_gib=0.25, max_num_batched_tokens=budget, **settings)


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(32, 127, (length,), generator=generator).tolist() for length in lengths]


def trained(folder: Path) -> Any:
    model = load(folder)
    perturb(model, seed=0)
    return model


def answers(engine: RolloutEngine, folder: Path, dtype: torch.dtype = torch.float32) -> list[Completion]:
    setup(engine, folder, dtype)
    engine.update_weights(buckets(trained(folder)), 0)
    completions = engine.generate(prompts(), SEEDS, SAMPLING, 0)
    engine.close()
    return completions


@contextmanager
def random_numbers() -> Iterator[list[RewindableGenerator]]:
    """The generators of the requests that entered vLLM's batch meanwhile, once for each time."""
    entered: list[RewindableGenerator] = []
    enter = RewindableGenerator.enter

    def watched(self: RewindableGenerator) -> None:
        entered.append(self)
        enter(self)

    RewindableGenerator.enter = watched  # type: ignore[method-assign]
    try:
        yield entered
    finally:
        RewindableGenerator.enter = enter  # type: ignore[method-assign]


def each_token_had_its_number(entered: list[RewindableGenerator], completions: list[Completion]) -> bool:
    """Whether every seed's generator is where one number for each token leads it, whatever was computed in parts."""
    of_seed = {generator.initial_seed(): generator for generator in entered}
    seeds = SEEDS[: len(completions)]
    assert sorted(of_seed) == seeds
    for seed, completion in zip(seeds, completions, strict=True):
        expected = torch.Generator().manual_seed(seed)
        for _ in completion.token_ids:
            torch.randint(0, 2**31, (1,), generator=expected)
        if not torch.equal(of_seed[seed].get_state(), expected.get_state()):
            return False
    return True


def check_same(completions: list[Completion], expected: list[Completion], bits: bool = True) -> None:
    """The same tokens and bits, but those of the longest prompts: vLLM's attention sums them part by part."""
    for length, one, other in zip(LENGTHS, completions, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4, rel=0)
        assert not bits or length > 1000 or one.logprobs == other.logprobs, length


def test_the_responses_to_long_prompts_have_the_logprobs_of_the_training_forward(
    folder: Path, expected: list[Completion]
) -> None:
    assert logprob_gap(trained(folder), prompts(), expected) < 1e-4


def test_prompts_computed_in_parts_get_the_same_responses(folder: Path, expected: list[Completion]) -> None:
    with random_numbers() as entered:
        completions = answers(vllm(IN_PARTS), folder)
    check_same(completions, expected)
    assert sum(generator.rewinds for generator in entered) > len(LENGTHS)
    assert each_token_had_its_number(entered, completions)


def test_requests_that_were_preempted_get_the_same_responses(folder: Path) -> None:
    """Their prompts and tokens are computed again, in parts, and the numbers of those tokens are not drawn again."""
    engine = VLLMEngine(kv_cache_gib=40 * 32 / 2**20, max_model_len=256, max_num_seqs=16, max_num_batched_tokens=16)
    setup(engine, folder)
    scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
    preempt, lengths = scheduler._preempt_request, []

    def watched(request: Any, *arguments: Any, **keywords: Any) -> None:
        lengths.append(request.num_output_tokens)
        preempt(request, *arguments, **keywords)

    scheduler._preempt_request = watched
    engine.update_weights(buckets(trained(folder)), 0)
    asked, seeds, sampling = prompts([100] * 12), SEEDS[:12], Sampling(96, 1.0)  # of 40 blocks, each needs 4 to 7
    with random_numbers() as entered:
        together = engine.generate(asked, seeds, sampling, 0)
    assert any(length > 0 for length in lengths)
    alone = [engine.generate([prompt], [seed], sampling, 0)[0] for prompt, seed in zip(asked, seeds, strict=True)]
    engine.close()
    assert together == alone
    assert each_token_had_its_number(entered, together)


@pytest.mark.slow
def test_vllm_still_needs_random_numbers_that_it_can_take_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, rlflow/rollout/rewind.py can go."""
    monkeypatch.setattr(rlflow.rollout.vllm.engine, "make_rewindable", lambda runner: None)
    with pytest.raises(RuntimeError, match="CPU Generator does not use offset"):
        answers(vllm(IN_PARTS), folder)


@pytest.mark.slow
def test_in_half_precision_the_same_numbers_are_drawn_and_the_logprobs_are_near(folder: Path) -> None:
    with random_numbers() as entered:
        completions = answers(vllm(IN_PARTS), folder, torch.bfloat16)
    assert sum(generator.rewinds for generator in entered) > len(LENGTHS)
    assert each_token_had_its_number(entered, completions)
    assert mean_gap(trained(folder).bfloat16(), completions) < 0.02


@torch.no_grad()
def mean_gap(model: Any, completions: list[Completion]) -> float:
    """Between the engine's logprobs and those of all tokens in one forward pass."""
    gaps = []
    for prompt, completion in zip(prompts(), completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        logprobs = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        scored = logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        gaps.append((scored - torch.tensor(completion.logprobs)).abs())
    return float(torch.cat(gaps).mean())


@pytest.mark.slow
def test_an_engine_in_a_process_of_its_own_computes_prompts_in_parts(folder: Path, expected: list[Completion]) -> None:
    check_same(
        answers(EngineSubprocess(vllm(IN_PARTS), index=0, size=1, address="", timeout_s=120.0), folder), expected
    )


def _of_two_ranks(folder: Path) -> list[tuple[list[Completion], bool]]:
    """Responses of an engine that two ranks share, and whether each token had its number: at once and in parts."""
    found = []
    for budget in (AT_ONCE, IN_PARTS):
        engine, rank = vllm(budget, tensor_parallel_size=2), dist.get_rank()
        engine.setup(str(folder), RankInfo(torch.float32, torch.device("cpu"), rank, 2, rank))
        engine.update_weights(buckets(trained(folder)), 0)
        with random_numbers() as entered:
            completions = engine.generate(prompts(), SEEDS, SAMPLING, 0)
        engine.close()
        assert any(generator.rewinds for generator in entered) == (budget == IN_PARTS)
        found.append((completions, each_token_had_its_number(entered, completions)))
    return found


@pytest.mark.slow
def test_an_engine_of_two_ranks_draws_the_same_numbers_for_the_same_tokens(
    ranks2: RankPool, folder: Path, expected: list[Completion]
) -> None:
    first, second = ranks2.run(_of_two_ranks, folder, timeout_s=300)
    assert first == second
    (at_once, numbered), (in_parts, numbered_in_parts) = first
    assert numbered
    assert numbered_in_parts
    check_same(in_parts, at_once)
    check_same(at_once, expected, bits=False)


def test_a_prompt_of_a_hundred_tokens_is_computed_once_for_its_eight_responses(
    at_once: RolloutEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, cached = at_once, []
    assert isinstance(engine, VLLMEngine)
    engine.update_weights(buckets(trained(folder)), 2)
    generate = engine._llm.generate

    def watched(*arguments: Any, **keywords: Any) -> Any:
        requests = generate(*arguments, **keywords)
        cached.extend(request.num_cached_tokens for request in requests)
        return requests

    monkeypatch.setattr(engine._llm, "generate", watched)
    (prompt,) = prompts([100])
    together = engine.generate([prompt] * 8, SEEDS[:8], SAMPLING, 2)
    engine.update_weights(buckets(trained(folder)), 3)  # empties the cache
    alone = [engine.generate([prompt], [seed], SAMPLING, 3)[0] for seed in SEEDS[:8]]
    assert cached[:8] == [0] + 7 * [96]  # whole blocks of 32
    assert together == alone


def test_the_transformers_engine_computes_prompts_in_parts(folder: Path) -> None:
    """It computes no more tokens together than its setting allows, and logits only for each prompt's last token."""
    whole = answers(TransformersEngine(max_prefill_tokens=10**6), folder)
    engine, sizes = TransformersEngine(max_batch=16, max_prefill_tokens=300), []
    setup(engine, folder)
    engine._model.register_forward_hook(
        lambda _, __, given, made: sizes.append((given["input_ids"].numel(), made.logits.shape[1])), with_kwargs=True
    )
    engine.update_weights(buckets(trained(folder)), 0)
    completions = engine.generate(prompts(), SEEDS, SAMPLING, 0)
    assert 200 < max(tokens for tokens, _ in sizes) <= 300
    assert {logits for _, logits in sizes} == {1}
    check_same(completions, whole, bits=False)
    assert logprob_gap(trained(folder), prompts(), completions) < 1e-4
