from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BloomConfig, LlamaConfig

from rlflow.errors import UserError
from rlflow.rollout import Completion, RolloutEngine, Sampling, TransformersEngine, WeightSyncError
from rlflow.rollout.transformers import _draws, _sample
from tests.rollout.engines import Broken
from tests.rollout.stepping import check_completions
from tests.rollout.trained import PROMPTS, STOP, buckets, load, logprob_gap, perturb, setup

SEEDS = list(range(len(PROMPTS)))


@pytest.fixture(scope="module")
def engine(tied: Path) -> Iterator[RolloutEngine]:
    engine = setup(TransformersEngine(), tied)
    engine.update_weights(buckets(load(tied)), 0)
    yield engine
    engine.close()


def test_logprobs_are_those_of_the_training_forward(tied: Path) -> None:
    engine, model = setup(TransformersEngine(), tied), load(tied)
    perturb(model, seed=1)
    engine.update_weights(buckets(model), 1)
    completions = engine.generate(PROMPTS, SEEDS, Sampling(24, 0.7, STOP), 1)
    assert logprob_gap(model, PROMPTS, completions, temperature=0.7) < 1e-5


def test_greedy_responses_are_those_of_transformers_generate(engine: RolloutEngine, tied: Path) -> None:
    model = load(tied)
    completions = engine.generate(PROMPTS, SEEDS, Sampling(24, 0.0, STOP), 0)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=list(STOP))
        assert [*prompt, *completion.token_ids] == expected[0].tolist()


def test_a_response_does_not_depend_on_the_batch_it_is_in(engine: RolloutEngine) -> None:
    sampling = Sampling(24, 1.0, STOP)
    together = engine.generate(PROMPTS, SEEDS, sampling, 0)
    alone = [engine.generate([prompt], [seed], sampling, 0)[0] for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
    assert [completion.token_ids for completion in together] == [completion.token_ids for completion in alone]


def test_batches_of_any_size_give_the_same_responses(engine: RolloutEngine, tied: Path) -> None:
    small = setup(TransformersEngine(max_batch=4), tied)
    small.update_weights(buckets(load(tied)), 0)
    sampling = Sampling(16, 1.0, STOP)
    expected = engine.generate(PROMPTS, SEEDS, sampling, 0)
    responses = small.generate(PROMPTS, SEEDS, sampling, 0)
    assert [completion.token_ids for completion in responses] == [completion.token_ids for completion in expected]


def test_responses_come_when_they_have_ended(engine: RolloutEngine) -> None:
    check_completions(engine, 0)


def test_a_response_ends_with_its_stop_token(engine: RolloutEngine) -> None:
    free = engine.generate(PROMPTS, SEEDS, Sampling(24, 1.0), 0)
    stop = free[0].token_ids[3]
    for completion, whole in zip(engine.generate(PROMPTS, SEEDS, Sampling(24, 1.0, (stop,)), 0), free, strict=True):
        end = whole.token_ids.index(stop) + 1 if stop in whole.token_ids else 24
        assert completion.token_ids == whole.token_ids[:end]
        assert len(completion.logprobs) == end
        assert completion.finished == (stop in whole.token_ids)


def test_another_version_is_refused(engine: RolloutEngine) -> None:
    with pytest.raises(WeightSyncError, match="the engine holds version 0, and must generate with version 1"):
        engine.generate(PROMPTS, SEEDS, Sampling(4), 1)


def test_nothing_is_generated_before_the_first_sync(tied: Path) -> None:
    with pytest.raises(WeightSyncError, match="the engine holds no version"):
        setup(TransformersEngine(), tied).generate(PROMPTS, SEEDS, Sampling(4), 0)


def test_a_sync_that_leaves_a_tensor_out_leaves_no_version(tied: Path) -> None:
    engine, model = setup(TransformersEngine(), tied), load(tied)
    engine.update_weights(buckets(model), 0)
    with pytest.raises(WeightSyncError, match=r"not sent: model\.norm\.weight$"):
        engine.update_weights(buckets(model, leave_out="model.norm.weight"), 1)
    with pytest.raises(WeightSyncError, match="the engine holds no version"):
        engine.generate(PROMPTS, SEEDS, Sampling(4), 0)


def test_a_model_without_positions_takes_prompts_of_any_length(tmp_path: Path) -> None:
    config = BloomConfig(vocab_size=128, hidden_size=32, n_layer=1, n_head=2, architectures=["BloomForCausalLM"])
    config.save_pretrained(tmp_path)
    engine = setup(TransformersEngine(), tmp_path)
    engine.policy_version = 0  # its random weights
    (completion,) = engine.generate([[65] * 3000], [0], Sampling(2), 0)
    assert len(completion.token_ids) == 2


def test_an_engine_takes_the_stretched_positions_of_its_model(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    small = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "architectures": ["LlamaForCausalLM"]}
    LlamaConfig(**small, **heads, max_position_embeddings=64, rope_parameters=rope).save_pretrained(tmp_path)
    engine = setup(TransformersEngine(), tmp_path)
    engine.check_context(200, 56)
    with pytest.raises(UserError, match=r"context of 256 tokens; lower .*, or take a model of longer context$"):
        engine.check_context(200, 57)


def test_a_prompt_beyond_the_context_is_refused(engine: RolloutEngine) -> None:
    with pytest.raises(UserError, match=r"a prompt of 500 tokens and a response of up to 13 exceed .* 512 tokens"):
        engine.generate([[65] * 500], [0], Sampling(13), 0)


def test_the_processes_random_state_is_left_alone(tied: Path) -> None:
    before = torch.get_rng_state()
    engine = setup(TransformersEngine(), tied)
    engine.update_weights(buckets(load(tied)), 0)
    engine.generate(PROMPTS, SEEDS, Sampling(4), 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_tokens_are_sampled_with_their_probability() -> None:
    probabilities = torch.tensor([0.2, 0.0, 0.5, 0.3])
    draws = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71, 1 - 2**-53], dtype=torch.float64)
    chosen, logprobs = _sample(probabilities.log().expand(6, 4), Sampling(1), draws)
    assert chosen.tolist() == [0, 0, 2, 2, 3, 3]
    torch.testing.assert_close(logprobs.exp(), probabilities.expand(6, 4))


def test_logprobs_are_taken_after_temperature() -> None:
    _, logprobs = _sample(torch.tensor([[2.0, 0.0]]), Sampling(1, 0.5), torch.zeros(1, dtype=torch.float64))
    assert float(logprobs[0, 0]) == pytest.approx(-0.0181499, abs=1e-6)  # not -0.1269280, nor that over 0.5


def test_draws_depend_on_their_seed_alone() -> None:
    assert torch.equal(_draws([3, 5], 8)[1], _draws([5], 8)[0])


@torch.no_grad()
def test_a_float32_head_computes_logits_in_float32_of_weights_in_less(untied: Path) -> None:
    asked = TransformersEngine()
    asked.use_float32_head()
    engine, model = setup(asked, untied, torch.bfloat16), load(untied).bfloat16()
    engine.update_weights(buckets(model), 0)
    ids = torch.tensor([PROMPTS[1]])
    hidden = asked._model.model(input_ids=ids).last_hidden_state
    logits = asked._model(input_ids=ids).logits
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden.float() @ model.lm_head.weight.float().T, rtol=0, atol=1e-6)
    assert float((logits - model.lm_head(hidden)).abs().max()) > 1e-4


def test_an_engine_without_a_float32_head_says_so() -> None:
    with pytest.raises(UserError, match=r"`strategy.float32_head` is set, and `rollout` is Broken, which computes"):
        Broken().use_float32_head()


class Constant(TransformersEngine):
    """Answers without a model."""

    def _generate(self, prompts: Any, seeds: Any, sampling: Any) -> list[Completion]:
        return [Completion((7,), (-1.0,), True) for _ in prompts]


class Counting(TransformersEngine):
    """Counts what it is asked for, and generates as its base class does."""

    calls = 0

    def _generate(self, prompts: Any, seeds: Any, sampling: Any) -> list[Completion]:
        self.calls += 1
        return super()._generate(prompts, seeds, sampling)


def test_a_subclass_that_calls_its_base_generates_once(tied: Path) -> None:
    engine = setup(Counting(), tied)
    engine.update_weights(buckets(load(tied)), 1)
    made = engine.generate([[1], [2, 3]], [0, 1], Sampling(4), 1)
    found = dict(engine.completions([[1], [2, 3]], [0, 1], Sampling(4), 1))
    assert [found[place] for place in range(2)] == made
    assert engine.calls == 2


def test_a_subclass_that_generates_otherwise_is_asked_for_single_responses_too(tied: Path) -> None:
    engine = setup(Constant(), tied)
    engine.update_weights(buckets(load(tied)), 1)
    found = dict(engine.completions([[1], [2, 3]], [0, 1], Sampling(4), 1))
    assert [found[place].token_ids for place in range(2)] == [(7,), (7,)]
