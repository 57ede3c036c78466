"""Several policies in one environment, in whole runs: whose rows there are, and that no others are trained on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow import Batch, CausalLM, Environment, PerSample, Rollout, node
from rlflow.algorithms import GRPO
from rlflow.errors import UserError
from rlflow.rollout.transformers import TransformersEngine
from rlflow.strategies import SingleProcess
from rlflow.trainer import Trainer
from tests.controller.answering import PausedDuel
from tests.controller.policies import paths_of
from tests.controller.runs import FSDP, SGD, Fit, Result, fit, sums, terse
from tests.ranks import RankPool

DUEL = "tests.controller.answering.Duel"
PROMPTS, GROUP = 4, 2
Rows = dict[tuple[int, ...], dict[str, Any]]


@dataclass(eq=False)
class Alone(GRPO):
    """Plays all seats itself."""

    record: list[Rows] = field(default_factory=list)

    @node(role="rollout")
    def rollout(self, batch: Batch) -> Rollout:
        return self.recorded(super().rollout(batch))

    def recorded(self, rollout: Rollout) -> Rollout:
        columns = {
            "prompt": [each.tolist() for each in rollout.prompt_ids.rows()],
            "response": rollout.response_ids.tolist(),
            "mask": rollout.loss_mask.tolist(),
            "seat": rollout.seat.tolist(),
            "reward": rollout.returns.sum(dim=1).tolist(),
            "messages": rollout.messages,
        }
        length = rollout.lengths.tolist()
        self.record.append({})
        for row, path in enumerate(paths_of(rollout)):
            cut = {"response": length[row], "mask": length[row]}
            self.record[-1][path] = {
                name: x[row][: cut[name]] if name in cut else x[row] for name, x in columns.items()
            }
        return rollout


@dataclass(eq=False)
class Against(Alone):
    """Plays against a frozen policy."""

    frozen: str = ""
    takes: str = "opponent"

    def configure_models(self) -> None:
        super().configure_models()
        self.rival = CausalLM(self.frozen, trainable=False, temperature=0.5)

    @node(generates=("actor", "rival"))
    def rollout(self, batch: Batch) -> Rollout:
        players = {self.takes: self.rival}
        return self.recorded(self.actor.converse(batch, self.environment, n=self.group_size, players=players))


def playing(policy: Path, kind: type[Alone] = Alone, duel: str = DUEL, **settings: Any) -> Alone:
    more = {name: settings.pop(name) for name in ("timeout_s", "workers") if name in settings}
    environment = Environment(duel, max_turns=3, max_turn_length=6, **more)
    given = {"environment": environment, "group_size": GROUP, "max_response_length": 90, **settings}
    return kind(CausalLM(str(policy), optimizer=SGD), **given)


def run(module: Alone, folder: Path, strategy: Any = None, **settings: Any) -> Fit:
    data = sums(12, PROMPTS)
    data.chat_template, data.max_prompt_length = True, 120
    more = {} if strategy is None else {"strategy": strategy}
    return Fit(module, data, folder, settings={"max_steps": 2, **settings}, **more)


@pytest.fixture(scope="module")
def alone(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return fit(run(playing(policy), tmp_path_factory.mktemp("alone") / "run"))


@pytest.fixture(scope="module")
def against(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return fit(run(playing(policy, Against, frozen=str(policy)), tmp_path_factory.mktemp("against") / "run"))


def test_self_play_has_a_row_for_each_seat_of_each_game(alone: Result) -> None:
    for step, rows in zip(alone.steps, alone.record, strict=True):
        assert len(rows) == PROMPTS * GROUP * 2
        assert all(row["seat"] == path[-1] % 2 for path, row in rows.items())
        games = [(rows[path], rows[(*path[:-1], path[-1] + 1)]) for path in rows if path[-1] % 2 == 0]
        for player, opponent in games:
            odd = [sum(ord(x) % 2 for x in text) / 4 for text in (*spoken(player), *spoken(opponent))]
            assert player["reward"] + opponent["reward"] == pytest.approx(sum(odd) + 0.5), "one wins, one loses"
            assert player["prompt"] != opponent["prompt"], "each reads its own view"
        assert step["rollout/tokens"] == sum(sum(row["mask"]) for row in rows.values())
        assert len({str(row["response"]) for row in rows.values() if row["response"]}) > len(rows) / 2


def spoken(row: dict[str, Any]) -> list[str]:
    return [each["content"] for each in row["messages"] if each["role"] == "assistant"]


def test_a_game_of_two_seats_is_an_episode_in_the_loss_and_two_rows_in_its_group(policy: Path, tmp_path: Path) -> None:
    module = playing(policy, importance=None, loss_aggregation="episode-mean")  # the ratio is 1
    found = fit(run(module, tmp_path / "run", max_steps=1))
    games: dict[tuple[int, int], list[tuple[float, int]]] = {}  # of each row its advantage, and its tokens
    for path, row in found.record[0].items():
        group = torch.tensor([other["reward"] for of, other in found.record[0].items() if of[0] == path[0]]).double()
        advantage = (row["reward"] - group.mean()) / (group.std() + 1e-6)
        games.setdefault((path[0], path[1] // 2), []).append((float(advantage), sum(row["mask"])))
    assert len(games) == PROMPTS * GROUP
    means = [sum(a * n for a, n in rows) / sum(n for _, n in rows) for rows in games.values()]
    assert found.steps[0]["actor/loss"] == pytest.approx(-sum(means) / len(means), rel=1e-5)


def test_time_in_environments_is_of_games_and_not_of_their_seats(policy: Path, tmp_path: Path) -> None:
    paused = playing(policy, duel="tests.controller.answering.PausedDuel")
    found = fit(run(paused, tmp_path / "run", max_steps=1))
    moves = sum(len(spoken(row)) for row in found.record[0].values())
    assert found.steps[0]["rollout/environment_seconds"] >= PausedDuel.SECONDS * moves / (PROMPTS * GROUP)


def test_games_are_validated_by_the_first_seat(policy: Path, tmp_path: Path) -> None:
    """The first seat wins what the other loses: a mean over both would be 0."""
    data = sums(8, 2, held_out=3)
    data.chat_template, data.max_prompt_length = True, 120
    module = playing(policy, duel="tests.controller.answering.Favoured")
    trainer = Trainer(
        str(tmp_path / "run"),
        accelerator="cpu",
        strategy=SingleProcess(),
        rollout=TransformersEngine(),
        val_samples=2,
    )
    found = trainer.validate(module, data)
    assert [found[f"val/{name}"] for name in ("accuracy", "pass@1", "pass@2")] == [1.0] * 3
    assert found["val/reward"] == found["val/reward_player"] > 90 > -90 > found["val/reward_opponent"]


def test_against_a_frozen_policy_there_are_rows_of_the_calling_policy_s_seat_alone(
    alone: Result, against: Result
) -> None:
    assert {row["seat"] for rows in against.record for row in rows.values()} == {0}
    assert all(len(rows) == PROMPTS * GROUP for rows in against.record)
    first = against.record[0]
    assert {path[-1] for path in first} == set(range(GROUP))
    for path, row in alone.record[0].items():
        if path[-1] == 0 and row["messages"][1]["content"].endswith("moves"):  # this seat begins
            assert first[path]["prompt"] == row["prompt"]
    assert against.steps[0]["actor/loss"] != 0.0
    assert 0 < against.steps[0]["sync/logprob_gap/actor"] < 1e-5


def test_a_rival_ends_its_turns_by_end_tokens_of_its_own(policy: Path, tmp_path: Path) -> None:
    rival = str(terse(policy, tmp_path / "rival"))
    result = fit(run(playing(policy, Against, frozen=rival), tmp_path / "run"))
    heard = [each["content"] for row in result.record[0].values() for each in row["messages"] if each["role"] == "user"]
    assert {text for text in heard if text.startswith("odd")} == {"odd 0"}


def test_the_same_games_are_played_on_two_ranks_and_in_workers(
    against: Result, policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    on_two = ranks2.run(fit, run(playing(policy, Against, frozen=str(policy)), tmp_path / "two", FSDP))
    apart = playing(policy, Against, frozen=str(policy), timeout_s=60, workers=2)
    in_workers = fit(run(apart, tmp_path / "workers", max_steps=1))
    for step in range(2):
        assert on_two[0].record[step] | on_two[1].record[step] == against.record[step]
        for name in ("actor/loss", "actor/grad_norm"):
            assert on_two[0].steps[step][name] == pytest.approx(against.steps[step][name], rel=1e-4)
    assert in_workers.record[0] == against.record[0]


def test_the_reward_of_a_group_as_a_whole_is_added(alone: Result, policy: Path, tmp_path: Path) -> None:
    ranked = "tests.controller.answering.RankedDuel"
    for name, more in (("here", {}), ("workers", {"timeout_s": 60, "workers": 2})):
        held = fit(run(playing(policy, duel=ranked, **more), tmp_path / name, max_steps=1))
        for prompt in {path[0] for path in held.record[0]}:
            group = {path: row for path, row in held.record[0].items() if path[0] == prompt}
            most = max(len(row["messages"]) for row in group.values())
            for path, row in group.items():
                more_than = row["reward"] - alone.record[0][path]["reward"]
                assert more_than == pytest.approx(8.0 * (len(row["messages"]) == most))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"takes": "oponent"}, r"`players` has `oponent`, and .*Duel has the seats player, opponent. Did you mean"),
        (
            {"duel": "tests.controller.answering.Counting"},
            "`players` has `opponent`, and .*Counting has the seats none",
        ),
    ],
)
def test_players_that_cannot_be_are_refused_in_one_line(
    policy: Path, tmp_path: Path, settings: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError, match=line):
        fit(run(playing(policy, Against, frozen=str(policy), **settings), tmp_path / "run"))


class Unnamed(Against):
    @node(generates="actor")
    def rollout(self, batch: Batch) -> Rollout:
        return self.actor.converse(batch, self.environment, players={"opponent": self.rival})


class AgainstByDraws(Against):
    @node(type="filter")
    def drawn(self, batch: Batch) -> PerSample:
        return torch.ones(len(batch.prompt_ids), dtype=torch.bool)

    @node(generates=("rival", "actor"))
    def rollout(self, batch: Batch) -> Rollout:
        return self.actor.converse(batch, self.environment, n=GROUP, players={"opponent": self.rival})


def test_the_age_of_a_game_is_that_of_the_policy_that_is_trained(policy: Path, tmp_path: Path) -> None:
    module = playing(policy, AgainstByDraws, frozen=str(policy))
    assert [step["rollout/staleness"] for step in fit(run(module, tmp_path / "run")).steps] == [0.0, 0.0]


class Stranger(Against):
    @node(generates="actor")
    def rollout(self, batch: Batch) -> Rollout:
        stranger = CausalLM(self.frozen, trainable=False)
        return self.actor.converse(batch, self.environment, players={"opponent": stranger})


class Everyone(Against):
    @node(generates=("actor", "rival"))
    def rollout(self, batch: Batch) -> Rollout:
        players = {"player": self.rival, "opponent": self.rival}
        return self.actor.converse(batch, self.environment, players=players)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Unnamed, "marked to generate with 'actor'; add 'rival' to its `generates`"),
        (Stranger, "`players` has .* for `opponent`, which is not a model of Stranger; assign it to `self`"),
        (Everyone, "`players` has all seats of .*Duel, player, opponent, so none is left for the model that converses"),
    ],
)
def test_a_model_that_cannot_play_is_refused_in_one_line(
    policy: Path, tmp_path: Path, kind: type[Against], line: str
) -> None:
    with pytest.raises(UserError, match=line) as refused:
        fit(run(playing(policy, kind, frozen=str(policy)), tmp_path / "run"))
    assert "\n" not in str(refused.value)
