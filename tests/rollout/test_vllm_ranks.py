"""vLLM in the processes of a gloo group: one engine for each rank, and one for two."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoTokenizer

from rlflow.models.tiny import write_tiny_model
from rlflow.rollout import Completion, RankInfo, Sampling, VLLMEngine, WeightSyncError
from rlflow.rollout.conversation_loop import SharedCalls
from rlflow.rollout.vllm.process import machines
from tests.ranks import RankPool
from tests.rollout.test_conversation_turns import BrokenEcho, SlowEcho, held
from tests.rollout.trained import PROMPTS, STOP, buckets, check_written, load, logprob_gap, perturb

SAME_SEEDS = [list(range(len(PROMPTS)))] * 2
OWN_SEEDS = [[seed + 100 * rank for seed in range(len(PROMPTS))] for rank in range(2)]


def _setup(folder: Path, tensor_parallel_size: int) -> tuple[VLLMEngine, Any]:
    engine = VLLMEngine(tensor_parallel_size, kv_cache_gib=0.25)
    rank = dist.get_rank()
    engine.setup(str(folder), RankInfo(torch.float32, torch.device("cpu"), rank, 2, rank))
    shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if "cpushm" in line]
    assert all("rlflow-" in line and line.endswith("(deleted)") for line in shared)  # no file stops the next run
    assert shared or tensor_parallel_size == 1
    return engine, load(folder)


def _generate(folder: Path, tensor_parallel_size: int, seeds: list[list[int]]) -> tuple[list[Completion], float, Any]:
    """This rank's completions after two syncs, their gap to the training forward, and conversations of two ranks."""
    engine, model = _setup(folder, tensor_parallel_size)
    for version in range(2):
        perturb(model, version)
        engine.update_weights(buckets(model), version)
    completions = engine.generate(PROMPTS, seeds[dist.get_rank()], Sampling(24, 1.0, STOP), 1)
    conversations_of = _converse(engine, folder) if tensor_parallel_size > 1 else ()
    engine.close()
    assert dist.get_world_size() == 2  # training's process group is still there
    return completions, logprob_gap(model, PROMPTS, completions), conversations_of


def _converse(engine: VLLMEngine, folder: Path) -> tuple[list[list[int]], ...]:
    """The tokens of conversations with environments that answer in any order, and of the same in lockstep."""
    tokenizer, first = AutoTokenizer.from_pretrained(folder), dist.get_rank() == 0

    def bring(message: bytes) -> bytes:
        brought = [message]
        dist.broadcast_object_list(brought)
        return brought[0]

    found = []
    for together, kind in ((False, SlowEcho), (True, SlowEcho if first else BrokenEcho)):  # what is not called is whole
        sharing = SharedCalls(first, bring, 0.1)
        found.append(held(engine, tokenizer, kind, lockstep=together, sharing=sharing, version=1))
    return tuple([each.tokens for each in conversations] for conversations in found)


def _syncs_with_one_element_changed(folder: Path) -> dict[str, str]:
    """The error of a sync, by the tensor whose last element reaches the engine changed."""
    engine, model = _setup(folder, 2)
    load_weights = engine._load
    said = {}
    for version, (changed, _) in enumerate(model.named_parameters()):

        def load_other(weights: Iterator[tuple[str, Tensor]], changed: str = changed) -> None:
            load_weights((name, _last_changed(tensor) if name == changed else tensor) for name, tensor in weights)

        engine._load = load_other  # type: ignore[method-assign]
        try:
            engine.update_weights(buckets(model), version)
            said[changed] = ""
        except WeightSyncError as error:
            said[changed] = str(error).partition("held otherwise: ")[2]
    del engine._load  # type: ignore[attr-defined]
    engine.update_weights(buckets(model), version + 1)
    check_written(engine, chain.from_iterable(buckets(model)))
    engine.close()
    return said


def _last_changed(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[-1] += 1e-3
    return changed


@pytest.mark.slow
def test_an_engine_for_each_rank_answers_with_its_ranks_seeds(ranks2: RankPool, tied: Path) -> None:
    (first, first_gap, _), (second, second_gap, _) = ranks2.run(_generate, tied, 1, OWN_SEEDS, timeout_s=300)
    assert max(first_gap, second_gap) < 1e-4
    assert all(one.token_ids != other.token_ids for one, other in zip(first, second, strict=True))


@pytest.fixture(scope="module")
def one_key_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose one head of keys and values both ranks hold."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "one", layers=2, kv_heads=1, max_position=512)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "untied", "one_key_head"])
def test_an_engine_for_two_ranks_answers_alike_on_both(
    ranks2: RankPool, name: str, request: pytest.FixtureRequest
) -> None:
    """And holds the same conversations, whoever answers first and whether turns are taken together."""
    (first, first_gap, conversations), (second, second_gap, others) = ranks2.run(
        _generate, request.getfixturevalue(name), 2, SAME_SEEDS, timeout_s=300
    )
    assert max(first_gap, second_gap) < 1e-4
    assert first == second
    assert conversations[0] == conversations[1] == others[0] == others[1]
    assert len({len(tokens) for tokens in conversations[0]}) > 1


def _machines(names: list[str]) -> tuple[int, int]:
    """Number of machines that are counted if ranks have these names for theirs, and the number of rounds."""
    rounds = []
    with pytest.MonkeyPatch.context() as patched:
        gather = dist.all_gather
        patched.setattr(socket, "gethostname", lambda: names[dist.get_rank()])
        patched.setattr(dist, "all_gather", lambda *given, **more: rounds.append(gather(*given, **more)))
        return machines(dist.new_group([0, 1], backend="gloo")), len(rounds)


@pytest.mark.parametrize(("names", "expected"), [(["one", "one"], 1), (["one", "two"], 2)])
def test_machines_are_counted_in_one_round(ranks2: RankPool, names: list[str], expected: int) -> None:
    assert ranks2.run(_machines, names) == [(expected, 1)] * 2


def test_each_rank_reads_back_its_own_slice(ranks2: RankPool, untied: Path) -> None:
    first, second = ranks2.run(_syncs_with_one_element_changed, untied, timeout_s=300)
    assert len(second) == 27
    for name in second:
        assert second[name].startswith(f"{name} (in ")  # the last element is the second rank's
        assert (first[name] == "") != ("norm" in name)  # norms are whole on both
