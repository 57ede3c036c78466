"""Games of two seats with real engines: each seat has its own view, and reads the others' turns as context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.environments.bridge import Message, message
from rlflow.environments.environment import defined
from rlflow.environments.host import InProcess
from rlflow.environments.session import Session
from rlflow.environments.template_bridge import TemplateBridge
from rlflow.errors import UserError
from rlflow.rollout import RolloutEngine, Sampling, TransformersEngine
from rlflow.rollout.conversation import Conversation, Rules, play_game, to_rollout
from rlflow.rollout.conversation_loop import ConversationLoop, EnvironmentCalls, TurnQueue
from rlflow.rollout.sampling import SampleIds, sampling_seed
from rlflow.values.path import RowPath
from rlflow.values.rollout import Ending
from tests.rollout.trained import buckets, load, perturb, setup

PLACES = range(8)  # games of 1, 2, 3, 4 moves, four that one seat begins and four that the other does
DUEL = "tests.controller.answering.Duel"
SPEAKS = {"player": "actor", "opponent": "rival"}
Views = dict[str, Conversation]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlflow.models.tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", layers=1, max_position=512)


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Any]:
    """Two policies of other weights."""
    both = {name: load(folder) for name in ("actor", "rival")}
    for seed, model in enumerate(both.values()):
        perturb(model, seed, scale=0.1)
    return both


@pytest.fixture(scope="module")
def engines(folder: Path, models: dict[str, Any]) -> Iterator[dict[str, RolloutEngine]]:
    both: dict[str, RolloutEngine] = {name: setup(TransformersEngine(), folder) for name in models}
    for name, engine in both.items():
        engine.update_weights(buckets(models[name]), 0)
    yield both
    for engine in both.values():
        engine.close()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def played(
    engines: dict[str, RolloutEngine],
    tokenizer: Any,
    environment: str = DUEL,
    places: Sequence[int] = PLACES,
    prompt: Sequence[Message] = (message("user", "Play."),),
    max_concurrent: int = len(PLACES),
    lockstep: bool = False,
    **rules: Any,
) -> list[Views]:
    """Games of these places, to their ends."""
    settings = {"max_turns": 3, "longest_prompt": 200, "longest": 120, "longest_turn": 6, **rules}
    bridge, definition = TemplateBridge(tokenizer), defined(environment)
    sampling = Sampling(6, 1.0, (tokenizer.eos_token_id, bridge.end))
    queues = {name: TurnQueue(engine, sampling, 0) for name, engine in engines.items()}
    conversations = (
        play_game(
            Session(definition, InProcess()),
            bridge,
            prompt,
            {"question": f"{place}+1"},
            lambda seat, turn, place=place: 100 * place + 10 * len(seat) + turn,
            {seat: Rules(policy, **settings) for seat, policy in SPEAKS.items()},
        )
        for place in places
    )
    calls = EnvironmentCalls(max_concurrent)
    try:
        return ConversationLoop[Views](queues, calls, lockstep).run(conversations, max_concurrent)
    finally:
        calls.close()


def test_logprobs_of_each_seat_are_those_of_its_policy_reading_its_own_view(
    engines: dict[str, RolloutEngine], tokenizer: Any, models: dict[str, Any]
) -> None:
    for views in played(engines, tokenizer):
        for seat, view in views.items():
            ids = torch.tensor([view.prompt + view.tokens])
            with torch.no_grad():
                logits = models[SPEAKS[seat]](input_ids=ids).logits[0, len(view.prompt) - 1 : -1]
            scored = torch.log_softmax(logits, -1).gather(-1, ids[0, len(view.prompt) :, None])[:, 0]
            written = torch.tensor(view.written, dtype=torch.bool)
            torch.testing.assert_close(scored[written], torch.tensor(view.logprobs)[written], atol=1e-5, rtol=0)


def test_a_seat_reads_what_the_game_shows_it_and_speaks_in_its_turns(
    engines: dict[str, RolloutEngine], tokenizer: Any
) -> None:
    """In a game of four moves each seat speaks twice; who begins reads the first message of the game."""
    for place, (first, second) in ((3, ("player", "opponent")), (7, ("opponent", "player"))):
        (views,) = played(engines, tokenizer, places=[place])
        begins, follows = views[first], views[second]
        assert [each["content"] for each in begins.messages[:2]] == ["Play. You are of 2.", "4 moves"]
        assert follows.messages[0]["content"] == "Play. You are of 2."
        roles = [["user", "user", "assistant", "user", "assistant"]] * 2
        assert [[each["role"] for each in view.messages] for view in (begins, follows)] == roles
        for reader, writer, said in ((follows, begins, (1, 2)), (follows, begins, (3, 4)), (begins, follows, (3, 2))):
            odd = sum(ord(character) % 2 for character in writer.messages[said[1]]["content"])
            assert reader.messages[said[0]]["content"] == f"odd {odd}"
        for view in (begins, follows):
            assert tokenizer.decode(view.prompt).count("Play. You are of 2.") == 1
            assert [turn % 2 == 0 for turn in range(3)] == [view.written[at] for at in starts(view)]


def starts(view: Conversation) -> list[int]:
    """Beginnings of its segments."""
    return [sum(view.segments[:count]) for count in range(len(view.segments))]


def test_rewards_are_of_seats_and_one_that_never_spoke_has_an_empty_turn(
    engines: dict[str, RolloutEngine], tokenizer: Any
) -> None:
    for place, views in zip(PLACES, played(engines, tokenizer), strict=True):
        moves, first = 1 + place % 4, place // 4
        order = [("player", "opponent")[(first + move) % 2] for move in range(moves)]
        for seat, view in views.items():
            spoken = [each["content"] for each in view.messages if each["role"] == "assistant"]
            wanted = [sum(ord(character) % 2 for character in text) / 4 for text in spoken] or [0.0]
            wanted[-1] += (1.0 if order[-1] == seat else -1.0) + 0.5 * (seat == "opponent")
            assert view.rewards == pytest.approx(wanted)
            assert (view.turns, view.ended) == (max(1, order.count(seat)), Ending.DONE)
            assert view.segments[0] == 0 or seat in order
            assert view.seat == ("player", "opponent").index(seat)


def test_the_reward_of_a_seat_that_never_spoke_is_on_no_example_of_its_prompt(
    engines: dict[str, RolloutEngine], tokenizer: Any
) -> None:
    """In a game of one move, whose prompt has an example of a turn."""
    prompt = [message("user", "Play."), message("assistant", "so"), message("user", "Play.")]
    (views,) = played(engines, tokenizer, places=[0], prompt=prompt)
    path = RowPath(torch.tensor([[0], [1]]), ("batch",))
    rollout = to_rollout([*views.values()], path, [{}] * 2, 0, tokenizer.decode, torch.float32)
    assert rollout.returns[1].item() == pytest.approx(-0.5), "it lost, and `get_reward` gives 0.5"
    rewarded = [[each["content"] for each in said if "reward" in each] for said in rollout.messages]
    assert rewarded == [[views["player"].messages[-1]["content"]], []]


def test_neither_delays_nor_other_games_change_a_token(engines: dict[str, RolloutEngine], tokenizer: Any) -> None:
    plain = tokens(played(engines, tokenizer, lockstep=True))
    assert tokens(played(engines, tokenizer, "tests.controller.answering.SlowDuel")) == plain
    assert tokens(played(engines, tokenizer, max_concurrent=3)) == plain
    assert tokens(played(engines, tokenizer, places=[5, 6])) == plain[5:7]


def tokens(games: list[Views]) -> list[dict[str, list[int]]]:
    return [{seat: view.prompt + view.tokens for seat, view in views.items()} for views in games]


def test_a_seat_that_cannot_continue_ends_the_game_of_all(engines: dict[str, RolloutEngine], tokenizer: Any) -> None:
    few = played(engines, tokenizer, max_turns=1)
    assert [{view.ended for view in views.values()} for views in few] == [
        {Ending.DONE if place % 4 < 2 else Ending.TURNS} for place in PLACES
    ]
    assert few[3]["opponent"].why == "another seat ended it: the policy had 1 turns, as many as `max_turns` allows"
    assert few[3]["opponent"].rewards[-1] % 0.25 == 0.0, "what `get_reward` says counts"
    short = played(engines, tokenizer, longest=30)
    assert {view.ended for view in short[3].values()} == {Ending.TOKENS}
    assert max(len(view.tokens) for views in short for view in views.values()) <= 30


def test_a_seat_that_has_too_much_to_read_before_it_first_speaks_ends_the_game(
    engines: dict[str, RolloutEngine], tokenizer: Any
) -> None:
    """A prompt that is too long before anybody spoke ends the run: it is of the dataset."""
    wordy = "tests.controller.answering.WordyDuel"
    one, late = played(engines, tokenizer, wordy, places=[0, 1], longest_prompt=60)
    assert {view.ended for view in one.values()} == {Ending.DONE}
    assert {view.ended for view in late.values()} == {Ending.TOKENS}
    assert (late["player"].turns, late["opponent"].turns, late["opponent"].tokens) == (1, 1, [])
    assert late["opponent"].messages[-1]["unread"]
    assert len(late["opponent"].prompt) <= 60
    with pytest.raises(UserError, match=r"begins with \d+ tokens"):
        played(engines, tokenizer, wordy, places=[0], longest_prompt=20)


def test_a_game_that_fails_ends_the_run_or_all_its_conversations(
    engines: dict[str, RolloutEngine], tokenizer: Any
) -> None:
    broken = "tests.controller.answering.BrokenDuel"
    with pytest.raises(UserError, match=r"BrokenDuel` failed at turn \d: `step` raised RuntimeError: broken; correct"):
        played(engines, tokenizer, broken)
    for place, views in zip(PLACES, played(engines, tokenizer, broken, on_failure="mask"), strict=True):
        fails = place % 4 > 0
        for view in views.values():
            assert (view.ended == Ending.FAILED) == fails
            assert not fails or (sum(view.rewards) == 0 and not any(view.written))


def test_the_seed_of_a_turn_is_of_its_row_seat_and_number() -> None:
    parents = RowPath(torch.tensor([[7], [9]]), ("batch",))
    children = SampleIds.of(parents, torch.tensor([4, 4]), "rollout")
    seeds = {
        children.seed(row, run_seed=3, draw=2, turn=turn, seat=seat)
        for row in range(8)
        for turn in range(3)
        for seat in ("", "player", "opponent")
    }
    assert len(seeds) == 8 * 3 * 3
    assert children.seed(5, 3, 2, 1, "player") == sampling_seed(3, 2, "rollout/player", [9], 1, turn=1)
