"""Conversations that are cut off in one step and continued in a later one, with newer weights, in whole runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlflow import CausalLM, Environment, PerSample, PerToken, node
from rlflow.algorithms import GRPO
from rlflow.errors import UserError
from rlflow.strategies import SingleProcess
from rlflow.types import Sampled, WithTexts
from rlflow.values.path import RowPath
from tests.checkpoint.test_checkpoint import StopAfter
from tests.controller.runs import SGD, ZERO2, Fit, Paired, Result, failing_fit, fit, sums
from tests.controller.test_ranks import FLOAT32, difference
from tests.controller.test_separate_roles import fit_with_weights
from tests.ranks import RankPool

PROMPTS, GROUP, STEPS, TURN, LONGEST = 4, 2, 4, 6, 90
PART = 4  # a turn is cut inside, and the next one goes on for a while
STATEFUL = "tests.controller.answering.Stateful"
DRAWING = "tests.controller.answering.Drawing"
Row = dict[str, Any]


class Seen(Sampled, WithTexts, Protocol):
    path: RowPath
    versions: PerToken
    turn: PerToken
    seat: PerSample


@dataclass(eq=False)
class Ended(GRPO):
    """Records the conversations of each step, which have all ended, of this rank."""

    record: list[dict[tuple[int, ...], Row]] = field(default_factory=list)

    @node
    def seen(self, rollout: Seen) -> PerSample:
        rows = {}
        for row, path in enumerate(rollout.path.numbers.tolist()):
            length = int(rollout.lengths[row])
            rows[tuple(path)] = {
                "prompt": rollout.prompt_ids.rows()[row].tolist(),
                "response": rollout.response_ids[row, :length].tolist(),
                "mask": rollout.loss_mask[row, :length].tolist(),
                "turn": rollout.turn[row, :length].tolist(),
                "versions": rollout.versions[row, :length].tolist(),
                "rewards": rollout.returns[row].tolist()[: int(rollout.turns[row])],
                "ended": int(rollout.ended[row]),
                "messages": rollout.messages[row],
                "logprobs": rollout.logprobs[row, :length].tolist(),
            }
        self.record.append(rows)
        return rollout.lengths


def given(policy: Path, folder: Path, strategy: Any = SingleProcess, of: Any = STATEFUL, **settings: Any) -> Fit:
    environment = of if isinstance(of, Environment) else Environment(of, max_turns=3, max_turn_length=TURN)
    lr = settings.pop("lr", SGD.lr)
    actor = CausalLM(str(policy), optimizer=replace(SGD, lr=lr))
    module = Ended(actor, environment=environment, group_size=GROUP, max_response_length=LONGEST)
    data = sums(12, PROMPTS)
    data.chat_template, data.max_prompt_length = True, 120
    return Fit(module, data, folder, strategy, settings={"max_steps": STEPS, "partial_rollout": PART, **settings})


def tokens_of(*results: Result) -> list[dict[tuple[int, ...], Row]]:
    """The rollouts of each step, over these ranks, without logprobs: their last bits depend on other rows."""
    steps = []
    for of_ranks in zip(*(result.record for result in results), strict=True):
        rows = {path: row for of_rank in of_ranks for path, row in of_rank.items()}
        steps.append({path: {name: x for name, x in row.items() if name != "logprobs"} for path, row in rows.items()})
    return steps


@pytest.fixture(scope="module")
def alone(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, list[dict[str, Tensor]]]:
    """With the weights before the first step and after each."""
    return fit_with_weights(given(policy, tmp_path_factory.mktemp("alone")))


def check_versions(records: list[dict[tuple[int, ...], Row]], weights: list[dict[str, Tensor]], policy: Path) -> None:
    """Each token that the policy wrote has the logprob that the weights of its version give it, in float64."""
    models = []
    for version in weights:
        model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64)
        model.load_state_dict({name: weight.double() for name, weight in version.items()}, strict=False)
        models.append(model.eval())
    others = 0.0
    for row in (row for step in records for row in step.values()):
        ids = torch.tensor([[*row["prompt"], *row["response"]]])
        with torch.no_grad():
            each = torch.stack([model(ids).logits[0, len(row["prompt"]) - 1 : -1].log_softmax(-1) for model in models])
        each = each.gather(-1, ids[:, len(row["prompt"]) :, None].expand(len(models), -1, -1))[..., 0]  # [versions, T]
        mask, found = torch.tensor(row["mask"]), torch.tensor(row["logprobs"]).double()
        true = each.gather(0, torch.tensor([row["versions"]]))[0]
        assert torch.allclose(true[mask], found[mask], atol=2e-5)
        others = max(others, float((each - found).abs().amax(dim=0)[mask].max()))
    assert others > 1e-2, "other weights say the same"


def test_every_token_is_of_the_version_that_is_recorded_for_it(
    alone: tuple[Result, list[dict[str, Tensor]]], policy: Path
) -> None:
    result, weights = alone
    check_versions(result.record, weights, policy)
    rows = [row for step in result.record for row in step.values()]
    assert {len(set(row["versions"])) for row in rows} >= {1, 2, 3}
    inside = 0
    for row in rows:
        assert row["versions"] == sorted(row["versions"])
        assert [turn >= 0 for turn in row["turn"]] == row["mask"]
        for turn in range(max(row["turn"]) + 1):
            versions = [at for at, of in zip(row["versions"], row["turn"], strict=True) if of == turn]
            assert 1 <= len(versions) <= TURN
            inside += len(set(versions)) > 1
    assert inside > 3, "turns are cut inside"


def test_conversations_are_whole_and_trained_once(alone: tuple[Result, list[dict[str, Tensor]]]) -> None:
    result = alone[0]
    trained = [path for step in result.record for path in step]
    assert len(trained) == len(set(trained)) == STEPS * PROMPTS * GROUP
    last = result.steps[-1]
    assert (
        last["rollout/draws_total"] * PROMPTS
        == len(trained) // GROUP + last["rollout/surplus"] + last["rollout/unfinished_groups"]
    )
    for row in (row for step in result.record for row in step.values()):
        spoken = [each for each in row["messages"] if each["role"] == "assistant"]
        assert [each["reward"] for each in spoken] == pytest.approx(row["rewards"])
        assert "ended" in row["messages"][-1]
    assert not any(step.get("rollout/restarted") for step in result.steps)


def test_cuts_between_turns_change_no_token_where_weights_do_not(policy: Path, tmp_path: Path) -> None:
    """Turns and parts are a token long, so each cut is between two turns; they are sampled at temperature 1."""
    letters = Environment(STATEFUL, max_turns=3, max_turn_length=1)
    whole = fit(given(policy, tmp_path / "whole", of=letters, lr=0.0, partial_rollout=None))
    parts = fit(given(policy, tmp_path / "parts", of=letters, lr=0.0, partial_rollout=1, max_steps=STEPS + 2))

    def by_path(result: Result) -> dict[tuple[int, ...], Row]:
        rows = {path: row for step in tokens_of(result) for path, row in step.items()}
        return {path: {name: x for name, x in row.items() if name != "versions"} for path, row in rows.items()}

    expected, found = by_path(whole), by_path(parts)
    both = expected.keys() & found.keys()
    assert len(both) > len(expected) // 2
    assert {len(found[path]["rewards"]) for path in both} == {1, 2, 3}
    assert all(found[path] == expected[path] for path in both)


@pytest.fixture(scope="module")
def on_two(policy: Path, tmp_path_factory: pytest.TempPathFactory, ranks2: RankPool) -> list[Result]:
    return ranks2.run(fit, given(policy, tmp_path_factory.mktemp("two"), ZERO2, callbacks=[StopAfter(STEPS)]))


def test_two_ranks_workers_and_a_shared_engine_have_the_same_conversations(
    alone: tuple[Result, list[dict[str, Tensor]]], on_two: list[Result], policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    assert tokens_of(*on_two) == tokens_of(alone[0])
    assert difference(on_two[0].weights, alone[0].weights) < FLOAT32
    worker = Environment(STATEFUL, max_turns=3, max_turn_length=TURN, timeout_s=60, workers=2)
    shared = replace(given(policy, tmp_path, ZERO2, worker), engine=Paired())
    assert tokens_of(*ranks2.run(fit, shared)) == tokens_of(alone[0])


def test_an_environment_without_a_state_waits_where_it_is(
    alone: tuple[Result, list[dict[str, Tensor]]], policy: Path, tmp_path: Path
) -> None:
    result = fit(given(policy, tmp_path / "here", of=DRAWING))
    assert tokens_of(result) == tokens_of(alone[0])
    worker = Environment(DRAWING, max_turns=3, max_turn_length=TURN, timeout_s=60, workers=2)
    in_workers = fit(given(policy, tmp_path / "workers", of=worker, max_steps=2))
    assert tokens_of(in_workers) == tokens_of(alone[0])[:2]


def stopped(policy: Path, folder: Path, ranks2: RankPool, of: str) -> Fit:
    """A run of two ranks that stopped while conversations are in progress, to be resumed."""
    settings = {"save_every_n_steps": 1}
    (first, _) = ranks2.run(fit, given(policy, folder, ZERO2, of, **settings, callbacks=[StopAfter(2)]))
    assert first.steps[-1]["rollout/unfinished_groups"] > 0
    checkpoint = str(folder / "checkpoint/step-00000002")
    return given(policy, folder, ZERO2, of, **settings, callbacks=[StopAfter(STEPS)], ckpt_path=checkpoint)


def test_another_number_of_ranks_continues_conversations_in_progress(
    on_two: list[Result], policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    rest = stopped(policy, tmp_path / "run", ranks2, STATEFUL)
    on_one = fit(replace(rest, folder=tmp_path / "one", strategy=SingleProcess))
    assert tokens_of(on_one) == tokens_of(*on_two)[2:]


def test_an_environment_without_a_state_begins_again_when_a_run_is_resumed(
    policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    rest = stopped(policy, tmp_path / "run", ranks2, DRAWING)
    results = ranks2.run(fit, replace(rest, folder=tmp_path / "rest"))
    anew = [step.get("rollout/restarted", 0.0) for step in results[0].steps]
    assert anew[0] > 0
    assert anew[1:] == [0.0] * (STEPS - 3)
    assert all(min(row["versions"]) >= 2 or len(set(row["versions"])) == 1 for row in results[0].record[-1].values())


def test_masks_and_group_rewards_of_cut_conversations_are_those_of_whole_ones(policy: Path, tmp_path: Path) -> None:
    run = given(policy, tmp_path, of="tests.controller.answering.Compared", max_steps=3)
    run.module.mask_truncated = True
    rows = {path: row for step in fit(run).record for path, row in step.items()}
    assert any(len(set(row["versions"])) > 1 for row in rows.values())
    for path, row in rows.items():
        assert row["mask"] == [turn >= 0 for turn in row["turn"]]
        assert (sum(row["rewards"]) >= 100) == (path[1] == GROUP - 1)
        assert sum(row["rewards"]) < 200


AHEAD: dict[str, Any] = {"placement": {"rollout": 0, "actor": 1}, "max_staleness": 1}


@pytest.mark.parametrize("part", [pytest.param(None, marks=pytest.mark.slow), PART])
def test_a_step_ahead_has_conversations_of_the_weights_that_it_says(
    part: int | None, policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    whole = ranks2.run(fit_with_weights, given(policy, tmp_path, ZERO2, **AHEAD, partial_rollout=part))
    weights = max((kept for _, kept in whole), key=len)
    records = max((result.record for result, _ in whole), key=lambda record: sum(map(len, record)))
    check_versions(records, weights, policy)
    assert all(
        max(row["versions"]) < max(number, 1) + 1 for number, step in enumerate(records) for row in step.values()
    )


def test_games_of_several_seats_are_not_cut_off(policy: Path, tmp_path: Path) -> None:
    run = given(policy, tmp_path, of="tests.controller.answering.Duel")
    with pytest.raises(UserError, match=r"^`module.environment` is an environment .*Duel, which has the seats play"):
        fit(run)


def test_another_group_size_does_not_continue_conversations(policy: Path, tmp_path: Path) -> None:
    fit(given(policy, tmp_path, save_every_n_steps=1, callbacks=[StopAfter(2)]))
    rest = given(policy, tmp_path, ckpt_path="last")
    rest.module.group_size = GROUP + 1  # type: ignore[attr-defined]
    assert "2 responses to a prompt were cut off and are to be continued, and 3 are asked" in failing_fit(rest).error
