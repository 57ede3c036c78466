"""The rows that GAIL's discriminator is trained on."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from rlflow import algorithms
from rlflow.types import Each, Ragged, RowPath


def test_the_discriminator_reads_samples_prompts_and_weighs_by_those_that_count() -> None:
    """An environment adds a token to the prompts 4 and 7 of the dataset; one of 5 samples is cut."""
    ones, mask = torch.ones(2, 1, dtype=torch.int64), torch.ones(5, 1, dtype=torch.bool)
    batch = SimpleNamespace(
        prompt_ids=Ragged.from_lists([[4], [7]]),
        response_ids=ones,
        loss_mask=ones.bool(),
        lengths=ones[:, 0],
        path=RowPath(torch.tensor([[4], [7]]), ("batch",)),
    )
    rollout = SimpleNamespace(
        prompt_ids=Ragged.from_lists([[4, 1], [4, 1], [7, 2], [7, 2], [7, 3]]),
        response_ids=mask.long(),
        loss_mask=mask.index_fill(0, torch.tensor([1]), False),
        lengths=torch.ones(5, dtype=torch.int64),
        pictures=Ragged.from_lists([[], [], [14], [14], [14]]),
    )
    examples = algorithms.GAIL.examples(object.__new__(algorithms.GAIL), batch, Each(rollout, torch.tensor([2, 3])))
    assert [ids.tolist() for ids in examples.prompt_ids.rows()] == [
        [4, 1],
        [7, 2],
        [4, 1],
        [4, 1],
        [7, 2],
        [7, 2],
        [7, 3],
    ]
    assert [ids.tolist() for ids in examples.pictures.rows()] == [[], [14], [], [], [14], [14], [14]]
    assert examples.weights.tolist() == [1, 3, 1, 1, 1, 1, 1]
    assert examples.path.numbers[:, 0].tolist() == [4, 7, 4, 4, 7, 7, 7]
