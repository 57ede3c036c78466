"""Runs whose environment is an agent that owns its loop; `python -m tests.harness.runs FOLDER MODEL` continues one."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlflow import Batch, CausalLM, Harness, PerToken, Rollout, node
from rlflow.algorithms import GRPO
from rlflow.trainer import Trainer
from tests.controller.policies import paths_of
from tests.controller.runs import SGD, Fit, sums
from tests.harness.agents import CRITIC, MODEL
from tests.harness.episodes import AGENTS

LONGEST = 120


@dataclass(eq=False)
class Recorded(GRPO):
    """Records the rows of each step."""

    record: list[dict[tuple[int, ...], dict[str, Any]]] = field(default_factory=list)

    @node(role="rollout")
    def rollout(self, batch: Batch) -> Rollout:
        return self.recorded(super().rollout(batch))

    def recorded(self, rollout: Rollout) -> Rollout:
        rows = {}
        for row, path in enumerate(paths_of(rollout)):
            length = int(rollout.lengths[row])
            rows[path] = {
                "prompt": rollout.prompt_ids.rows()[row].tolist(),
                "response": rollout.response_ids[row, :length].tolist(),
                "mask": rollout.loss_mask[row, :length].tolist(),
                "logprobs": rollout.logprobs[row, :length].tolist(),
                "reward": float(rollout.returns[row].sum()),
                "turn": rollout.turn[row, :length].tolist(),
            }
        self.record.append(rows)
        return rollout


@dataclass(eq=False)
class WithCritic(Recorded):
    """Trains the critic of its agent too, in episodes of its own."""

    of_critic_record: list[Rollout] = field(default_factory=list)

    def configure_models(self) -> None:
        super().configure_models()
        self.critic = CausalLM(self.actor.model, optimizer=SGD, temperature=0.8)

    @node(generates=("actor", "critic"))
    def rollout(self, batch: Batch) -> Rollout:
        players = {CRITIC: self.critic}
        return self.recorded(self.actor.converse(batch, self.environment, n=self.group_size, players=players))

    @node(generates=("actor", "critic"))
    def of_critic(self, batch: Batch) -> Rollout:
        self.of_critic_record.append(self.critic.converse(batch, self.environment, players={MODEL: self.actor}))
        return self.of_critic_record[-1]

    @node(role="critic", type="train")
    def critic_loss(self, of_critic: Rollout) -> PerToken:
        return -self.critic.logprobs(of_critic)


def run(
    policy: Path,
    folder: Path,
    agent: str,
    held_out: int = 0,
    prompts: int = 2,
    kind: type[Recorded] = Recorded,
    other_models: Sequence[str] = (),
    given: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> Fit:
    """A run of one step, with two episodes from each prompt; `given` are settings of the algorithm."""
    harness = Harness(f"{AGENTS}.{agent}", timeout_s=60, max_concurrent=2, other_models=other_models)
    actor = CausalLM(str(policy), optimizer=SGD)
    module = kind(actor, environment=harness, group_size=2, max_response_length=LONGEST, **given)
    data = sums(12, prompts, held_out)
    data.chat_template, data.max_prompt_length = True, LONGEST
    return Fit(module, data, folder, settings={"max_steps": 1, **settings})


def main(folder: Path, policy: Path) -> None:
    """Three steps, from the last checkpoint if there is one; writes the metrics of each."""
    made = run(policy, folder, "kills", max_steps=3, save_every_n_steps=1, ckpt_path="auto")
    Trainer(str(folder), accelerator="cpu", rollout=made.engine, **made.settings).fit(made.module, made.data)
    (folder / "record.json").write_text(json.dumps([list(rows.values()) for rows in made.module.record]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
