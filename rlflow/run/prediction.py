"""`rlflow predict`: responses to the prompts of a dataset, written as JSON Lines as they are made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlflow.callbacks.callback import RunningTrainer
from rlflow.callbacks.hooks import Callbacks
from rlflow.context.generation import pictures_of
from rlflow.controller.run import Run
from rlflow.controller.validation import held_out_sampling
from rlflow.dag.node import BATCH
from rlflow.data.loader import share
from rlflow.data.mixture import settings_of
from rlflow.errors import UserError
from rlflow.module import environments
from rlflow.rollout.sampling import sample
from rlflow.run.agreement import attempt, model_files
from rlflow.run.folder import from_here
from rlflow.run.setup import join
from rlflow.run.validation import loaded
from rlflow.values.path import RowPath

DRAW = 0  # the seed of a response is a function of the run's seed, its row and its number alone


@dataclass(frozen=True)
class PredictionFiles:
    """The files of predictions in a folder.

    Attributes:
        folder: The folder.
    """

    folder: Path

    @property
    def facts(self) -> Path:
        """The facts that responses depend on; if they differ, no file is continued."""
        return self.folder / "facts.json"

    @property
    def responses(self) -> Path:
        """The file of all responses, written after the last one is made."""
        return self.folder / "responses.jsonl"

    def new_part(self, rank: int) -> Path:
        """A new part for responses: the last line of a killed process's part may be torn."""
        number = 0
        while (path := self.folder / f"part-{rank}-{number}.jsonl").exists():
            number += 1
        return path

    def lines(self) -> Iterator[tuple[int, int, str]]:
        """Row, sample and text of each whole line in the parts."""
        for path in [self.responses] if self.responses.exists() else sorted(self.folder.glob("part-*.jsonl")):
            with path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    if line.endswith("\n"):
                        found = json.loads(line)
                        yield found["row"], found["sample"], line

    def join(self) -> None:
        """Make one file of the parts, in the order of rows and samples."""
        whole = {(row, number): line for row, number, line in self.lines()}
        draft = self.responses.with_suffix(".draft")
        draft.write_text("".join(whole[key] for key in sorted(whole)), encoding="utf-8")
        draft.replace(self.responses)
        for path in self.folder.glob("part-*.jsonl"):
            path.unlink()


def predict(run: Run, callbacks: Callbacks, state: RunningTrainer, resolved_config: str | None) -> dict[str, Any]:
    """Write `trainer.val_samples` responses to each prompt of the training rows; called by all ranks.

    A line has the row's place in the dataset, the number of the response, the prompt, the response, whether it ended,
    and its tokens. Each rank writes the responses to its rows as they are made. Started again, it continues with the
    rows that lack responses, on any number of ranks.

    Args:
        run: The run, prepared with `Settings.for_command`.
        callbacks: Not used; no callback is called.
        state: Not used.
        resolved_config: Config as YAML; None for a run without a config.

    Returns:
        `problems`, the number of prompts; `found`, of how many there were responses before; and `path` of the file.
    """
    module, loader = run.module, run.train
    if found := list(environments(module)):
        raise UserError(f"`module.{found[0]}` is an environment, and `predict` writes single responses; leave it out")
    if not run.generates:
        raise UserError(f"{type(module).__name__} generates nothing; take an algorithm that does, such as GRPO")
    join(run, resolved_config)
    layout, transport = run.generating, run.transport
    n, how = run.settings.val_samples, held_out_sampling(run)
    files = PredictionFiles(run.settings.folder)
    facts = hashlib.sha256(
        json.dumps(
            [
                *(loader.scan.digest, model_files(run.paths[run.lead]), n, asdict(how), run.settings.seed),
                {name: asdict(own) for name, own in settings_of(run.data.train).items()},
                *(str(run.strategy.dtype), run.strategy.float32_head, type(run.engines[run.lead]).__name__),
            ]
        ).encode()
    ).hexdigest()
    same = run.is_first and files.facts.exists() and files.facts.read_text() == facts
    resumes: bool = transport.broadcast_json(same, 0, tuple(range(transport.world_size)))
    with loaded(run, resumes) as folder:
        attempt(transport, folder.path, partial(_write_once, files.facts, facts, run.is_first))
        there = sorted({row for row, number, _ in files.lines() if number == n - 1}) if run.is_first else []
        before = set(transport.broadcast_json(there, 0, tuple(range(transport.world_size))))
        rows = loader.rows_of_all(torch.arange(loader.size)).tolist()  # places in the dataset, by id
        left = torch.tensor([each for each, row in enumerate(rows) if row not in before], dtype=torch.int64)
        if transport.rank in layout.ranks and len(left):
            engine = run.validating
            assert engine is not None
            mine = share(len(left), layout.shard(transport.rank), layout.shards)
            with files.new_part(transport.rank).open("w", encoding="utf-8") as file:
                for ids in left[mine.start : mine.stop].split(max(1, run.data.prompts_per_step // layout.shards)):
                    batch = loader.rows_at(ids)
                    rollout = sample(
                        engine,
                        batch,
                        RowPath(ids[:, None], (BATCH,)),
                        n,
                        how,
                        seed=run.settings.seed,
                        draw=DRAW,
                        node="predict",
                        version=0,
                        decode=run.decode,
                        pictures=pictures_of(batch, run.album),
                        of_prompts=loader.own_settings(batch.rows),
                    )
                    if layout.is_leader(transport.rank):
                        read = run.context.reward_input(rollout, 0, 0)
                        for i, text in enumerate(rollout.texts):
                            line = {
                                "row": rows[int(ids[i // n])],
                                "sample": i % n,
                                "prompt": read.prompt(i),
                                "response": text,
                                "finished": bool(rollout.finished[i]),
                                "tokens": int(rollout.lengths[i]),
                            }
                            file.write(json.dumps(line) + "\n")
                        file.flush()
        attempt(transport, folder.path, lambda: None)  # now all have written
        attempt(transport, folder.path, files.join if run.is_first else lambda: None)
    run.rank_engines.close()
    if run.is_first:
        earlier = f", {len(before)} of them before" if before else ""
        print(f"{n} responses to each of {loader.size} prompts{earlier}: {from_here(files.responses)}")
    return {"problems": loader.size, "found": len(before), "path": str(files.responses)}


def _write_once(path: Path, text: str, is_first: bool) -> None:
    if is_first:
        path.write_text(text)
