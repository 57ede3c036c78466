"""All that can be known, and refused, of a run before a process starts or a weight is loaded."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.dag.graph import Graph
from rlflow.dag.node import BATCH, ROLLOUT
from rlflow.dag.planner import Plan, plan
from rlflow.dag.tasks import rank_ranges
from rlflow.data.loader import Loader
from rlflow.data.prompts import PromptData
from rlflow.errors import UserError
from rlflow.models.architecture import check_architecture
from rlflow.models.attention import check_sequence_parallel
from rlflow.models.causal_lm import Averaged, CausalLM, WithoutAdapters
from rlflow.models.context import cached_bytes, check_positions, positions
from rlflow.models.handle import ModelHandle
from rlflow.models.lora import require_peft
from rlflow.models.moe import check_moe
from rlflow.models.tiny import resolve_model
from rlflow.module import RLModule, chooses_prompts, handles, has_validation_step
from rlflow.process.status import refusing_exits
from rlflow.rollout.assignment import Engines, EngineSettings
from rlflow.run.placement import Machines, Placed, followed_role, layouts
from rlflow.strategies.strategy import TrainingStrategy
from rlflow.values.batch import Pairs
from rlflow.values.layout import Layout
from rlflow.workflow.binding import bind

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prepared:
    """A run as planned.

    Attributes:
        graph: Of the module.
        plan: Of all ranks.
        layouts: By role; `rollout` is the engine's.
        engines: Of each policy, as configured.
        follows: The role whose weights the rollout engine generates with; None where none can.
        lead: The followed role, else the first trained one: its tokenizer reads the data.
        paths: Model folder or hub name of each role that a node uses.
        tokenizer: Of the lead.
        stop_token_ids: What ends a response: the end tokens of the tokenizer, of the model's generation config and of
            the module.
        train: Loader of the training rows.
        validation: Loader of the held-out rows; None without.
        max_steps: Steps at most.
        max_epochs: Passes over the training rows at most.
        generates: Whether a rollout engine is needed, for the graph or to validate.
        scores_validation: Whether validation generates responses and scores them.
    """

    graph: Graph
    plan: Plan
    layouts: dict[str, Layout]
    engines: Engines
    follows: str | None
    lead: str
    paths: dict[str, Path]
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    train: Loader
    validation: Loader | None
    max_steps: int | None
    max_epochs: int | None
    generates: bool
    scores_validation: bool

    @property
    def loaders(self) -> tuple[Loader, Loader | None]:
        """Of the training rows, and of those held out."""
        return self.train, self.validation

    @property
    def is_scanned(self) -> bool:
        """Whether it is known what the rows are; else ranks that have joined find out together."""
        return all(loader is None or loader.is_scanned for loader in self.loaders)

    @cached_property
    def steps(self) -> int:
        """Of the run.

        Raises:
            UserError: There are fewer rows than one step takes.
        """
        by_epochs = self.train.steps_per_epoch * (math.inf if self.max_epochs is None else self.max_epochs)
        return int(min(by_epochs, math.inf if self.max_steps is None else self.max_steps))

    @property
    def longest_prompt(self) -> int:
        """In tokens, of all rows that are kept."""
        return max(loader.scan.longest_prompt for loader in self.loaders if loader is not None)


def read_graph(module: RLModule) -> Graph:
    """The module's checked graph, its models configured but not loaded.

    Raises:
        UserError: A size is below 1, a model of the config cannot be, or the graph has problems; all are named.
    """
    for name in ("group_size", "max_response_length", "max_draws"):
        if (size := getattr(module, name)) < 1:
            raise UserError(f"`{name}` is {size}; give 1 or more")
    if not 0 < module.temperature < math.inf:
        raise UserError(f"`temperature` is {module.temperature}; it divides the logits, so give more than 0")
    module.configure_models()
    told = bind(module)
    return Graph.read(module, handles(module), told)


@refusing_exits()
def prepare(
    module: RLModule,
    data: PromptData,
    *,
    seed: int,
    machines: Machines,
    engines: EngineSettings,
    placement: Mapping[str, Placed] | None,
    max_staleness: int,
    cuts_off: bool,
    packing: bool,
    max_steps: int | None,
    max_epochs: int | None,
    limit_val_batches: int | None,
    scratch: Path,
) -> Prepared:
    """Check and plan a run.

    Args:
        module: The algorithm.
        data: Its prompts.
        seed: Of the order of rows.
        machines: The ranks there are.
        engines: What generates, as configured.
        placement: Where roles live that are not on all ranks.
        max_staleness: Steps that generation runs ahead of training.
        cuts_off: Whether long responses are cut off, and go on with the next draw of prompts.
        packing: Whether forward passes are without padding.
        max_steps: Steps at most.
        max_epochs: Passes over the data at most.
        limit_val_batches: Validation batches of `data.prompts_per_step` prompts at most.
        scratch: Folder for the embedded model.

    Raises:
        UserError: Something of this cannot work.
    """
    graph = read_graph(module)
    _check_sides(module, graph, data)
    follows = followed_role(module, graph)
    policies = [] if follows is None else [follows]
    assigned = engines.assigned(policies)
    tensor_parallel_size = (engines.rollout if follows is None else assigned[follows]).tensor_parallel_size
    placed = layouts(module, graph, machines, tensor_parallel_size, placement)
    planned = plan(graph, placed, machines.world_size, follows, max_staleness, cuts_off)
    paths = {
        role: resolve_model(handles(module)[role].model, scratch, _said_by(module, role))
        for role in _loaded(module, graph)
    }
    for role, path in paths.items():
        config = load_config(path)
        check_architecture(config, _said_by(module, role), isinstance(handles(module)[role], CausalLM))
        if placed[role].copies > 1:
            check_sequence_parallel(config, placed[role].copies, role, packing)
        _check_moe(handles(module)[role], role, config, follows, cuts_off, packing and placed[role].copies == 1)
    assigned.check_shared(
        {policy: load_config(paths[policy]) for policy in policies}, dict.fromkeys(policies, placed[ROLLOUT])
    )
    lead = follows or graph.trained_roles()[0]
    tokenizer = load_tokenizer(paths[lead])
    _require_same_vocabulary(paths, lead, tokenizer)
    _require_end(planned, max_steps, max_epochs, chooses_prompts(module))
    ranks = machines.world_size
    train = Loader(data.train, data, tokenizer, seed, ranks=ranks)
    held_out = None if limit_val_batches is None else limit_val_batches * data.prompts_per_step
    scores_validation = data.validation is not None and follows is not None and module.reward is not None
    if data.validation is not None and not scores_validation and not has_validation_step(module):
        raise UserError(_nothing_to_validate(module, follows))
    if data.validation is not None and has_validation_step(module):
        _require_one_place(module, paths, placed, lead)
    validation = None if data.validation is None else Loader(data.validation, data, tokenizer, seed, held_out, ranks)
    samples = any(node.kind == "rollout" for node in graph.order)
    return Prepared(
        graph=graph,
        plan=planned,
        layouts=placed,
        engines=assigned,
        follows=follows,
        lead=lead,
        paths=paths,
        tokenizer=tokenizer,
        stop_token_ids=stop_tokens(paths[lead], tokenizer, module.stop_token_ids),
        train=train,
        validation=validation,
        max_steps=max_steps,
        max_epochs=max_epochs,
        generates=samples or scores_validation,
        scores_validation=scores_validation,
    )


def _check_moe(
    handle: ModelHandle, role: str, config: PretrainedConfig, follows: str | None, cuts_off: bool, whole: bool
) -> None:
    """Refuse settings of experts that the model, the algorithm or how rows are fed to the model cannot follow."""
    moe = handle.moe if isinstance(handle, CausalLM) else None
    if moe is None:
        return
    check_moe(config, f"`moe` of `{role}`")
    if moe.watches and not whole:
        raise UserError(
            f"`moe` of `{role}` has `routing_replay` or `router_aux_loss_coef`, which are of whole packed sequences;"
            " set the strategy's `packing` to true, and do not let ranks divide the role's sequences"
        )
    if handle.replays_routing and role != follows:
        raise UserError(
            f"`moe.routing_replay` is set for `{role}`, and no rollout engine generates with its weights, whose experts"
            " could be replayed; leave it out"
        )
    if handle.replays_routing and cuts_off:
        raise UserError(
            "`moe.routing_replay` and `trainer.partial_rollout` are set; the experts of a response that several"
            " policies generated are not kept. Leave out one of them"
        )


def check_rows(prepared: Prepared, module: RLModule, strategy: TrainingStrategy) -> None:
    """Check what the scanned rows decide: that there are enough, and that models and engines take the longest.

    Raises:
        UserError: Something of this cannot work.
    """
    prepared.train.require_enough()
    prompt, response = prepared.longest_prompt, module.max_response_length
    longest_row = max(loader.scan.longest_row for loader in prepared.loaders if loader is not None)
    for role, path in prepared.paths.items():
        config = load_config(path)
        check_positions(config, longest_row, role, "the longest row of the data")
        if prepared.generates:
            of = f"a prompt of {prompt} tokens and a response of up to {response}"
            check_positions(config, prompt + response, role, of)
    for policy, engine in prepared.engines.own.items() if prepared.generates else ():
        config = load_config(prepared.paths[policy])
        engine.check_lengths(
            prompt,
            response,
            positions=positions(config),
            token_bytes=cached_bytes(config, strategy.dtype, engine.tensor_parallel_size),
            on_cpu=strategy.root_device.type == "cpu",
        )


def _require_one_place(module: RLModule, roles: Collection[str], placed: Mapping[str, Layout], lead: str) -> None:
    """A `validation_step` may call any model, and runs on the ranks of the lead."""
    for role in roles:
        if placed[role].ranks != placed[lead].ranks:
            raise UserError(
                f"the `validation_step` of {type(module).__name__} runs on the {rank_ranges(placed[lead].ranks)} of"
                f" `{lead}`, and `{role}` lives on {rank_ranges(placed[role].ranks)}; place both on the same ranks, or"
                " leave `data.validation` out"
            )


def _said_by(module: RLModule, role: str) -> str:
    """The setting that names a role's model, such as `critic_path`."""
    model = handles(module)[role].model
    return next((f"`{name}`" for name, value in vars(module).items() if value == model), f"the model of `{role}`")


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a model's folder, or of that hub name.

    Raises:
        UserError: There is none to be had.
    """
    from transformers import AutoTokenizer

    with _found("tokenizer", path):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    return tokenizer


def load_config(path: Path) -> PretrainedConfig:
    """The configuration in a model's folder, or of that hub name.

    Raises:
        UserError: There is none to be had.
    """
    from transformers import AutoConfig

    with _found("configuration", path):
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
    return config


@contextmanager
def _found(part: str, path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise UserError(
                f"`model` is {str(path)!r}, whose {part} is code that lies beside it (`auto_map`), and rlflow runs no"
                " code of a model; take one that transformers knows by itself"
            ) from error
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"`model` is {str(path)!r}, whose {part} cannot be loaded ({reason}); check the name"
        ) from error


def _require_same_vocabulary(paths: Mapping[str, Path], follows: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Every role reads the token ids that the followed one writes."""
    vocabulary = tokenizer.get_vocab()
    for role, path in paths.items():
        if path == paths[follows]:
            continue
        other = load_tokenizer(path).get_vocab()
        differing = {token for token, _ in vocabulary.items() ^ other.items()}
        if differing:
            token = min(differing)
            raise UserError(
                f"`{role}` is {str(path)!r}, whose tokenizer is not that of `{follows}`, {str(paths[follows])!r}:"
                f" {token!r} is {other.get(token)} there and {vocabulary.get(token)} here, one of {len(differing)}"
                " tokens that differ; give a model with the same vocabulary"
            )


def stop_tokens(path: Path, tokenizer: PreTrainedTokenizerBase, more: tuple[int, ...]) -> tuple[int, ...]:
    """All tokens that end a response, ascending."""
    from transformers import GenerationConfig

    found = {*more, tokenizer.eos_token_id}
    if not path.is_dir() or (path / "generation_config.json").is_file():
        of_model = GenerationConfig.from_pretrained(path).eos_token_id
        found |= set(of_model) if isinstance(of_model, list) else {of_model}
    return tuple(sorted(found - {None}))


def updates_per_step(module: RLModule, role: str, prompts_per_step: int) -> int:
    """Optimizer steps of a trained role in one step of the run."""
    handle = handles(module)[role]
    samples = prompts_per_step * module.group_size
    return handle.epochs * math.ceil(samples / (handle.samples_per_update or samples))


def updates_of_run(module: RLModule, role: str, data: PromptData, steps: int) -> int:
    """Optimizer steps of a trained role in a run of so many steps; those before its `start_step` make none."""
    trained = max(0, steps - handles(module)[role].start_step)
    return trained * updates_per_step(module, role, data.prompts_per_step)


def table(module: RLModule, data: PromptData, prepared: Prepared, world_size: int, token_budget: int) -> list[str]:
    """The batch sizes that follow from the configuration, a line each."""
    prompts, samples = data.prompts_per_step, data.prompts_per_step * module.group_size
    rollout = prepared.layouts[ROLLOUT]
    lines = [
        f"ranks {world_size}, steps {prepared.steps}, training rows {prepared.train.size},"
        f" validation rows {prepared.validation.size if prepared.validation else 0}",
        f"per step: {prompts} prompts x {module.group_size} = {samples} samples;"
        f" per rank about {prompts / rollout.shards:g} prompts, {samples / rollout.shards:g} samples"
        f"{_where(rollout, world_size)}",
    ]
    for role in sorted(prepared.graph.trained_roles()):
        updates = updates_per_step(module, role, prompts)
        of, layout = handles(module)[role].samples_per_update or samples, prepared.layouts[role]
        start = handles(module)[role].start_step
        lines.append(
            f"{role}: {updates} update(s) per step of {of} samples, about {of / layout.shards:g} per rank"
            f"{_where(layout, world_size)}, in micro-batches of at most {token_budget} tokens"
            f"{f', from step {start + 1} on' if start else ''}"
        )
    if prepared.graph.filter is not None:
        filled = f"filter {prepared.graph.filter.id}: {prompts} prompts a draw until a step has {prompts} groups"
        lines.append(f"{filled}, at most {module.max_draws} draws")
    elif prepared.plan.fill is not None:
        lines.append(f"long responses are cut off: {prompts} prompts a draw until {prompts} groups have ended")
    dropped = prepared.train.scan.dropped
    if dropped:
        lines.append(f"dropped {dropped} overlong training rows")
    return lines + unclipped(module, prepared, prompts)


def unclipped(module: RLModule, prepared: Prepared, prompts_per_step: int) -> list[str]:
    """A warning, where a loss that nothing holds near the policy that sampled meets samples of older weights."""
    updates = max(updates_per_step(module, role, prompts_per_step) for role in prepared.graph.trained_roles())
    staleness, ignores = prepared.plan.max_staleness, module.ignores_sampler
    stale = {
        f"`trainer.max_staleness` is {staleness}": ignores and staleness > 0,
        "`trainer.partial_rollout` continues responses with newer weights": ignores and prepared.plan.cuts_off,
        f"a step makes {updates} updates": module.unclipped and updates > 1,
    }
    return [
        f"warning: {why}, and the loss of {type(module).__name__} has no clip, cap or mask that holds the policy near"
        f" the one that sampled; {_WHAT_HOLDS}"
        for why, holds in stale.items()
        if holds
    ][:1]


_WHAT_HOLDS = (
    "set `importance` with `anchor: old`, or take DPPO, OffPolicySequenceMasking, or GRPO with `anchor: rollout`, whose"
    " clip is then around it"
)


def _where(layout: Layout, world_size: int) -> str:
    """Which ranks those are, where they are not all, and how many share their rows."""
    where = "" if len(layout.ranks) == world_size else f" of {rank_ranges(layout.ranks)}"
    return f"{where} ({layout.copies} share their rows)" if layout.copies > 1 else where


def _loaded(module: RLModule, graph: Graph) -> list[str]:
    """The roles that have a model, in the order of loading: views and averages after those that they follow."""
    found = handles(module)
    roles = [role for role in graph.roles() if role != ROLLOUT]
    used = [found[role] for role in roles]
    for role, handle in zip(roles, used, strict=True):
        if handle.lora is not None:
            require_peft()
        if isinstance(handle, WithoutAdapters) and handle.owner not in used:
            raise UserError(
                f"`{role}` is a model without its adapters, and no node uses the model with them; load `{role}` by"
                f" itself, as CausalLM({handle.model!r}, trainable=False)"
            )
        if isinstance(handle, Averaged) and handle.owner not in [found[trained] for trained in graph.trained_roles()]:
            raise UserError(
                f"`{role}` is the moving average of a model that no node trains, so it never moves; train that one, or"
                f" load `{role}` by itself, as CausalLM({handle.model!r}, trainable=False)"
            )
    for node in graph.order:
        for name in node.uses:
            if found[name].trainable:
                raise UserError(
                    f"node `{node.id}` uses `{name}`, which is trainable, and no node trains it; set `trainable` to"
                    " false where it is made"
                )
    return sorted(roles, key=lambda role: isinstance(found[role], WithoutAdapters | Averaged))


def _check_sides(module: RLModule, graph: Graph, data: PromptData) -> None:
    """Pairs have two responses, other rows one at most."""
    name, paired = type(module).__name__, graph.type_of(BATCH) is Pairs
    if paired and data.rejected is None:
        raise UserError(
            f"{name} reads `batch` as Pairs, and these are pairs without a rejected side: `data.rejected` is null; name"
            " the column of the rejected response there, and that of the chosen one in `data.response`"
        )
    if not paired and data.rejected is not None:
        raise UserError(
            f"`data.rejected` is {data.rejected!r}, and {name} reads `batch` as Batch, whose rows have one response;"
            " leave it out, or take an algorithm of pairs, such as DPO"
        )


def _nothing_to_validate(module: RLModule, follows: str | None) -> str:
    if follows is None:
        lacks = (
            "trains no model that generates, and has no `validation_step`; write one, or leave `data.validation` out"
        )
        return f"`data.validation` is set but {type(module).__name__} {lacks}"
    return "`data.validation` is set but the module has no reward to score responses; set `module.reward`"


def _require_end(planned: Plan, max_steps: int | None, max_epochs: int | None, chooses: bool) -> None:
    if chooses and max_epochs is not None:
        raise UserError(
            f"`trainer.max_epochs` is {max_epochs}, and the module's `choose_prompts` decides how many prompts an epoch"
            " has, so nobody knows how many steps that is; set `trainer.max_steps` instead"
        )
    if planned.fill is not None and max_epochs is not None:
        who = "`trainer.partial_rollout`"
        if planned.fill.filter_id is not None:
            who = f"the filter `{planned.fill.filter_id}`"
        raise UserError(
            f"`trainer.max_epochs` is {max_epochs}, and {who} draws as many prompts as it needs, so passes over the"
            " rows do not say how many steps there are; set `trainer.max_steps` instead"
        )
    if max_steps is None and max_epochs is None:
        raise UserError("neither `trainer.max_steps` nor `trainer.max_epochs` is set, so the run has no end; set one")
