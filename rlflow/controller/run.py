"""`Run`, a run on one rank: the algorithm, its plan, models and data, and the transport to the other ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.context.node_context import NodeContext
from rlflow.controller.logged_samples import Samples
from rlflow.dag.graph import Graph, scores_rows
from rlflow.dag.node import Node, engine_of
from rlflow.dag.planner import Plan, sync_of
from rlflow.dag.tasks import RunNode, SyncWeights
from rlflow.data.loader import Loader
from rlflow.data.pictures import Album
from rlflow.data.prompts import PromptData
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Transport
from rlflow.models.causal_lm import EMA
from rlflow.module import RLModule, environments, handles
from rlflow.rewards.reward import TrainerState
from rlflow.rollout.assignment import Engines, RankEngines
from rlflow.rollout.engine import RolloutEngine
from rlflow.settings import Settings
from rlflow.strategies.strategy import TrainingStrategy
from rlflow.values.layout import Layout

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


@dataclass(eq=False)
class RunPlan:
    """The part of a run that follows from the algorithm and the number of ranks: graph, layouts, plan, engines.

    Attributes:
        graph: Graph of the module.
        layouts: Layouts of roles by name, and layouts of each policy's engines by `engine_of`.
        plan: Plan of all ranks.
        engines: Engine of each policy, as configured.
        follows: The first language model that is trained, with which validation generates; None if there is none.
    """

    graph: Graph
    layouts: dict[str, Layout]
    plan: Plan
    engines: Engines
    follows: str | None

    @property
    def lead(self) -> str:
        """The role whose tokenizer encodes the data: `follows`, or if that is None the first trained role."""
        return self.follows or self.graph.trained_roles()[0]


@dataclass(eq=False)
class Run(RunPlan):
    """All parts of a run. `rlflow.run.prepare` makes it before processes start; no model is loaded then.

    Attributes:
        module: The algorithm.
        data: Prompts of the run, with resolved columns.
        settings: Settings of the trainer.
        strategy: Strategy that divides training over ranks.
        paths: Model folder or hub name of each role that a node uses.
        policies: Model folder or hub name of each policy that generates, in the graph or to validate.
        configs: The transformers configuration of each role and policy.
        support_bounds: Most tokens that are stored for one token of a response, for each policy that needs them.
        tokenizer: Tokenizer of the lead.
        stop_token_ids: Tokens that end a response of each policy: the end tokens of its tokenizer, of its generation
            config and of the module.
        train: Loader of the training rows.
        validation: Loader of the held-out rows; None if there are none.
        generates: Whether a rollout engine is needed, for the graph or to validate.
        scores_validation: Whether validation generates responses and scores them.
        loss_node: Node whose loss is measured on held-out rows: the lead's train node that reads only `batch`. None if
            there is no such node, or the module has a `validation_step`.
        replays: Whether nodes of an earlier run are run again (`rlflow replay`). Then no response is cut off for the
            next draw, and no update is skipped for a large norm.
        transport: Transport to the other ranks. `rlflow.run.setup.join` sets this attribute and those below it.
        samples: Samples of steps in progress, for the loggers.
        rank_engines: Engines of this rank, by policy.
        context: Context to which the module is attached.
        config: The resolved config, without secrets; None for a run without one.
    """

    module: RLModule
    data: PromptData
    settings: Settings
    strategy: TrainingStrategy
    paths: dict[str, Path]
    policies: dict[str, Path]
    configs: dict[str, PretrainedConfig]
    support_bounds: dict[str, int]
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: dict[str, tuple[int, ...]]
    train: Loader
    validation: Loader | None
    generates: bool
    scores_validation: bool
    loss_node: Node | None
    replays: bool = False
    transport: Transport = field(init=False)
    samples: Samples = field(init=False)
    rank_engines: RankEngines = field(init=False)
    context: NodeContext = field(init=False)
    config: Mapping[str, Any] | None = field(init=False)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.transport.rank

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the run's files and to the terminal."""
        return self.rank == 0

    @cached_property
    def value_layouts(self) -> dict[str, Layout]:
        """The layout in which each value is made, by name."""
        return self.plan.layouts()

    @property
    def scored_as_made(self) -> frozenset[str]:
        """The nodes whose responses reach, unchanged, a node that may score them before all have ended.

        No exchange is between the two, and no task that chooses or joins responses of several draws.
        """
        plan, nodes = self.plan, self.graph.nodes
        if plan.cuts_off or self.replays:
            return frozenset()
        filled = () if plan.dynamic_sampling is None else plan.dynamic_sampling.tasks
        repeated = {task.node_id for task in filled if isinstance(task, RunNode)}
        direct = (
            node.inside
            for node in self.graph.order
            if scores_rows(node)
            and node.inside in node.reads
            and (node.inside in repeated) == (node.id in repeated)
            and plan.exchange(node.inside, node, node.inside) is None
        )
        return frozenset(made for made in direct if made in nodes and nodes[made].generates)

    def in_step(self, space: RowSpace, step: int) -> RowSpace:
        """The rows as those of `step` (from 0), with the seed and the balancing of the run."""
        return space.at(seed=self.settings.seed, step=step, balance=self.settings.balancing)

    @property
    def validating(self) -> RolloutEngine | None:
        """This rank's engine of the policy that is validated; None if it has none."""
        return None if self.follows is None else self.rank_engines.by_policy.get(self.follows)

    @property
    def loaders(self) -> tuple[Loader, Loader | None]:
        """Loaders of the training rows and of the held-out rows."""
        return self.train, self.validation

    @cached_property
    def album(self) -> Album:
        """The pictures of the data, on this rank."""
        return Album(self.train.pictures, None if self.validation is None else self.validation.pictures)

    @property
    def is_scanned(self) -> bool:
        """Whether the rows of the data are scanned; if not, ranks scan them together after they have joined."""
        return all(loader is None or loader.is_scanned for loader in self.loaders)

    @cached_property
    def steps(self) -> int:
        """Number of steps of the run.

        Raises:
            UserError: There are fewer rows than one step needs.
        """
        max_steps, max_epochs = self.settings.max_steps, self.settings.max_epochs
        by_epochs = self.train.steps_per_epoch * (math.inf if max_epochs is None else max_epochs)
        return int(min(by_epochs, math.inf if max_steps is None else max_steps))

    @property
    def generating(self) -> Layout:
        """The layout in which validation, or else the first policy, generates; all ranks if nothing generates."""
        names = [engine_of(policy) for policy in (self.follows, *self.policies) if policy is not None]
        ranks = tuple(sorted({rank for layout in self.layouts.values() for rank in layout.ranks}))
        return next((self.layouts[name] for name in names if name in self.layouts), Layout(ranks, len(ranks)))

    @property
    def stateful(self) -> tuple[str, ...]:
        """Roles whose state is in checkpoints: trained roles, then averages of them."""
        found = handles(self.module)
        return (*self.graph.trained_roles(), *(role for role in self.paths if isinstance(found[role], EMA)))

    def engine_layouts(self) -> dict[str, Layout]:
        """The layout in which each policy generates."""
        return {policy: self.layouts[engine_of(policy)] for policy in self.policies}

    def syncs(self) -> dict[str, SyncWeights]:
        """The tasks that bring weights to the engines of each policy."""
        return {policy: sync_of(policy, self.graph, self.layouts) for policy in self.policies}

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt of all rows; with environments, which add to prompts, `data.max_prompt_length`.

        Prompts that nodes write are not known before the run; `data.max_prompt_length` limits them too.
        """
        if environments(self.module):
            return self.data.max_prompt_length
        return max(loader.scan.longest_prompt for loader in self.loaders if loader is not None)

    def trainer_state(self, step: int, draw: int) -> TrainerState:
        """The progress of the run before this draw of `step` (both from 0), as rewards read it."""
        return TrainerState(step, self.steps, draw / self.train.steps_per_epoch)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def decode_with_special(self, token_ids: Sequence[int]) -> str:
        """The text of token ids with special tokens, as a model reads them."""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        assert isinstance(text, str)
        return text
