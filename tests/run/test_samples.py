"""The samples of a step that are logged."""

from __future__ import annotations

import math
from typing import Any

import torch

from rlflow.controller.logged_samples import Samples
from rlflow.databuffer.transport import Transport
from rlflow.environments.environment import defined
from rlflow.environments.host import InProcess
from rlflow.environments.session import Session
from rlflow.environments.template_bridge import TemplateBridge
from rlflow.models.tiny import tiny_tokenizer
from rlflow.rewards.reward import Scores
from rlflow.rollout import Completion
from rlflow.rollout.conversation import Conversation, to_rollout
from rlflow.values.path import RowPath
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Ending, Rollout


def double(number: int) -> int:
    """Double a number.

    Args:
        number: It.
    """
    return 2 * number


def test_conversations_whose_environment_failed_are_shown_first() -> None:
    rows, failed = 6, 4
    definition, bridge = defined(None, [double]), TemplateBridge(tiny_tokenizer())
    held = [Conversation(Session(definition, InProcess(), {}), bridge, [1], []) for _ in range(rows)]
    for place, conversation in enumerate(held):
        conversation.add_turn(Completion((5, 6), (0.0, 0.0), True))
        conversation.end(Ending.FAILED if place == failed else Ending.DONE, "so it is")
    held[failed].messages.append({"role": "user", "content": "?"})
    path = RowPath.of_groups(torch.arange(rows))
    rollout = to_rollout(held, path, [{}] * rows, 0, str, torch.float32)
    samples = Samples(Transport(), 0, str, lambda ids: f"read {ids}", lambda group: group + 100, 4)
    samples.keep(1, rollout, Scores([float(place) for place in range(rows)]))
    kept = samples.take(1)
    assert len(kept) == 4
    assert [each["row"] for each in kept] == [104, 100, 101, 102]
    assert [each["reward"] for each in kept] == [4, 0, 1, 2]
    assert [each["ended"] for each in kept] == ["failed", "done", "done", "done"]
    assert [each.get("read") for each in kept] == ["read [1]", None, None, None], "of conversations"


def written(answers: list[list[int]], paths: list[list[int]], levels: tuple[str, ...], **columns: list[int]) -> Rollout:
    """Answers to prompts whose one token is the id of the prompt; turns of conversations have no messages."""
    rows, longest = len(answers), max(map(len, answers))
    ids = torch.tensor([each + [0] * (longest - len(each)) for each in answers])
    lengths = torch.tensor([len(each) for each in answers])
    given = {name: torch.tensor(each) for name, each in columns.items()}
    own = torch.arange(longest) < lengths[:, None]
    path = RowPath(torch.tensor(paths), levels)
    prompts = Ragged.from_lists([[each[0]] for each in paths])
    zeros, texts = torch.zeros(rows, dtype=torch.int64), [str(each) for each in answers]
    floats, ended = torch.zeros(ids.shape), torch.full((rows,), int(Ending.DONE))
    versions = torch.zeros(ids.shape, dtype=torch.int32)
    return Rollout(
        prompt_ids=prompts, response_ids=ids, loss_mask=own, lengths=lengths, logprobs=floats, finished=zeros == 0,
        path=path, version=zeros, versions=versions, ended=ended, texts=texts, rows=[{}] * rows, **given,
    )  # fmt: skip


def places(rollout: Rollout) -> list[dict[str, Any]]:
    """The places in trees, as samples record them."""
    samples = Samples(Transport(), 0, str, str, lambda group: group, 100)
    samples.keep(0, rollout, Scores([0.0] * len(rollout.texts)))
    told = ("sample", "response", "path", "episode", "continues")
    return [{name: each[name] for name in told if name in each} for each in samples.take(0)]


def test_a_column_of_a_reward_has_null_for_what_json_has_no_number_for() -> None:
    rollout = written([[5], [6], [7], [8]], [[3, 0], [3, 1], [3, 2], [3, 3]], ("batch", "rollout"))
    samples = Samples(Transport(), 0, str, str, lambda group: group, 100)
    samples.keep(0, rollout, Scores([0.0] * 4, columns={"margin": [math.nan, 0.5, -math.inf, "none"]}))
    assert [each["columns"]["margin"] for each in samples.take(0)] == [None, 0.5, None, "none"]


def test_leaves_of_a_trunk_follow_one_another_and_say_where_they_branch_off() -> None:
    # Trunks 5 6 7 8 and 5 6 9 of prompt 3: each is its own first leaf. Other leaves fork after 2 tokens and after 1.
    rollout = written(
        [[5, 6, 7, 8], [5, 6, 9], [5, 6, 1], [5, 2, 2]],
        [[3, 0, 0], [3, 1, 0], [3, 0, 1], [3, 1, 1]],
        ("batch", "trunk", "rollout"),
        inherited=[4, 3, 2, 1],
    )
    assert places(rollout) == [
        {"sample": 0, "response": "[5, 6, 7, 8]", "path": "0.0"},
        {"sample": 1, "response": "[5, 6, 1]", "path": "0.1", "continues": forked("0.0", [5, 6])},
        {"sample": 0, "response": "[5, 6, 9]", "path": "1.0"},
        # 0.0 begins alike, and is of another trunk
        {"sample": 1, "response": "[5, 2, 2]", "path": "1.1", "continues": forked("1.0", [5])},
    ]


def test_rows_of_an_agent_s_episode_say_which_row_they_begin_with() -> None:
    # Rows 0 and 1 are samples of their own. Rows 2 to 4 are one episode: row 3 goes on from two tokens of row 2, row 4
    # is a call that begins anew.
    rollout = written(
        [[1, 2, 3], [1, 2, 9], [1, 2, 4], [1, 2, 5], [7]],
        [[3, 0], [3, 1], [3, 2], [3, 3], [3, 4]],
        ("batch", "rollout"),
        inherited=[0, 0, 0, 2, 0],
        branch=[0, 0, 0, 1, 2],
    )
    assert places(rollout) == [
        {"sample": 0, "response": "[1, 2, 3]"},
        {"sample": 1, "response": "[1, 2, 9]"},
        {"sample": 2, "response": "[1, 2, 4]"},
        {"sample": 3, "response": "[1, 2, 5]", "episode": "2", "continues": forked("2", [1, 2])},
        {"sample": 4, "response": "[7]", "episode": "2"},
    ]


def forked(sample: str, tokens: list[int]) -> dict[str, Any]:
    """The record of a sample that begins with these tokens of another."""
    return {"sample": sample, "tokens": len(tokens), "text": str(tokens)}
