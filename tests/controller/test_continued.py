"""Rows that continue rows, in whole runs: their tokens, their training, and the counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlflow import Batch, CausalLM, Optimizer, PerSample, PerToken, Rollout, node
from rlflow.errors import UserError
from rlflow.module import RLModule
from rlflow.strategies import SingleProcess
from rlflow.types import Ragged, TokensWithLossMask, WithLossMask, WithTexts
from tests.controller.policies import paths_of
from tests.controller.runs import FSDP, Fit, OddCharacters, Result, fit, sums
from tests.ranks import RankPool

PROMPTS, TRUNKS, BRANCHES, TRUNK = 4, 2, 3, 4  # of a step, of a prompt, of a trunk; tokens of a trunk
Rows = dict[tuple[int, ...], dict[str, Any]]  # by path


class Continued(WithLossMask, Protocol):
    inherited: PerSample
    inherited_mask: PerToken


class Branching(RLModule):
    """Trunks of a few tokens, each continued several times; a token's weight says which level it is of."""

    stop_token_ids = tuple(range(40, 56))
    max_response_length = 9
    group_size = TRUNKS * BRANCHES

    def __init__(self, model: Path, mask_truncated: bool = False) -> None:
        self.model, self.reward, self.mask_truncated = str(model), OddCharacters(), mask_truncated
        self.record: list[Rows] = []

    def configure_models(self) -> None:
        self.actor = CausalLM(self.model, optimizer=Optimizer("sgd", lr=0.05, gradient_clipping=0.0))

    @node(generates="actor")
    def trunk(self, batch: Batch) -> Rollout:
        rollout: Rollout = self.actor.generate(batch, n=TRUNKS, max_new_tokens=TRUNK)
        return rollout

    @node(generates="actor")
    def rollout(self, trunk: Rollout) -> Rollout:
        rollout: Rollout = self.actor.generate(trunk, n=BRANCHES)
        return self._recorded(rollout)

    @node
    def rewards(self, rollout: WithTexts) -> PerSample:
        return self.reward_function(rollout)

    @node
    def weights(self, rollout: Continued, rewards: PerSample) -> PerToken:
        return torch.where(rollout.inherited_mask, 2.0, 1 + rewards[:, None])

    @node(role="actor", type="train")
    def actor_loss(self, rollout: TokensWithLossMask, weights: PerToken) -> PerToken:
        return -self.actor.logprobs(rollout) * weights

    def _recorded(self, rollout: Rollout) -> Rollout:
        rows = zip(rollout.prompt_ids.rows(), rollout.response_ids, rollout.lengths.tolist(), strict=True)
        said = [{"prompt": prompt.tolist(), "response": ids[:length].tolist()} for prompt, ids, length in rows]
        for row, text, finished, inherited in zip(
            said, rollout.texts, rollout.finished.tolist(), rollout.inherited.tolist(), strict=True
        ):
            row |= {"text": text, "finished": finished, "inherited": inherited}
        self.record.append(dict(zip(paths_of(rollout), said, strict=True)))
        return rollout


class WithinOneNode(Branching):
    """Grows its trunks and branches in one node: nobody sees the trunks."""

    trunk = None  # type: ignore[assignment]

    @node(generates="actor")
    def rollout(self, batch: Batch) -> Rollout:
        trunk: Rollout = self.actor.generate(batch, n=TRUNKS, max_new_tokens=TRUNK)
        self.trunk_lengths = trunk.lengths
        return self._recorded(self.actor.generate(trunk, n=BRANCHES))


def run(module: RLModule, folder: Path, strategy: Any = SingleProcess, **settings: Any) -> Fit:
    return Fit(module, sums(12, PROMPTS), folder, strategy, settings={"max_steps": 2, **settings})


@pytest.fixture(scope="module")
def alone(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return fit(run(Branching(policy), tmp_path_factory.mktemp("alone") / "run"))


def distinct(rows: Rows) -> dict[tuple[Any, ...], tuple[Rows, int, bool]]:
    """Each token that was sampled, once: by the row of the tree that made it, and its place."""
    found: dict[tuple[Any, ...], Any] = {}
    for path, row in rows.items():
        for place in range(len(row["response"])):
            inherited = place < row["inherited"]
            found.setdefault((*(path[:2] if inherited else path), place), (row, place, inherited))
    return found


def worth(row: Rows) -> int:
    return 1 + sum(ord(character) % 2 for character in row["text"])


def loss_of(
    policy: Path,
    rows: Rows,
    count: Any = lambda row, inherited: True,
    weighs: Any = lambda row, inherited: 2.0 if inherited else worth(row),
) -> float:
    """The mean over the tokens that count, in float64, of one sequence at a time."""
    model, terms = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64), []
    for row, place, inherited in distinct(rows).values():
        if not count(row, inherited):
            continue
        ids = torch.tensor([[*row["prompt"], *row["response"][:place]]])
        with torch.no_grad():
            logprob = model(ids).logits[0, -1].log_softmax(-1)[row["response"][place]]
        terms.append(-logprob * weighs(row, inherited))
    return float(torch.stack(terms).mean())


def test_the_loss_is_of_each_token_once(alone: Result, policy: Path) -> None:
    assert alone.steps[0]["actor/loss"] == pytest.approx(loss_of(policy, alone.record[0]), rel=1e-5)


def test_logged_counts_are_those_of_the_sampled_tokens_and_responses(alone: Result) -> None:
    for step, rows in zip(alone.steps, alone.record, strict=True):
        tokens = distinct(rows)
        assert step["trunk/tokens"] + step["rollout/tokens"] == len(tokens)
        assert step["trunk/tokens"] == sum(inherited for _, _, inherited in tokens.values())
        lengths = [len(row["response"]) for row in rows.values()]
        assert step["rollout/responses"] == len(lengths)
        assert step["rollout/length"] == pytest.approx(sum(lengths) / len(lengths))
        assert 0 < step["sync/logprob_gap"] < 1e-5


def test_the_same_tokens_are_sampled_on_two_ranks(
    alone: Result, policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    results = ranks2.run(fit, run(Branching(policy), tmp_path / "run", FSDP))
    for step in range(2):
        rows = results[0].record[step] | results[1].record[step]
        assert {path: row["response"] for path, row in rows.items()} == {
            path: row["response"] for path, row in alone.record[step].items()
        }
        assert results[0].steps[step]["rollout/tokens"] == alone.steps[step]["rollout/tokens"]
        assert results[0].steps[step]["actor/loss"] == pytest.approx(alone.steps[step]["actor/loss"], rel=1e-5)


def test_rows_between_are_not_seen_and_their_tokens_are_the_nodes_own(policy: Path, tmp_path: Path) -> None:
    module = WithinOneNode(policy)
    found = fit(run(module, tmp_path / "run", max_steps=1))
    (rows,), (step,) = found.record, found.steps
    assert {len(path) for path in rows} == {3}, "recorded before they are numbered anew"
    whole = sum(len(row["response"]) for row in rows.values())
    again = sum(row["inherited"] for row in rows.values()) - int(module.trunk_lengths.sum())
    assert step["rollout/tokens"] == whole - again
    # Nothing is inherited from a prompt, so all tokens have the leaf's weight; each is trained once all the same.
    own = {path: {**row, "inherited": 0} for path, row in rows.items()}
    model, terms = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64), []
    for path, row in own.items():
        first = 0 if path[2] == 0 else rows[path]["inherited"]
        ids = torch.tensor([[*row["prompt"], *row["response"]]])
        with torch.no_grad():
            said = model(ids).logits[0, len(row["prompt"]) - 1 : -1].log_softmax(-1)
        logprobs = said.gather(1, ids[0, len(row["prompt"]) :, None])[first:, 0]
        terms.append(-logprobs * (1 + sum(ord(character) % 2 for character in row["text"])))
    assert step["actor/loss"] == pytest.approx(float(torch.cat(terms).mean()), rel=1e-5)


def test_a_token_is_left_out_as_truncated_if_no_row_that_has_it_ended(policy: Path, tmp_path: Path) -> None:
    found = fit(run(Branching(policy, mask_truncated=True), tmp_path / "run", max_steps=1))
    (rows,) = found.record
    ended = {path: row for path, row in rows.items() if row["finished"]}
    trunks, with_end, cut = ({path[:2] for path in some} for some in (rows, ended, rows.keys() - ended.keys()))
    assert with_end & cut, "a trunk has leaves of both kinds"
    assert trunks - with_end, "and one has none that ended"
    assert found.steps[0]["actor/loss"] == pytest.approx(loss_of(policy, ended), rel=1e-5)


def test_partial_rollout_is_refused_with_nodes_that_continue_responses(policy: Path, tmp_path: Path) -> None:
    line = "`trainer.partial_rollout` is set, and `trunk` and `rollout` would have to wait for one another"
    with pytest.raises(UserError, match=line):
        fit(run(Branching(policy), tmp_path / "run", partial_rollout=3))
    with pytest.raises(UserError, match=r"^node `rollout` (samples twice|continues responses), and"):
        fit(run(WithinOneNode(policy), tmp_path / "within", partial_rollout=3))


class LastOfEach(Branching):
    """Returns the last child of each trunk alone."""

    @node(generates="actor")
    def rollout(self, trunk: Rollout) -> Rollout:
        made: Rollout = self.actor.generate(trunk, n=BRANCHES)
        last = torch.cat([made.group[1:] != made.group[:-1], torch.ones(1, dtype=torch.bool)])
        return self._recorded(made.take(last.nonzero()[:, 0]))


def test_inherited_tokens_are_trained_even_if_the_first_sibling_is_left_out(policy: Path, tmp_path: Path) -> None:
    found = fit(run(LastOfEach(policy), tmp_path / "run", max_steps=1))
    (rows,) = found.record
    assert max(path[2] for path in rows) == BRANCHES - 1
    assert len(rows) == PROMPTS * TRUNKS
    assert found.steps[0]["actor/loss"] == pytest.approx(loss_of(policy, rows), rel=1e-5)


class OfConversations(Branching):
    @node(generates="actor")
    def rollout(self, trunk: Rollout) -> Rollout:
        return super().rollout(replace(trunk, segments=Ragged(trunk.lengths, torch.ones_like(trunk.lengths))))


def test_conversations_are_not_continued(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^node `rollout` continues conversations by `generate`, and an environment"):
        fit(run(OfConversations(policy), tmp_path / "run"))


class LongPrompts(WithinOneNode):
    @node(generates="actor")
    def rollout(self, batch: Batch) -> Rollout:
        twice = batch.prompt_ids.each_followed_by(batch.prompt_ids)
        return super().rollout(replace(batch, prompt_ids=twice))


def test_prompts_that_a_node_writes_are_as_long_as_prompts_may_be(policy: Path, tmp_path: Path) -> None:
    long = run(LongPrompts(policy), tmp_path / "run", max_steps=1)
    long.data.max_prompt_length = 7
    with pytest.raises(
        UserError, match=r"^node `rollout` generates from a prompt of \d+ tokens, and .*length` is 7, for"
    ):
        fit(long)


class FromTheDataset(Branching):
    @node(generates="actor")
    def trunk(self, batch: Batch) -> Rollout:
        rollout = super().trunk(batch)
        return replace(rollout.cut(rollout.lengths - 1), finished=rollout.finished)

    @node(generates="actor")
    def rollout(self, trunk: Rollout) -> Rollout:
        assert trunk.texts
        return trunk


def test_texts_of_what_was_cut_are_refused(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^`texts` was not sent here; `cut` shortened the responses; generate from"):
        fit(run(FromTheDataset(policy), tmp_path / "run"))
