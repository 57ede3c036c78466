"""The parts of `benchmarks/step` compute what rlflow computes, and its summary is worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.step import forward_backward
from benchmarks.step.gemm import forward_operations, training_operations, weights_of_products
from benchmarks.step.recorded_parts import Pass
from benchmarks.step.summary import summary
from benchmarks.step.trl_side import micro_batches
from benchmarks.step.workloads import W1, W2, W4, WORKLOADS, Sizes
from rlflow.models.packing import pack, take
from rlflow.values.batch import TokenRows
from rlflow.values.ragged import Ragged

TINY = replace(W1, name="tiny", sizes=Sizes(hidden_size=32, intermediate_size=48, layers=2, heads=4, kv_heads=2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("step")
    TINY.write(folder, steps=1)
    return folder


def passes() -> list[Pass]:
    """Two micro-batches of an update, as rlflow packs them."""
    generator = torch.Generator().manual_seed(0)
    prompts, responses = (
        [torch.randint(128, (length,), generator=generator).tolist() for length in lengths]
        for lengths in ([3, 5, 2], [4, 9, 1])
    )
    rows = TokenRows.padded(Ragged.from_lists(prompts), Ragged.from_lists(responses))
    halves = [take(rows, torch.tensor(index)) for index in ([0, 1], [2])]
    first, last = (Pass(*pack(half).arguments(), trains=True) for half in halves)
    return [first, replace(last, ends_update=True)]


@pytest.mark.parametrize("critic", [False, True])
def test_all_ways_give_the_same_scores(monkeypatch: pytest.MonkeyPatch, folder: Path, critic: bool) -> None:
    monkeypatch.setattr(forward_backward, "over_ranks", lambda number, _: number)  # of one rank
    monkeypatch.setattr(
        forward_backward, "TOKENS", {"padded": 16, "packed": 16}
    )  # so that there are several micro-batches
    found = {}
    for way in forward_backward.WAYS:
        model = forward_backward.build(way, folder, TINY, critic)
        if critic:  # else all values are 0
            head = (
                model.head
                if isinstance(model, forward_backward.OwnForward)
                else model.get_submodule("model.output_layer")
            )
            head.weight.data.fill_(0.1)
        (update,) = forward_backward.inputs(way, passes())
        assert way == "ours" or len(update) > 1
        with torch.no_grad():
            scores = torch.cat([model(*arguments) for arguments in update])
        assert scores.shape == (14,)  # the responses' tokens
        found[way] = scores.sort().values  # rows are in another order
    torch.testing.assert_close(found["padded"], found["ours"], rtol=0, atol=1e-5)
    torch.testing.assert_close(found["packed"], found["ours"], rtol=0, atol=1e-5)


def test_passes_are_divided_where_updates_end() -> None:
    update = passes()
    assert [len(each) for each in forward_backward.inputs("ours", [*update, *update])] == [2, 2]


def test_operations_are_those_of_products() -> None:
    # Attention: 32 x 8 x (4 + 2 + 2) from hidden states, and 32 x 32 back; feed-forward: 3 x 32 x 48; 2 layers.
    assert weights_of_products(TINY.sizes) == 2 * (2048 + 1024 + 4608)
    # 5 tokens, which attend to 1 + 2 + 3 and 1 + 2: a product of 32 for the score and one for the sum, 2 layers.
    forward = 2 * 15360 * 5 + 4 * 2 * 32 * 9
    assert forward_operations(TINY.sizes, [3, 2]) == forward
    assert training_operations(TINY, [3, 2]) == 3 * forward
    # Of frozen weights no gradient is computed.
    assert training_operations(replace(TINY, lora=W4.lora), [3, 2]) == 3 * forward - 2 * 15360 * 5


def test_the_summary_takes_the_fastest_ways_and_ratios_step_by_step() -> None:
    found = {
        "rlflow_vllm": [10.0, 12.0],
        "rlflow_transformers": [20.0],
        "rlflow_compiled": [8.8],
        "trl_8": [33.0],
        "trl_16": [22.0],
        "gemm_rate": [5e11, 5e11],
        "part_generate_vllm": [4.0, 6.0],
        "gemm_generate": [1.0, 1.5],
        "engine_steps": [100.0, 100.0],
        "model_of_engine_steps": [2.0, 2.0],
        "part_actor_train_ours": [4.0, 4.0],
        "part_actor_train_padded": [5.0, 3.5],
        "gemm_actor_train": [2.0, 2.0],
    }
    told = summary("tiny", found)
    assert told["fastest_ways"] == {"generate": "vllm", "actor_train": "ours"}  # 4 to 4.25
    assert told["ratio_to_parts_spread"] == [12 / 10, 10 / 8]
    assert told["gemm_shares"] == {"generate": 0.25, "actor_train": 0.5}
    assert told["ms_of_engine_step"] == 50
    assert told["ratio_to_trl"] == 2  # 22 to 11
    assert told["ratio_to_trl_compiled"] == 2.5
    assert told["ratio_to_trl_same_engine"] == 1.1


def test_trl_is_tried_with_all_rows_of_a_rank_together_too() -> None:
    assert micro_batches(W1) == [8, 16, 32, 128]
    assert micro_batches(W2) == [8, 16, 32]


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_a_workload_divides_into_ranks_and_updates(workload) -> None:  # type: ignore[no-untyped-def]
    assert workload.rows % (2 * workload.updates * workload.group) == 0
