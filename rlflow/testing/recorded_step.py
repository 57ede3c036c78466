"""One step of an algorithm on the recorded rows, run in one way, with the results of every node and update."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rlflow.callbacks.hooks import Callbacks
from rlflow.controller import Controller
from rlflow.controller.inputs import NodeInputs
from rlflow.controller.policies import Policies
from rlflow.controller.run import Run
from rlflow.controller.step import Step
from rlflow.dag.node import BATCH, Node
from rlflow.data.loader import Prefetch
from rlflow.data.prompts import PromptData
from rlflow.loggers.trace import Trace
from rlflow.metrics import Metrics
from rlflow.models.causal_lm import CausalLM
from rlflow.models.handle import ForwardPlan, ModelHandle
from rlflow.models.model_arguments import make_models
from rlflow.models.optimizer import Optimizer
from rlflow.models.scalar import RewardModel, ValueModel
from rlflow.module import RLModule, environments, handles
from rlflow.rollout.assignment import EngineSettings
from rlflow.run.prepare import prepare, read_graph
from rlflow.run.setup import join, load_roles, set_up_engines
from rlflow.settings import Settings
from rlflow.strategies import DeepSpeedStrategy, FSDPStrategy, SingleProcess, TrainingStrategy
from rlflow.strategies.distributed import DistributedStrategy
from rlflow.testing import derivative
from rlflow.testing.ranks import TIMEOUT_S
from rlflow.testing.recorded import PICTURES, PROMPTS, Recorded, RecordedReward, parts_of, with_tool, write_model
from rlflow.values.batch import Pairs
from rlflow.values.column_kinds import ColumnKind, PerToken
from rlflow.values.columns import columns, trim
from rlflow.values.each import Each
from rlflow.values.layout import Layout
from rlflow.values.not_sent import NotSent
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Rollout

LR = 0.3  # so that a second update finds other weights
WIDER = 3  # columns of padding that are added
JUNK = {torch.bool: False, torch.int64: 7, torch.int32: 7}  # stands in them
SMALL, LARGE = 24, 4096  # token budgets: micro-batches of a row or two, and all rows in one

Key = tuple[Any, ...]  # the same for a row in every order of the rows: its tokens, or its place
Rows = dict[Key, list[dict[str, Any]]]  # columns by name; several rows may have the same tokens


@dataclass(frozen=True)
class Way:
    """A way to run a step; none should change the gradient.

    Attributes:
        strategy: `plain` is float64, with gradients summed over ranks; `zero2` and `fsdp2` are float32.
        ranks: Number of ranks.
        token_budget: Tokens of a micro-batch.
        packing: Whether forward passes go without padding.
        share_prefixes: Whether rows share the tokens with which they begin.
        backwards: The rows that are in the opposite order: the responses of a prompt, or the prompts.
        spoilt: Places that hold other numbers: padding, which is wider too, or tokens that an environment wrote.
        disturbed: Whether the random generators have another state when the step begins.
        derives: Whether the gradient is compared with the derivative of the loss.
    """

    strategy: Literal["plain", "zero2", "fsdp2"] = "plain"
    ranks: int = 1
    token_budget: int = LARGE
    packing: bool = False
    share_prefixes: bool = False
    backwards: Literal["responses", "prompts"] | None = None
    spoilt: Literal["padding", "masked"] | None = None
    disturbed: bool = False
    derives: bool = False


class Wrong(Exception):
    """A fault of a node in itself; other errors of nodes get the attribute `node` too.

    Args:
        node: Name of the node.
        what: Description of the fault.
    """

    def __init__(self, node: str, what: str) -> None:
        super().__init__(what)
        self.node = node


@dataclass
class Outcome:
    """The results of a step on one rank; or, joined, on all of them.

    Attributes:
        order: Nodes in the order in which they ran.
        values: Rows of a node's value, by path. Generated rows are left out: they are recorded.
        losses: Losses that a train node returned, for each update.
        gradients: The gradient of a role in each update, by name.
        trained_by: The train node of each role.
        derivatives: Distance of a train node's gradients from the derivative of the loss.
        tokens: Keys of the rows that nodes made, by row space and path.
    """

    order: list[str] = field(default_factory=list)
    values: dict[str, dict[tuple[str, tuple[int, ...]], dict[str, Any]]] = field(default_factory=dict)
    losses: dict[str, list[Rows]] = field(default_factory=dict)
    gradients: dict[str, list[dict[str, Tensor]]] = field(default_factory=dict)
    trained_by: dict[str, str] = field(default_factory=dict)
    derivatives: dict[str, float] = field(default_factory=dict)
    tokens: dict[tuple[str, tuple[int, ...]], Key] = field(default_factory=dict)

    @classmethod
    def joined(cls, ranks: list[Outcome]) -> Outcome:
        """The results of all ranks; gradients are the first rank's, the same on all."""
        first = ranks[0]
        whole = cls(first.order, gradients=first.gradients, trained_by=first.trained_by, derivatives=first.derivatives)
        for rank in ranks:
            whole.tokens |= rank.tokens
            for node, rows in rank.values.items():
                whole.values.setdefault(node, {}).update(rows)
            for node, updates in rank.losses.items():
                of_all = whole.losses.setdefault(node, [defaultdict(list) for _ in updates])
                for joined, own in zip(of_all, updates, strict=True):
                    for key, found in own.items():
                        joined[key] += found
        return whole

    def rows(self, node: str) -> Rows:
        """The rows of a node's value, by key."""
        found: Rows = defaultdict(list)
        for place, row in self.values[node].items():
            found[self.tokens.get(place, place)].append(row)
        return found


class Plain(DistributedStrategy):
    """Plain data parallelism in float64: every rank has the whole model, and gradients are summed."""

    precisions = SingleProcess.precisions
    within_setting = "none"

    def __init__(self, token_budget: int, packing: bool, share_prefixes: bool) -> None:
        self._configure_ranks("fp64", ForwardPlan(token_budget, packing, share_prefixes), False, TIMEOUT_S, None)

    def backward(self, name: str, loss: Tensor, last: bool) -> None:
        super().backward(name, loss, last)
        for weight in self.roles[name].model.trained() if last else ():
            if weight.parameter.grad is None:
                weight.parameter.grad = torch.zeros_like(weight.parameter)
            torch.distributed.all_reduce(weight.parameter.grad, group=self._groups_of(name).all)


@dataclass(frozen=True)
class NodeValues(NodeInputs):
    """Records the values that nodes make, row by row.

    Attributes:
        found: Outcome to which the values are added.
        reversed_prompts: Whether the dataset is in the opposite order.
    """

    found: Outcome = field(default_factory=Outcome)
    reversed_prompts: bool = False

    def write_result(self, node: Node, layout: Layout, step: Step) -> None:
        """Record the value that a node made on this rank."""
        if not node.makes_value:
            return
        value, space = step.buffer.get(node.id, layout), step.buffer.space(node.id)
        held = space.held(layout, self.run.rank)
        places = [(space.name, tuple(path)) for path in space.path[held].tolist()]
        if node.makes_rows and (keys := keys_of(value)) is not None:
            self.found.tokens |= zip(places, keys, strict=True)
        for place in places if space.name == BATCH else ():
            number = place[1][0] % len(PROMPTS)
            self.found.tokens[place] = (len(PROMPTS) - 1 - number if self.reversed_prompts else number,)
        self.found.order.append(node.id)
        if node.kind == "rollout" or node.returns is Any:
            return
        rows = rows_of(value, node.returns, space.lengths[held].tolist())
        self.found.values.setdefault(node.id, {}).update(zip(places, rows, strict=False))


def keys_of(value: Any) -> list[Key] | None:
    """The tokens of each row of a value; None where it has none."""
    prompts, responses = (getattr(value, name, None) for name in ("prompt_ids", "response_ids"))
    if not isinstance(prompts, Ragged) or not isinstance(responses, Tensor):
        return None
    return [
        (tuple(prompt.tolist()), tuple(response[:length].tolist()))
        for prompt, response, length in zip(prompts.rows(), responses, value.lengths.tolist(), strict=True)
    ]


def rows_of(value: Any, annotation: Any, lengths: list[int]) -> list[dict[str, Any]]:
    """The numbers of each row, by column, without padding."""
    rows: list[dict[str, Any]] = [{} for _ in lengths]
    for column in columns(annotation):
        data = column.of(value)
        if isinstance(data, NotSent) or column.kind in (ColumnKind.PATH, ColumnKind.JSON):
            continue
        parts = data if isinstance(data, dict) else {column.name: data}
        for name, part in parts.items():
            if column.kind is ColumnKind.SCALAR:
                found = [part] * len(rows)
            else:
                found = list(part.rows() if isinstance(part, Ragged) else part)
            for row, own, length in zip(rows, found, lengths, strict=True):
                row[name] = (own[:length] if column.kind is ColumnKind.TOKEN else own).detach().clone()
    return rows


def small(module: RLModule, folder: Path, parts: tuple[str, ...] = (), pictures: bool = False) -> RLModule:
    """A copy of the module with the seeded models, the recorded reward, and plain gradient descent.

    Roles that make several updates in a step make two here, each over all rows of the step.

    Args:
        module: The algorithm as its user wrote it.
        folder: Folder for the models.
        parts: Names of the reward's parts; empty for those that the module's reward has.
        pictures: Whether the models read pictures.
    """
    given, module = module, copy(module)
    if given.reward is not None:  # which may hold what cannot be copied
        module.reward = RecordedReward(parts or parts_of(given.scorer))
    module = deepcopy(module)
    make_models(module)
    module.config_models = deepcopy(dict(module.config_models))
    models = handles(module) | dict(module.config_models)
    trained = read_graph(deepcopy(module)).trained_roles()
    for number, (role, handle) in enumerate(models.items()):
        has_head = isinstance(handle, RewardModel | ValueModel)
        handle.model = str(write_model(folder / role, number + 1, has_head, sees=pictures))
        handle.epochs, handle.samples_per_update = 2 if handle.several_updates else 1, None
        handle.start_step, handle.gradient_checkpointing, handle.trust_remote_code = 0, False, False
        handle.freeze_vision_tower, handle.vision_tower_lr = False, None  # the seeded model has no tower
        if isinstance(handle, CausalLM):  # and no experts; what is recorded was sampled from all tokens
            handle.moe = None
            handle.top_p, handle.top_k, handle.min_p = 1.0, None, 0.0
        if handle.lora is not None:
            handle.lora = replace(handle.lora, dropout=0.0)
        if role in trained:
            handle.optimizer = Optimizer("sgd", lr=LR, gradient_clipping=0.0)
    return module


def run_step(module: RLModule, rows: list[dict[str, Any]], way: Way, scratch: Path) -> Outcome:
    """Run one step on this rank; called by all ranks of the way.

    Args:
        module: A module from `small`; it is copied.
        rows: Rows from `recorded_rows`.
        way: Way to run the step.
        scratch: An empty folder of this rank's own.
    """
    from lightning.fabric import Fabric

    module = deepcopy(module)
    strategy = _strategy(way)
    if environments(module):
        module._converse = partial(_converse, module)  # type: ignore[method-assign]
    settings = Settings(
        run_dir=str(scratch / "run"),
        max_steps=1,
        devices=way.ranks,
        accelerator="cpu",
        logprob_gap_limit=1e6,  # the recorded logprobs are not the model's
    )
    found = Outcome()
    with ExitStack() as stack:
        if way.strategy == "plain":
            stack.enter_context(derivative.wide_casts())
        run = _prepared(module, rows, way, settings, strategy, scratch)
        Fabric(accelerator="cpu", devices=way.ranks, strategy=strategy.processes).launch()
        join(run, None)
        load_roles(run)
        set_up_engines(run)
        stack.callback(run.rank_engines.close)
        if way.disturbed:
            torch.manual_seed(random.randrange(2**32))
            random.seed()
            np.random.seed()
        prompts = stack.enter_context(Prefetch(run.train, None))
        trace = Trace(scratch / "traces", run.rank, run.transport.world_size)
        stack.callback(trace.close)
        callbacks = Callbacks([], None, module)  # type: ignore[arg-type]
        node_values = NodeValues(run, None, found=found, reversed_prompts=way.backwards == "prompts")
        controller = Controller(run, Policies(run, callbacks), prompts, Metrics(), trace, callbacks, node_values)
        Observer(run, way, found).attach()
        controller.step(0)
        controller.close()
    return found


def _prepared(
    module: RLModule,
    rows: list[dict[str, Any]],
    way: Way,
    settings: Settings,
    strategy: TrainingStrategy,
    scratch: Path,
) -> Run:
    graph = read_graph(module)
    data = PromptData(
        rows[::-1] if way.backwards == "prompts" else rows,
        prompts_per_step=len(rows),
        prompt="question",
        response="answer",
        rejected="worse" if graph.batch_type is Pairs else None,
        images=PICTURES if PICTURES in rows[0] else None,
        chat_template=True if environments(module) or PICTURES in rows[0] else None,
        max_prompt_length=100_000,
        shuffle=False,
    )
    engine = Recorded(way.backwards == "responses", all_differ=graph.filter is not None)
    return prepare(module, data, settings, strategy, EngineSettings(engine), scratch)


def _strategy(way: Way) -> TrainingStrategy:
    if way.strategy == "zero2":
        return DeepSpeedStrategy(2, "fp32", way.token_budget, packing=way.packing, share_prefixes=way.share_prefixes)
    if way.strategy == "fsdp2":
        return FSDPStrategy("fp32", way.token_budget, way.packing, way.share_prefixes)
    if way.ranks > 1:
        return Plain(way.token_budget, way.packing, way.share_prefixes)
    return SingleProcess("fp64", way.token_budget, way.packing, way.share_prefixes)


def _converse(
    module: RLModule, policy: str | None, rows: Any, environment: Any, n: int, temperature: float | None, *_: Any
) -> Rollout:
    """Return recorded conversations in place of those that an environment would hold."""
    return with_tool(module._generate(policy, rows, n, temperature, None, ()), rewards=True)


@dataclass
class LossCall:
    """A call of a train node: one micro-batch.

    Attributes:
        again: Calls the node once more on the same rows; returns its loss.
        held: Values that the node detached.
        loss: The loss, until it is backpropagated.
        weights: The loss's factors in the loss of the update.
    """

    again: Callable[[], Tensor]
    held: derivative.DetachedValues
    loss: Tensor | None = None
    weights: Tensor | None = None


class Observer:
    """Stands between the controller and the nodes of a run: changes their inputs, and records their losses.

    Args:
        run: The run on this rank, with models loaded.
        way: Way to run the step.
        found: Outcome to which the losses are added.
    """

    def __init__(self, run: Run, way: Way, found: Outcome) -> None:
        self._run = run
        self._way = way
        self._found = found
        self._calls: dict[str, list[LossCall]] = defaultdict(list)  # of the update in progress, by role
        self._held: derivative.DetachedValues | None = None
        self._backward, self._step = run.strategy.backward, run.strategy.step

    def attach(self) -> None:
        """Replace the module's nodes and the strategy's updates."""
        module, strategy = self._run.module, self._run.strategy
        for node in self._run.graph.order:
            setattr(module, node.id, partial(self._call, node, getattr(module, node.id)))
        for handle in handles(module).values():
            if isinstance(handle, CausalLM):
                handle.watch = lambda rows, logprobs: None  # it would detach what the node has not
            handle._by_micro_batch = partial(self._score, handle._by_micro_batch)  # type: ignore[method-assign]
        strategy.backward, strategy.step = self.backward, self.step  # type: ignore[method-assign]

    def backward(self, name: str, loss: Tensor, last: bool) -> None:
        """Record the factors of the node's loss, then call the strategy's `backward`."""
        if self._way.derives:
            call = self._calls[name][-1]
            assert call.loss is not None
            (call.weights,) = torch.autograd.grad(loss, call.loss, retain_graph=True)
            call.loss = None
        self._backward(name, loss, last)

    def step(self, name: str, most: float = float("inf")) -> float:
        """Record the gradient, compare it with the derivative of the loss, then call the strategy's `step`."""
        strategy, found = self._run.strategy, self._found
        gradient = {key: value.double().clone() for key, value in strategy.gradients(name).items()}
        found.gradients.setdefault(name, []).append(gradient)
        calls = self._calls.pop(name, [])
        if self._way.derives and calls:
            weights = [weight.parameter for weight in strategy.roles[name].model.trained()]
            node = found.trained_by[name]
            apart = derivative.apart(weights, list(gradient.values()), partial(self._loss, name, calls))
            found.derivatives[node] = max(found.derivatives.get(node, 0.0), apart)
        return self._step(name, most)

    def _call(self, node: Node, method: Callable[..., Any], **values: Any) -> Any:
        try:
            return self._called(node, method, values)
        except Exception as error:
            error.node = node.id  # type: ignore[attr-defined]
            raise

    def _called(self, node: Node, method: Callable[..., Any], values: dict[str, Any]) -> Any:
        spoilt = (
            values
            if node.kind == "rollout"
            else {name: self._spoilt(name, value, node, values) for name, value in values.items()}
        )
        if node.kind == "train":
            return self._train(node, method, spoilt, values)
        result = method(**spoilt)
        if node.kind == "rollout":
            return self._with_tool(node, result)
        return self._narrowed(result, node, values)

    def _with_tool(self, node: Node, result: Any) -> Any:
        """The responses with some tokens that a tool wrote, if a train node learns from them."""
        trained = any(each.kind == "train" and node.id in each.reads for each in self._run.graph.order)
        if not trained or not isinstance(result, Rollout) or len(result.segments.values):
            return result
        return with_tool(result, rewards=False)

    def _train(self, node: Node, method: Callable[..., Any], values: dict[str, Any], given: dict[str, Any]) -> Tensor:
        assert node.role is not None
        self._found.trained_by[node.role] = node.id
        self._found.order += [node.id] if node.id not in self._found.order else []
        call = LossCall(partial(method, **values), derivative.DetachedValues())
        before = _versions(values)
        with self._holding(call.held if self._way.derives else None):
            loss = method(**values)
        if not isinstance(loss, Tensor):
            raise Wrong(node.id, f"returned {type(loss).__name__} and not a tensor of losses")
        if _versions(values) != before:
            raise Wrong(node.id, "changes what it reads in place, so a second epoch would read other numbers")
        if not loss.requires_grad:
            raise Wrong(node.id, "returned a loss without a gradient: all that depends on the weights is detached")
        narrow: Tensor = self._narrowed(loss, node, given)
        self._note(node, narrow, given)
        if self._way.derives:
            call.loss = narrow
            self._calls[node.role].append(call)
        return narrow

    def _note(self, node: Node, loss: Tensor, values: dict[str, Any]) -> None:
        """Record the losses of rows; for losses per token, those in the mask."""
        assert node.role is not None
        updates, number = self._found.losses.setdefault(node.id, []), len(self._found.gradients.get(node.role, []))
        while len(updates) <= number:
            updates.append(defaultdict(list))
        for value in values.values():
            prompts = getattr(value, "prompt_ids", None)
            if isinstance(value, Pairs):
                keys: list[Key] | None = [(tuple(each.tolist()),) for each in prompts.rows()]  # type: ignore[union-attr]
            else:
                keys = keys_of(value)
            if keys is None or loss.shape[:1] != (len(keys),):
                continue
            for row, key in enumerate(keys):
                own = loss[row].detach()
                own = own[value.loss_mask[row]] if loss.dim() > 1 else own
                updates[number][key].append({"": own.clone()})
            return

    @contextmanager
    def _holding(self, held: derivative.DetachedValues | None) -> Iterator[None]:
        self._held = held
        try:
            with nullcontext() if held is None else held.holding():
                yield
        finally:
            self._held = None

    def _score(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """A model's forward pass, within which nothing is recorded or held."""
        return (method if self._held is None else self._held.without(method))(*arguments, **named)

    def _loss(self, role: str, calls: list[LossCall]) -> float:
        """The loss of an update at the present weights, with detached values held at their old ones."""
        handle: ModelHandle = getattr(self._run.module, role)
        total = 0.0
        for call in calls:
            assert call.weights is not None
            with handle.training(), self._holding(call.held.again()):
                loss = call.again()
            handle.take_routed()
            loss = loss[:, : call.weights.shape[1]] if loss.dim() > 1 else loss
            total += float((call.weights.double() * loss.detach().double()).sum())
        return total

    def _spoilt(self, name: str, value: Any, node: Node, values: dict[str, Any]) -> Any:
        """A value that a node reads, with other numbers where none should count."""
        if self._way.spoilt is None or name in node.after:
            return value
        annotation = self._run.graph.type_of(name)
        if isinstance(value, Each):
            return Each(self._changed(value.values, annotation, node, {}), value.counts)
        return self._changed(value, annotation, node, values)

    def _changed(self, value: Any, annotation: Any, node: Node, values: dict[str, Any]) -> Any:
        names = (
            [each.name for each in columns(annotation) if each.kind is ColumnKind.TOKEN]
            if annotation is not Any
            else []
        )
        own = {name: getattr(value, name) if name else value for name in names}
        given = {name: column for name, column in own.items() if isinstance(column, Tensor)}
        if isinstance(getattr(value, "lengths", None), Tensor):  # rows with tokens
            changed = self._other_numbers(value, given)
        else:  # what a node made for each token
            tool = next((each for each in map(_tool, values.values()) if each is not None), None)
            changed = {name: self._spoilt_column(column, node, tool) for name, column in given.items()}
        return changed[""] if "" in changed else replace(value, **changed) if changed else value

    def _other_numbers(self, value: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """The columns per token of rows that have other numbers now."""
        if self._way.spoilt == "padding":
            return {name: _padded(column, value.lengths) for name, column in given.items()}
        tool = _tool(value)
        return {"logprobs": value.logprobs - 3.0 * tool} if tool is not None and "logprobs" in given else {}

    def _spoilt_column(self, column: Tensor, node: Node, tool: Tensor | None) -> Tensor:
        """A node's value for each token, `[B, T, ...]`; its padding is the node's own, so zeros are added to it."""
        if self._way.spoilt == "padding":
            return nn.functional.pad(column, (0, 0) * (column.dim() - 2) + (0, WIDER))
        counts = node.kind == "train" and tool is not None and tool.shape == column.shape
        return column + 3.0 * tool if counts and column.is_floating_point() else column  # type: ignore[operator]

    def _narrowed(self, result: Any, node: Node, values: dict[str, Any]) -> Any:
        """A node's result without the columns of padding that were added to its inputs."""
        if self._way.spoilt != "padding":
            return result
        widths = {width for name, value in values.items() if (width := self._width(name, value)) is not None}
        if isinstance(result, Tensor):
            per_token = node.kind == "train" or node.returns == PerToken
            wider = per_token and result.dim() > 1 and result.shape[1] - WIDER in widths
            return result[:, :-WIDER] if wider else result
        return trim(result, node.returns, max(widths)) if dataclasses.is_dataclass(result) and widths else result

    def _width(self, name: str, value: Any) -> int | None:
        """Columns of a value per token, before padding was added."""
        annotation = self._run.graph.type_of(name) if name in (BATCH, *self._run.graph.nodes) else Any
        for column in columns(annotation) if annotation is not Any else ():
            data = column.of(value.values if isinstance(value, Each) else value)
            if column.kind is ColumnKind.TOKEN and isinstance(data, Tensor):
                return int(data.shape[1])
        return None


def _versions(values: dict[str, Any]) -> list[int]:
    """Number of changes in place of each tensor of these values."""
    fields = [vars(value).values() if dataclasses.is_dataclass(value) else [value] for value in values.values()]
    return [part._version for each in fields for part in each if isinstance(part, Tensor) and not part.is_inference()]


def _tool(value: Any) -> Tensor | None:
    """`[B, T]` bool, the tokens that an environment wrote in rows that have others in their mask; None without rows."""
    mask, lengths = getattr(value, "loss_mask", None), getattr(value, "lengths", None)
    if not isinstance(mask, Tensor) or not isinstance(lengths, Tensor):
        return None
    within = torch.arange(mask.shape[1]) < lengths[:, None]
    return within & ~mask & mask.any(dim=1, keepdim=True)


def _padded(column: Tensor, lengths: Tensor) -> Tensor:
    """A column `[B, T, ...]`, wider, with other numbers where padding is."""
    shape = (len(column), WIDER, *column.shape[2:])
    wide = torch.cat([column, column.new_zeros(shape)], dim=1)
    padding = torch.arange(wide.shape[1]) >= lengths[:, None]
    return wide.masked_fill(padding.view(*padding.shape, *[1] * (column.dim() - 2)), JUNK.get(column.dtype, 3.0))
