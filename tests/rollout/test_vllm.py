"""One engine serves all tests of a model, for it takes seconds to start. Each test syncs the version that it needs."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import rlflow.rollout.vllm.engine
from rlflow.errors import UserError
from rlflow.rollout import RolloutEngine, Sampling, TransformersEngine, VLLMEngine, WeightSyncError
from rlflow.rollout.engine import Piece
from rlflow.rollout.vllm.process import RUNNER, import_vllm, runner_chosen
from rlflow.values.truncation import Truncation
from tests.rollout.stepping import check_completions, check_steps
from tests.rollout.test_continued import check_continued, lively
from tests.rollout.test_partial_responses import check_parts
from tests.rollout.trained import PROMPTS, STOP, buckets, check_written, load, logprob_gap, perturb, setup
from tests.rollout.truncated import MOST, check_gradient, check_own_settings, check_support

SEEDS = list(range(len(PROMPTS)))
VERSIONS = itertools.count()


@pytest.fixture(scope="module", params=["tied", pytest.param("untied", marks=pytest.mark.slow)])
def folder(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(request.param)
    return folder


@pytest.fixture(scope="module")
def built(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RolloutEngine, bool]]:
    """An engine without weights, which its first sync brings; and whether random states are what they were before."""
    empty = tmp_path_factory.mktemp("empty") / "model"
    shutil.copytree(folder, empty, ignore=shutil.ignore_patterns("*.safetensors"))
    before = random_states()
    engine = VLLMEngine(kv_cache_gib=0.25)
    engine.return_support(MOST)
    setup(engine, empty)
    yield engine, random_states() == before
    engine.close()
    assert not dist.is_initialized()


@pytest.fixture(scope="module")
def engine(built: tuple[RolloutEngine, bool]) -> RolloutEngine:
    return built[0]


def random_states() -> tuple[Any, ...]:
    """The random states of torch, Python and numpy."""
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]


@pytest.fixture
def model(folder: Path) -> Any:
    return load(folder)


def test_parts_make_the_response_that_is_made_in_one_call(engine: RolloutEngine, model: Any) -> None:
    check_parts(engine, _sync(engine, model))


def test_a_response_that_was_cut_is_continued_as_it_was_before(engine: RolloutEngine, folder: Path) -> None:
    check_continued(engine, _sync(engine, lively(folder)))


def test_responses_come_when_they_have_ended(engine: RolloutEngine, model: Any) -> None:
    check_completions(engine, _sync(engine, model))


def test_turns_that_come_one_by_one_are_those_of_one_call(engine: RolloutEngine, model: Any) -> None:
    check_steps(engine, _sync(engine, model))
    _sync(engine, model)  # refused where requests are in progress


def _sync(engine: RolloutEngine, model: Any) -> int:
    version = next(VERSIONS)
    engine.update_weights(buckets(model), version)
    return version


def test_logprobs_are_those_of_the_training_forward_after_each_of_five_updates(
    engine: RolloutEngine, model: Any
) -> None:
    for update in range(5):
        perturb(model, seed=update)
        completions = engine.generate(PROMPTS, SEEDS, Sampling(24, 0.7, STOP), _sync(engine, model))
        assert logprob_gap(model, PROMPTS, completions, temperature=0.7) < 1e-4


def test_training_over_the_tokens_that_stayed_is_exact(engine: RolloutEngine, folder: Path, tmp_path: Path) -> None:
    lively(folder).save_pretrained(tmp_path)
    version = _sync(engine, load(tmp_path))
    check_support(engine, tmp_path, version)
    check_own_settings(engine, tmp_path, version)
    check_gradient(engine, tmp_path, version)


def test_validation_may_sample_from_more_tokens_than_training_and_notes_none(engine: RolloutEngine, model: Any) -> None:
    version = _sync(engine, model)
    for truncation in (Truncation(top_p=0.999), Truncation(top_k=MOST + 1), Truncation(min_p=1e-6)):
        (one,) = engine.generate([PROMPTS[1]], [0], Sampling(8, 2.0, truncation=truncation), version)
        assert len(one.logprobs) == 8
        assert not one.columns


def test_a_support_that_is_not_known_is_refused(engine: RolloutEngine, model: Any) -> None:
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()  # tied to the output layer: all tokens are as likely
        model.get_output_embeddings().weight.zero_()
    sampling = Sampling(1, 1.0, truncation=Truncation(top_k=MOST))
    with pytest.raises(UserError, match="from more than the 22 likeliest ones: as many are as likely as the last"):
        engine.generate(PROMPTS, SEEDS, sampling, _sync(engine, model))


def test_greedy_responses_are_those_of_the_reference_engine(engine: RolloutEngine, model: Any, folder: Path) -> None:
    perturb(model, seed=1)
    reference = setup(TransformersEngine(), folder)
    sampling = Sampling(48, 0.0, STOP)
    expected = reference.generate(PROMPTS, SEEDS, sampling, _sync(reference, model))
    completions = engine.generate(PROMPTS, SEEDS, sampling, _sync(engine, model))
    assert [completion.token_ids for completion in completions] == [completion.token_ids for completion in expected]
    assert logprob_gap(model, PROMPTS, completions) < 1e-4  # of temperature 1


def test_every_tensor_that_is_left_out_is_named(engine: RolloutEngine, model: Any) -> None:
    for name, _ in model.named_parameters():
        with pytest.raises(WeightSyncError, match=rf"not sent: {name}$"):
            engine.update_weights(buckets(model, leave_out=name), next(VERSIONS))


def test_nothing_is_generated_after_a_sync_that_left_a_tensor_out(engine: RolloutEngine, model: Any) -> None:
    version = _sync(engine, model)
    with pytest.raises(WeightSyncError):
        engine.update_weights(buckets(model, leave_out="model.norm.weight"), version + 1)
    for attempt in (version, version + 1):
        with pytest.raises(WeightSyncError, match="the engine holds no version, and must generate"):
            engine.generate(PROMPTS, SEEDS, Sampling(4), attempt)


def test_a_version_other_than_the_one_held_is_refused(engine: RolloutEngine, model: Any) -> None:
    version = _sync(engine, model)
    with pytest.raises(
        WeightSyncError, match=rf"the engine holds version {version}, and must generate with version {version + 1};"
    ):
        engine.generate(PROMPTS, SEEDS, Sampling(4), version + 1)


def test_sleep_gives_the_version_up(engine: RolloutEngine, model: Any) -> None:
    version = _sync(engine, model)
    engine.sleep()
    engine.wake_up()
    with pytest.raises(WeightSyncError, match="the engine holds no version"):
        engine.generate(PROMPTS, SEEDS, Sampling(4), version)


class Sleeper:
    """Stands for vLLM on a GPU: notes when it gives its memory away and takes it back."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def sleep(self, level: int) -> None:
        self.seen.append(f"sleep at level {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.seen.append(f"wake {' and '.join(tags)}")

    def reset_prefix_cache(self) -> bool:
        return True


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """An engine that takes itself for one on a GPU, of one weight of 3 rows; and what was done to vLLM, in order."""
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("empty cache"))
    monkeypatch.setattr(
        rlflow.rollout.vllm.engine, "write", lambda weights, *_: seen.extend(name for name, _ in weights)
    )
    monkeypatch.setattr(rlflow.rollout.vllm.engine, "read_back", lambda *_: torch.ones(3))
    engine: Any = VLLMEngine()
    engine._device, engine._llm, engine._dtype = torch.device("cuda"), Sleeper(seen), torch.float32
    engine._pieces, engine._model, engine._model_type, engine._wide_head = (Piece("norm", "n", 3),), None, "", False
    return engine, seen


def test_on_a_gpu_the_cache_gets_its_memory_when_the_weights_are_there(on_gpu: tuple[Any, list[str]]) -> None:
    engine, seen = on_gpu
    for version in range(2):  # the first of an engine that is awake
        engine.wake_up()
        engine.update_weights([[("norm", torch.ones(3))]], version)
        engine.sleep()
    slept = ["empty cache", "wake weights", "norm", "empty cache", "wake kv_cache", "sleep at level 2"]
    assert seen == ["norm", "sleep at level 2", *slept]
    assert engine.policy_version == -1


def test_on_a_gpu_weights_that_are_kept_go_to_the_host_and_return_with_the_cache(
    on_gpu: tuple[Any, list[str]],
) -> None:
    engine, seen = on_gpu
    engine.policy_version = 3
    engine.sleep(keep_weights=True)
    engine.wake_up()
    assert seen == ["sleep at level 1", "empty cache", "wake weights and kv_cache"]
    assert engine.policy_version == 3


def test_the_second_runner_is_refused_on_the_cpu() -> None:
    VLLMEngine(model_runner="v1").check_device(torch.device("cpu"))
    with pytest.raises(
        UserError, match=r"^`model_runner` is 'v2', whose kernels are written in Triton, and the run is on"
    ):
        VLLMEngine(model_runner="v2").check_device(torch.device("cpu"))


def test_a_model_runner_is_that_of_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = import_vllm(allow_untested=False).envs
    monkeypatch.delenv(RUNNER, raising=False)
    found = []
    for name in ("v1", "v2", None):
        with runner_chosen(name):
            found.append(envs.VLLM_USE_V2_MODEL_RUNNER)
            envs.enable_envs_cache()  # as vLLM does when an engine is built
        assert RUNNER not in os.environ
    assert found == [False, True, None]


def test_a_temperature_that_vllm_would_raise_is_refused(engine: RolloutEngine, model: Any) -> None:
    _sync(engine, model)
    with pytest.raises(UserError, match=r"`temperature` is 0\.005, and vLLM samples at 0\.01 or more"):
        engine.generate(PROMPTS, SEEDS, Sampling(4, 0.005, STOP), engine.policy_version)


def test_the_loader_of_vllm_leaves_what_pieces_are_written_to(engine: RolloutEngine, model: Any) -> None:
    perturb(model, seed=4)
    _sync(engine, model)
    check_written(engine, chain.from_iterable(buckets(model)))


def test_without_packing_the_tied_head_again_the_sync_fails(
    engine: RolloutEngine, model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rlflow.rollout.vllm.engine, "pack_heads_again", lambda model: None)
    perturb(model, seed=2)
    if folder.name == "untied":  # sent by its own name, so vLLM packs it
        _sync(engine, model)
        return
    with pytest.raises(WeightSyncError, match=r"held otherwise: model\.embed_tokens\.weight \(in lm_head\.weight\)$"):
        _sync(engine, model)


def test_every_layer_that_keeps_its_old_packed_weight_is_named(
    engine: RolloutEngine, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _sync(engine, model)
    modules = dict(engine._model.named_modules())  # type: ignore[attr-defined]
    packed = [path for path, module in modules.items() if "cpu_linear" in vars(module) and "embed" not in path]
    assert len(packed) == 2 * 4 + 1  # qkv, o, gate_up and down of two layers; the head
    load_weights = engine._load
    for seed, path in enumerate(packed):
        old = modules[path].cpu_linear

        def load_all_but_one(weights: Iterator[tuple[str, Tensor]], path: str = path, old: Any = old) -> None:
            load_weights(weights)
            modules[path].cpu_linear = old

        monkeypatch.setattr(engine, "_load", load_all_but_one)
        perturb(model, seed)
        with pytest.raises(WeightSyncError, match=rf"held otherwise: .*\(in {path}\.weight\)$") as error:
            _sync(engine, model)
        tensors = {"qkv_proj": 3, "gate_up_proj": 2}.get(path.rpartition(".")[2], 1)
        assert error.value.args[0].count("(in") == tensors


def test_every_norm_and_bias_that_keeps_an_old_element_is_named(
    engine: RolloutEngine, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_weights = engine._load
    held = dict(engine._model.named_parameters())  # type: ignore[attr-defined]
    places = [place for place, parameter in held.items() if parameter.dim() == 1 and len(parameter)]
    assert len(places) == 2 * 3 + 1  # two norms and a fused bias in each layer, the last norm
    for place in places:

        def load_and_spoil(weights: Iterator[tuple[str, Tensor]], place: str = place) -> None:
            load_weights(weights)
            held[place].data[-1] += 1e-6

        monkeypatch.setattr(engine, "_load", load_and_spoil)
        with pytest.raises(WeightSyncError, match=rf"held otherwise: [^,]*\(in {place}\)$"):
            _sync(engine, model)
        monkeypatch.undo()


def test_a_bucket_that_is_overwritten_too_early_is_noticed(engine: RolloutEngine, model: Any) -> None:
    def reused() -> Iterator[list[tuple[str, Tensor]]]:
        for name, parameter in model.named_parameters():
            copy = parameter.detach().clone()
            yield [(name, copy)]
            copy.zero_()

    # vLLM keeps the query's weight until key and value are there
    with pytest.raises(WeightSyncError, match=r"held otherwise: model\.layers\.0\.self_attn\.q_proj\.weight \(in"):
        engine.update_weights(reused(), next(VERSIONS))


def test_old_keys_and_values_are_forgotten(engine: RolloutEngine, model: Any) -> None:
    prompt = [[32 + index % 90 for index in range(300)]]  # more than two blocks of the prefix cache
    sampling = Sampling(8, 1.0, STOP)
    for seed in range(2):
        perturb(model, seed=seed)
        completions = engine.generate(prompt, [0], sampling, _sync(engine, model))
        assert logprob_gap(model, prompt, completions) < 1e-4


def test_generating_on_the_cpu_compiles_nothing(engine: RolloutEngine, model: Any) -> None:
    torch.compiler.reset()  # forget what an engine of another test has compiled
    torch._dynamo.utils.counters.clear()
    engine.generate(PROMPTS, SEEDS, Sampling(8, 1.0, STOP), _sync(engine, model))
    assert not torch._dynamo.utils.counters["frames"]


def test_blocks_of_a_prompt_are_found_until_the_next_step_begins(engine: Any, model: Any) -> None:
    prompt, sampling, found = [32 + index % 90 for index in range(100)], Sampling(2, 1.0, STOP), []
    _sync(engine, model)
    for begins in (True, False, True):
        if begins:
            engine.wake_up()
        asked = engine._prompt(prompt, (), {})
        (request,) = engine._llm.generate([asked], [engine._params(sampling, 0, 2)], use_tqdm=False)
        found.append(request.num_cached_tokens)
    assert found == [0, 96, 0]


def test_a_response_depends_on_its_own_seed_alone(engine: RolloutEngine, model: Any) -> None:
    version, sampling = _sync(engine, model), Sampling(24, 1.0, STOP)
    together = engine.generate(PROMPTS, SEEDS, sampling, version)
    backwards = engine.generate(PROMPTS[::-1], SEEDS[::-1], sampling, version)[::-1]
    others = engine.generate(PROMPTS, [seed + 100 for seed in SEEDS], sampling, version)
    assert [completion.token_ids for completion in together] == [completion.token_ids for completion in backwards]
    assert all(one.token_ids != other.token_ids for one, other in zip(together, others, strict=True))


def test_a_response_ends_with_its_stop_token(engine: RolloutEngine, model: Any) -> None:
    version = _sync(engine, model)
    free = engine.generate(PROMPTS, SEEDS, Sampling(24, 1.0), version)
    stop = free[0].token_ids[3]
    stopped = engine.generate(PROMPTS, SEEDS, Sampling(24, 1.0, (stop,)), version)
    for completion, whole in zip(stopped, free, strict=True):
        end = whole.token_ids.index(stop) + 1 if stop in whole.token_ids else 24
        assert completion.token_ids == whole.token_ids[:end]
        assert len(completion.logprobs) == end
        assert completion.finished == (stop in whole.token_ids)


def test_no_prompts_give_no_completions(engine: RolloutEngine, model: Any) -> None:
    assert engine.generate([], [], Sampling(4), _sync(engine, model)) == []


def test_a_prompt_beyond_the_context_is_refused(engine: RolloutEngine, model: Any) -> None:
    with pytest.raises(UserError, match=r"a prompt of 500 tokens and a response of up to 13 exceed .* 512 tokens"):
        engine.generate([[65] * 500], [0], Sampling(13), _sync(engine, model))


def test_a_context_that_the_cache_cut_short_is_reported_with_the_settings(tied: Path) -> None:
    engine = setup(VLLMEngine(kv_cache_gib=5 * 32 / 2**20, max_num_seqs=4), tied)  # 5 blocks of 32 tokens of 1 KiB
    engine.check_context(100, 10)
    with pytest.raises(
        UserError, match=r"exceed the engine's context of \d+ tokens; lower .*, on the CPU `kv_cache_gib`"
    ):
        engine.check_context(500, 12)  # which the model takes
    engine.close()


def test_building_an_engine_leaves_the_processes_random_states_alone(built: tuple[RolloutEngine, bool]) -> None:
    assert built[1]


def test_generating_leaves_the_processes_random_state_alone(engine: RolloutEngine, model: Any) -> None:
    before = torch.get_rng_state()
    engine.generate(PROMPTS, SEEDS, Sampling(4), _sync(engine, model))
    assert torch.equal(torch.get_rng_state(), before)


def test_training_may_still_set_its_threads(engine: RolloutEngine) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)


def test_half_precision_is_read_back_to_the_bit(tied: Path) -> None:
    engine, model = setup(VLLMEngine(kv_cache_gib=0.25), tied, torch.bfloat16), load(tied)
    perturb(model, seed=4)
    report = engine.update_weights(buckets(model), 0)
    assert report.nbytes == 2 * sum(parameter.numel() for parameter in model.parameters())
    load_weights = engine._load

    def load_other(weights: Iterator[tuple[str, Tensor]]) -> None:
        load_weights((name, _next_element(tensor) if "down_proj" in name else tensor) for name, tensor in weights)

    engine._load = load_other  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match=r"held otherwise: model\.layers\.0\.mlp\.down_proj\.weight .*layers\.1"):
        engine.update_weights(buckets(model), 1)
    engine.close()


@torch.no_grad()
def test_a_float32_head_computes_logits_in_float32_of_the_last_weights(tied: Path) -> None:
    asked, folder = VLLMEngine(kv_cache_gib=0.25), tied
    asked.use_float32_head()
    engine, model = setup(asked, folder, torch.float16), load(folder)
    for version in range(2):
        perturb(model, seed=version)
        engine.update_weights(buckets(model), version)  # reads back the head that computes
    hidden = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).half()
    logits = asked._model.compute_logits(hidden)[:, :128]
    assert logits.dtype == torch.float32
    products = hidden.float() @ model.lm_head.weight.half().float().T
    torch.testing.assert_close(logits, products[:, :128], rtol=0, atol=1e-5)
    completions = engine.generate(PROMPTS, SEEDS, Sampling(24, 1.0, STOP), 1)
    assert logprob_gap(model, PROMPTS, completions) < 2e-2  # against float32 throughout
    engine.close()


def _next_element(tensor: Tensor) -> Tensor:
    """`tensor` with its last element changed by the smallest step."""
    changed = tensor.clone()
    changed.view(torch.int16)[-1, -1] += 1
    return changed


def test_float64_is_refused(tied: Path) -> None:
    with pytest.raises(UserError, match=r"vLLM does not run in torch\.float64"):
        setup(VLLMEngine(), tied, torch.float64)
