"""Continued responses: their inherited tokens, their branches, and the child that is trained on shared tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.context.generation import GenerationHistory
from rlflow.errors import UserError
from rlflow.rollout import RolloutEngine, Sampling, TransformersEngine
from rlflow.rollout.sampling import sample, sampling_seed
from rlflow.values.path import RowPath
from rlflow.values.rollout import Ending, Rollout
from tests.families.models import write_family
from tests.rollout.test_partial_responses import batch
from tests.rollout.trained import PROMPTS, buckets, load, perturb, setup

LONGEST = 23
STOPS = (0, 10, 73, 102)  # with these some greedy responses end, and some do not
IDS = torch.arange(10, 10 + len(PROMPTS))


def with_weights(engine: RolloutEngine, folder: Path, request: pytest.FixtureRequest) -> RolloutEngine:
    setup(engine, folder)
    request.addfinalizer(engine.close)
    engine.update_weights(buckets(lively(folder)), 0)
    return engine


def lively(folder: Path) -> Any:
    """A model whose greedy responses do not repeat themselves."""
    model = load(folder)
    perturb(model, seed=2, scale=0.2)
    return model


@pytest.fixture
def plain(request: pytest.FixtureRequest, tied: Path) -> RolloutEngine:
    return with_weights(TransformersEngine(), tied, request)


def responses(engine: RolloutEngine, n: int = 2, longest: int = LONGEST, version: int = 0) -> Rollout:
    """To all prompts."""
    sampling = Sampling(longest, 0.0, STOPS)
    settings = {"seed": 0, "draw": 3, "node": "trunk", "version": version, "decode": str}
    return sample(engine, batch(), RowPath(IDS[:, None], ("batch",)), n, sampling, **settings)


def continued(
    engine: RolloutEngine,
    rows: Rollout,
    n: int = 1,
    temperature: float = 0.0,
    most: int = LONGEST,
    earlier: Tensor | None = None,
    version: int = 0,
) -> Rollout:
    settings = {"seed": 0, "draw": 3, "node": "leaf", "version": version, "decode": str, "longest": LONGEST}
    return sample(engine, rows, rows.path, n, Sampling(most, temperature, STOPS), earlier=earlier, **settings)


def ends(rollout: Rollout) -> Tensor:
    """`[B]` bool, what cannot be continued."""
    return rollout.finished | (rollout.lengths == LONGEST)


def test_a_response_that_was_cut_is_continued_as_it_was_before(plain: RolloutEngine) -> None:
    check_continued(plain, 0)


def check_continued(engine: RolloutEngine, version: int) -> None:
    """Greedily, with an engine that holds `version`: as if it had not been cut."""
    whole = responses(engine, version=version)
    at = torch.arange(len(whole.lengths)) % 8  # 0 too
    again = continued(engine, whole.cut(at), version=version)
    for name in ("response_ids", "lengths", "finished", "versions", "version", "loss_mask"):
        assert torch.equal(getattr(again, name), getattr(whole, name)), name
    assert torch.allclose(again.logprobs, whole.logprobs, rtol=0, atol=2e-5)
    assert again.texts == whole.texts
    assert torch.equal(again.inherited, torch.minimum(at, whole.lengths))
    short = whole.cut(at)
    assert short.ended.tolist() == torch.where(short.finished, Ending.DONE, Ending.TOKENS).tolist()
    assert again.path.levels == ("batch", "trunk", "leaf")
    assert bool(whole.finished.any()), "some end"
    assert bool((~whole.finished).any()), "some are as long as they may be"


def test_inherited_tokens_are_not_generated_again(plain: RolloutEngine) -> None:
    trunk = responses(plain, longest=5)
    leaves = continued(plain, trunk, n=3, temperature=1.0)
    parent = torch.repeat_interleave(torch.where(trunk.finished, 1, 3))
    assert leaves.path.numbers[:, :2].tolist() == trunk.path.numbers[parent].tolist()
    assert torch.equal(leaves.inherited, trunk.lengths[parent])
    inherited, had = leaves.inherited_mask[:, :5], torch.arange(5) < trunk.lengths[parent][:, None]
    assert torch.equal(inherited, had)
    assert not bool(leaves.inherited_mask[:, 5:].any())
    for name in ("response_ids", "logprobs", "versions"):
        assert torch.equal(getattr(leaves, name)[:, :5][had], getattr(trunk, name)[parent][had]), name
    assert bool((leaves.lengths[~trunk.finished[parent]] > 5).all())
    assert leaves.rows == [trunk.rows[row] for row in parent.tolist()]


def test_a_finished_response_has_one_child_which_is_its_copy(plain: RolloutEngine) -> None:
    whole = responses(plain)
    copies = continued(plain, whole, n=3)
    for name in ("response_ids", "logprobs", "lengths", "finished", "loss_mask", "versions"):
        assert torch.equal(getattr(copies, name), getattr(whole, name)), name
    assert copies.path.index.tolist() == [0] * len(whole.lengths)
    assert torch.equal(copies.inherited, whole.lengths)


def test_each_token_is_in_the_loss_mask_of_one_row(plain: RolloutEngine) -> None:
    """Three levels: what a trunk and a branch share with several leaves is the first's of the leaves that stay."""
    trunk = responses(plain, n=1, longest=3)
    branches = continued(plain, trunk, n=2, temperature=1.0, most=4)
    leaves = continued(plain, branches, n=2, temperature=1.0)
    calls = GenerationHistory()
    for made in (trunk, branches, leaves):
        calls.add("actor", [], made)
    had: dict[tuple[int, ...], int] = {
        tuple(path): length
        for made in (branches, leaves)
        for path, length in zip(made.path.numbers.tolist(), made.inherited.tolist(), strict=True)
    }
    every = torch.arange(len(leaves.lengths))
    for chosen in (every, every.flip(0), leaves.path.index.nonzero()[:, 0], every[::3]):
        rows = leaves.take(chosen)
        expected: dict[tuple[Any, ...], tuple[int, ...]] = {}  # of each token: who made it, and its place
        for path, length in sorted(zip(map(tuple, rows.path.numbers.tolist()), rows.lengths.tolist(), strict=True)):
            for place in range(length):
                depth = next(depth for depth in (4, 3, 2) if depth == 2 or place >= had[path[:depth]])
                expected.setdefault((*path[:depth], place), (*path, place))
        mask = calls.returned(rows, depth=1).loss_mask
        found = {(*rows.path.numbers[row].tolist(), place) for row, place in mask.nonzero().tolist()}
        assert found == set(expected.values())
        assert len(found) == len(expected)


def test_a_second_call_trains_the_rest_with_its_own_seeds_and_numbers(
    plain: RolloutEngine,
) -> None:
    trunk = responses(plain, longest=6)
    short, long = trunk.cut(torch.full_like(trunk.lengths, 2)), trunk
    first = continued(plain, short, n=2, temperature=1.0)
    of_rows = torch.bincount(torch.repeat_interleave(torch.where(ends(short), 1, 2)))
    earlier = torch.stack([torch.ones_like(of_rows), of_rows], dim=1)
    second = continued(plain, long, n=2, temperature=1.0, earlier=earlier)
    calls = GenerationHistory()
    for made_by_call in (first, second):
        calls.add("actor", [], made_by_call)
    mask = calls.returned(first.concat(second), depth=2).loss_mask[len(first.lengths) :]
    went_on = ~trunk.finished
    for row, path in enumerate(second.path.numbers.tolist()):
        parent = [tuple(other) for other in trunk.path.numbers.tolist()].index(tuple(path[:2]))
        number = path[2] - int(of_rows[parent])
        assert number >= 0
        length, had = int(trunk.lengths[parent]), int(short.lengths[parent])
        expected = [number == 0 and place >= had for place in range(length)] + [True] * int(
            second.lengths[row] - length
        )
        assert mask[row, : second.lengths[row]].tolist() == expected
        if went_on[parent]:
            prompt = PROMPTS[parent // 2] + trunk.response_ids[parent, :length].tolist()
            seed = sampling_seed(0, 3, "leaf", path[:2], number, call=1)
            (made,) = plain.generate([prompt], [seed], Sampling(LONGEST - length, 1.0, STOPS), 0)
            assert list(made.token_ids) == second.response_ids[row, length : second.lengths[row]].tolist()
    assert first.path.index.max() < second.path.index.max()


def test_a_prompt_that_is_longer_than_prompts_may_be_is_refused(plain: RolloutEngine) -> None:
    most = max(map(len, PROMPTS))
    prompts, settings = (batch(), RowPath(IDS[:, None], ("batch",)), 1, Sampling(1, 0.0, STOPS)), {"decode": str}
    where: dict[str, Any] = {"seed": 0, "draw": 0, "node": "answer", "version": 0, **settings}
    sample(plain, *prompts, **where, longest_prompt=most)
    line = rf"^node `answer` generates from a prompt of {most} tokens, and `data.max_prompt_length` is {most - 1}, for"
    with pytest.raises(UserError, match=line):
        sample(plain, *prompts, **where, longest_prompt=most - 1)


def test_a_response_grows_by_no_more_than_it_is_asked_for(plain: RolloutEngine) -> None:
    trunk = responses(plain, longest=6)
    again = continued(plain, trunk, most=3)
    grown = ~ends(trunk)
    assert bool(grown.any())
    assert bool((again.lengths[grown] <= 9).all())
    assert torch.equal(
        again.finished[grown], torch.isin(again.response_ids[grown, again.lengths[grown] - 1], torch.tensor(STOPS))
    )


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen3_moe", tmp_path_factory.mktemp("models") / "experts")


def test_experts_are_of_the_pass_that_made_each_token(experts: Path, request: pytest.FixtureRequest) -> None:
    engine = TransformersEngine()
    engine.return_experts()
    with_weights(engine, experts, request)
    whole = responses(engine)
    cut = whole.cut(torch.arange(len(whole.lengths)) % 8)
    for kept, row in zip(cut.experts.rows(), range(len(whole.lengths)), strict=True):
        assert len(kept) == whole.prompt_ids.lengths[row] + cut.lengths[row] - 1
    again = continued(engine, cut)
    assert torch.equal(again.experts.lengths, whole.experts.lengths)
    assert torch.equal(again.experts.values, whole.experts.values)
    marked = continued(engine, _with_marked_experts(cut))
    for row, of_row in enumerate(marked.experts.rows()):
        had = len(cut.experts.rows()[row])
        assert bool((of_row[:had] == 77).all()), "those that came with the row are kept"
        assert bool((of_row[had:] < 77).all())


def _with_marked_experts(rollout: Rollout) -> Rollout:
    return replace(rollout, experts=replace(rollout.experts, values=torch.full_like(rollout.experts.values, 77)))
