"""Checks of settings, data and algorithm together, made before processes start or weights are loaded."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.callbacks.callback import Callback
from rlflow.callbacks.early_stopping import EarlyStopping
from rlflow.context.generation import require_no_seats
from rlflow.controller.run import Run
from rlflow.dag.annotations import members, names_fields
from rlflow.dag.graph import Graph
from rlflow.dag.node import BATCH, Node
from rlflow.dag.planner import Plan
from rlflow.dag.tasks import rank_ranges
from rlflow.data.mixture import Mixture
from rlflow.data.prompts import RESPONSES, Learned, PromptData
from rlflow.data.sources import Source
from rlflow.errors import UserError, about, setting
from rlflow.harness.harness import Harness
from rlflow.lightning_names import MODULE_HOOKS, MODULE_METHODS
from rlflow.models.architecture import cached_bytes, check_positions, positions
from rlflow.models.causal_lm import CausalLM
from rlflow.models.handle import ModelHandle
from rlflow.models.moe import check_moe
from rlflow.module import RLModule, aggregation_of, environments, handles, has_validation_step
from rlflow.settings import VALIDATION, Settings
from rlflow.values.batch import Batch, Pairs
from rlflow.values.layout import Layout
from rlflow.values.response_settings import ResponseSettings
from rlflow.values.truncation import Truncation

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def resolved(data: PromptData, module: RLModule, graph: Graph, trains: bool = True) -> PromptData:
    """The data with resolved columns, according to what the algorithm reads: pairs, responses, or prompts alone.

    DPO reads `batch` as `Pairs`; SFT trains on `batch` itself, so it needs responses; GRPO samples its responses; GAIL
    samples responses and trains on those of `batch` too.

    Raises:
        UserError: The rows have no such columns, or `data.rejected` is set and the algorithm reads no pairs.
    """
    learned: Learned | None = None
    if graph.type_of(BATCH) is Pairs:
        learned = "pairs"
    elif data.rejected is not None:
        raise UserError(
            f"`data.rejected` is {data.rejected!r}, and {type(module).__name__} reads `batch` as Batch, whose rows have"
            " one response; leave it out, or take an algorithm of pairs, such as DPO"
        )
    elif (
        learns_from_batch(graph)
        or not any(node.kind == "rollout" for node in graph.order)
        or (names_responses(graph) and (trains or has_validation_step(module) or _has_column(data.train, *RESPONSES)))
    ):
        learned = "responses"
    return data.resolved(learned)


def held_out(data: PromptData, source: Source, module: RLModule, loss_node: Node | None) -> PromptData:
    """The settings for rows of validation: without responses if they have none and only sampling reads the rows."""
    column, is_read = data.response, loss_node is not None or has_validation_step(module) or data.rejected is not None
    if column is None or is_read or _has_column(source, column):
        return data
    found = copy.copy(data)
    found.response = None
    return found


def _has_column(source: Source, *columns: str) -> bool:
    """Whether the first row has one of these columns."""
    return len(source) > 0 and any(column.split(".")[0] in source.read([0])[0] for column in columns)


def learns_from_batch(graph: Graph) -> list[Node]:
    """The train nodes whose only input is `batch` with responses of the dataset."""
    trained = [node for node in graph.order if node.kind == "train" and [each.name for each in node.inputs] == [BATCH]]
    return [] if graph.type_of(BATCH) is Pairs else trained


def names_responses(graph: Graph) -> bool:
    """Whether a node's type names the responses of `batch`; `Batch` itself is also the type of prompts alone."""
    asked = [each.annotation for node in graph.order for each in node.inputs if each.name == BATCH]
    return any(kind is not Batch and names_fields(kind) and "loss_mask" in members(kind) for kind in asked)


def check_aggregations(module: RLModule, graph: Graph) -> None:
    """Refuse `episode-mean` for a loss of pairs.

    Raises:
        UserError: A train node that has it reads `Pairs`.
    """
    for node in graph.order:
        if node.kind != "train" or not any(graph.type_of(name) is Pairs for name in node.reads):
            continue
        handle = handles(module)[str(node.role)]
        if aggregation_of(module, handle) == "episode-mean":
            raise UserError(
                f"`loss_aggregation` is 'episode-mean', and `{node.id}` trains on pairs, which are of two responses and"
                " no episode; take another, such as 'token-mean': all of them average the loss over pairs"
            )


def check_monitors(settings: Settings, callbacks: Iterable[Callback], data: PromptData) -> None:
    """Refuse a `monitor` of validation (`val/...`, `val_...`) in a run without one; others are known after a step.

    Raises:
        UserError: `trainer.monitor` or an `EarlyStopping` has such a name.
    """
    monitors = {"`trainer.monitor`": settings.monitor}
    for callback in callbacks:
        if isinstance(callback, EarlyStopping):
            monitors[f"{setting(callback, 'monitor', 'monitor')} of EarlyStopping"] = callback.monitor
    for who, name in monitors.items():
        if name is not None and name.startswith(VALIDATION) and data.validation is None:
            raise UserError(f"{who} is {name!r}, and `data.validation` is not set, so nothing is validated; set it")


def nothing_to_validate(module: RLModule, follows: str | None) -> str:
    """The error's text for a module that cannot measure anything on the rows of `data.validation`."""
    if follows is not None:
        return "`data.validation` is set but the module has no reward to score responses; set `module.reward`"
    return (
        f"`data.validation` is set but {type(module).__name__} trains no model that generates, and has no"
        " `validation_step`; write one, or leave `data.validation` out"
    )


def require_end(planned: Plan, settings: Settings, chooses: str | None) -> None:
    """Raise `UserError` unless the run has an end: `max_steps`, or `max_epochs` where an epoch's steps are known.

    The steps of an epoch are not known where prompts are drawn as often as needed, or something `chooses` prompts.
    """
    max_steps, max_epochs = settings.max_steps, settings.max_epochs
    if chooses and max_epochs is not None:
        raise UserError(
            f"`trainer.max_epochs` is {max_epochs}, and {chooses} decides how many prompts an epoch"
            " has, so the number of steps is not known; set `trainer.max_steps` instead"
        )
    if planned.dynamic_sampling is not None and max_epochs is not None:
        filtered = planned.dynamic_sampling.filter_id
        who = "`trainer.partial_rollout`" if filtered is None else f"the filter `{filtered}`"
        raise UserError(
            f"`trainer.max_epochs` is {max_epochs}, and {who} draws as many prompts as it needs, so passes over the"
            " rows do not say how many steps there are; set `trainer.max_steps` instead"
        )
    if max_steps is None and max_epochs is None:
        raise UserError("neither `trainer.max_steps` nor `trainer.max_epochs` is set, so the run has no end; set one")


def check_response_settings(
    module: RLModule,
    settings: Settings,
    **of_datasets: tuple[Mapping[str, ResponseSettings], bool],
) -> None:
    """Refuse a dataset's `max_response_length` or `sampling` that cannot work, or that another part does not support.

    Args:
        module: The algorithm.
        settings: Settings of the trainer.
        of_datasets: For `train` and `validation`, the datasets' own settings by name, and whether they are sampled.

    Raises:
        UserError: A dataset has such a setting.
    """
    found, sums = next(iter(environments(module)), None), getattr(module, "sums_over_support", False)
    every = [(use, samples, *named) for use, (of, samples) in of_datasets.items() for named in of.items()]
    for use, samples, name, each in every:
        given = f"`sampling` of the dataset `{name}` of `data.{use}` is set, and"
        if each.sampling is not None and not samples:
            raise UserError(f"{given} {type(module).__name__} samples no responses to it; leave it out")
        if each.sampling is not None and found is not None:
            raise UserError(
                f"{given} `module.{found}` is an environment, whose conversations are sampled by the settings of their"
                " policies; leave `sampling` out"
            )
        if use == "train" and each.sampling is not None and each.sampling.top_k is None and sums:
            raise UserError(
                f"{given} has no `top_k`, and {type(module).__name__} sums over the tokens that were sampled from; set"
                " it too, such as 128"
            )
        longest, why = each.max_tokens, None
        if longest is None:
            continue
        if longest > module.max_response_length:
            why = f"`module.max_response_length` is {module.max_response_length}, for which memory is planned"
        elif found is not None:
            why = f"{type(module).__name__} has an environment, whose conversations have the length of the run"
        elif settings.partial_rollout is not None:
            why = "`trainer.partial_rollout` continues responses to the length of the run"
        elif getattr(module, "overlong_buffer", None) is not None:
            why = "`module.overlong_buffer` is set, whose penalty is for the length of the run"
        if why is not None:
            raise UserError(f"`max_response_length` of the dataset `{name}` is {longest}, and {why}; leave one out")


def check_choice(module: RLModule, data: PromptData, graph: Graph) -> None:
    """Check the module's or the data's choice of prompts, if there is one, before the module gets it.

    Raises:
        UserError: Two things choose, a mixture's weights change from step to step, or nothing measures a pass rate.
    """
    own = type(module).choose_prompts is not RLModule.choose_prompts
    who = "the module's `choose_prompts`" if own else "`data.curriculum`"
    if (own or data.curriculum is not None) and isinstance(data.train, Mixture) and data.train.is_scheduled:
        raise UserError(
            f"a dataset's `weight` has a schedule of steps, and {who} chooses the prompts of whole epochs; give each"
            " dataset one weight"
        )
    if data.curriculum is None:
        return
    found = environments(module)
    if own:
        why = "chooses prompts itself, by `choose_prompts`"
    elif not any(node.kind == "rollout" for node in graph.order):
        why = "samples no responses that could pass"
    elif module.writes_prompts:
        why = "writes prompts of its own, so a row of the dataset has no pass rate"
    elif module.reward is None and not found:
        why = "has neither a `reward` nor an environment, by which a sample could pass"
    elif any(definition.seats for environment in found.values() for definition in environment.definitions.values()):
        why = "has an environment of several seats, whose rewards say who won"
    else:
        return
    raise UserError(f"`data.curriculum` is set, and {type(module).__name__} {why}; leave it out")


def require_one_place(module: RLModule, roles: Collection[str], placed: Mapping[str, Layout], lead: str) -> None:
    """Refuse `roles` on other ranks than the lead's, since a `validation_step` runs there and may call any of them."""
    for role in roles:
        if placed[role].ranks != placed[lead].ranks:
            raise UserError(
                f"the `validation_step` of {type(module).__name__} runs on the {rank_ranges(placed[lead].ranks)} of"
                f" `{lead}`, and `{role}` lives on {rank_ranges(placed[role].ranks)}; place both on the same ranks, or"
                " leave `data.validation` out"
            )


def check_experts(
    handle: ModelHandle, role: str, config: PretrainedConfig, policies: Collection[str], cuts_off: bool, whole: bool
) -> None:
    """Refuse `moe` settings of a role that cannot work with its model, the algorithm or the strategy.

    `cuts_off` is whether `trainer.partial_rollout` is set, `whole` whether the model gets whole packed sequences.
    """
    moe = handle.moe if isinstance(handle, CausalLM) else None
    if moe is None:
        return
    check_moe(config, f"`moe` of `{role}`")
    if moe.watches and not whole:
        raise UserError(
            f"`moe` of `{role}` has `routing_replay` or `router_aux_loss_coef`, which are of whole packed sequences;"
            " set the strategy's `packing` to true, and do not let ranks divide the role's sequences"
        )
    if "experts" in handle.model_inputs and role not in policies:
        raise UserError(
            f"`moe.routing_replay` is set for `{role}`, and no rollout engine generates with its weights, so there are"
            " no experts to replay; leave it out"
        )
    if "experts" in handle.model_inputs and cuts_off:
        raise UserError(
            "`moe.routing_replay` and `trainer.partial_rollout` are set; the experts of a response that several"
            " versions of the policy generated are not stored. Leave out one of them"
        )


def support_bounds(module: RLModule, graph: Graph, of_datasets: Mapping[str, ResponseSettings]) -> dict[str, int]:
    """Most tokens that are stored for one token of a response, by policy: the largest `top_k` of its rows.

    Stored are the tokens that `top_p`, `top_k` or `min_p` leave, of a trained policy or of a dataset; policies whose
    rows need none are left out.

    Args:
        module: The algorithm.
        graph: Graph of the module.
        of_datasets: Response settings of the datasets that are trained on, by name.

    Raises:
        UserError: There is no `top_k`, or rows are conversations.
    """
    of_all = {f"the dataset `{name}`": each.sampling for name, each in of_datasets.items() if each.sampling}
    policies = {name: handles(module)[name] for name in graph.policies()}
    bounds = dict[str, int]()
    for name, policy in policies.items():
        if not isinstance(policy, CausalLM):
            continue
        cuts: dict[str, Truncation] = {}
        if policy.notes_own_support(bool(of_all)):
            cuts[f"`{name}`"] = policy.truncation
        cuts |= of_all
        if not cuts:
            continue
        whose = next((whose for whose, truncation in cuts.items() if truncation.top_k is None), next(iter(cuts)))
        given, of = f"`{cuts[whose]}` of {whose} is set", None if whose in of_all else policy
        if cuts[whose].top_k is None:
            raise UserError(
                f"{given} without `top_k`; a loss scores over the tokens that are left, which are stored for each token"
                " of a response, so set `top_k` too, such as 64, to bound their number",
                of=of,
            )
        if found := next(iter(environments(module)), None):
            raise UserError(
                f"{given} and `module.{found}` too; the tokens that are left are not stored for conversations, so a"
                " loss could not score over them. Leave one of the two out, or set `trainer.val_sampling` alone",
                of=of,
            )
        bounds[name] = max(truncation.top_k or 0 for truncation in cuts.values())
    return bounds


def check_environments(run: Run) -> None:
    """Check each environment of the module: tools have schemas, and the model's chat template writes its turns.

    Raises:
        UserError: A check fails, or a setting does not go with environments, such as `moe.routing_replay`.
    """
    found = environments(run.module)
    for name in ("renderer", "tool_calls"):
        if not found and getattr(run.data, name) is not None:
            raise UserError(
                f"`data.{name}` is set, and {type(run.module).__name__} has no environment, whose turns it is for;"
                " leave it out"
            )
    if len(found) > 1 and run.scores_validation:
        raise UserError(
            f"`data.validation` is set and {type(run.module).__name__} has several environments,"
            f" {' and '.join(found)}, so it is not known which one validates; leave it out"
        )
    replays = [role for role, handle in handles(run.module).items() if "experts" in handle.model_inputs]
    for name, environment in found.items():
        if replays:
            raise UserError(
                f"`moe.routing_replay` is set for `{replays[0]}` and `module.{name}` is set; the experts of a"
                " conversation, whose turns are generated one by one, are not stored. Leave out `routing_replay`"
            )
        if run.settings.partial_rollout is not None and isinstance(environment, Harness):
            raise UserError(
                f"`module.{name}` is a harness and `trainer.partial_rollout` is set; an agent that owns its loop is not"
                " cut off and continued. Leave `partial_rollout` out"
            )
        if run.settings.partial_rollout is not None:
            require_no_seats(f"`module.{name}` is an environment", environment)
        for definition in environment.definitions.values():
            run.train.encode.bridge(definition)


def check_rows(run: Run) -> None:
    """Check the rows of the data after they were scanned: whether there are enough, and the longest fit the models.

    Raises:
        UserError: A check fails, those of `check_environments` included.
    """
    module, strategy = run.module, run.strategy
    check_environments(run)
    run.train.require_enough()
    prompt, response = run.longest_prompt, module.max_response_length
    scans = [loader.scan for loader in run.loaders if loader is not None]
    most_pictures = max(scan.most_pictures for scan in scans)
    if most_pictures and module.writes_prompts:
        raise UserError(
            f"rows of the data have images, and nodes of {type(module).__name__} write prompts of text in which these"
            " have no place; take rows without images, or an algorithm that reads the dataset's prompts, such as GRPO"
        )
    longest_row = max(scan.longest_row for scan in scans)
    for role in sorted(run.paths, key=lambda role: positions(run.configs[role]) or inf):
        config = run.configs[role]
        check_positions(config, longest_row, role, "the longest row of the data")
        if run.generates:
            of = f"a prompt of {prompt} tokens and a response of up to {response}"
            check_positions(config, prompt + response, role, of, prompt)
    for policy, engine in run.engines.own.items() if run.generates else ():
        config = run.configs[policy]
        with about(engine):
            engine.check_pictures(most_pictures)
            engine.check_lengths(
                prompt,
                response,
                positions=positions(config),
                token_bytes=cached_bytes(config, strategy.dtype, engine.tensor_parallel_size),
                on_cpu=strategy.root_device.type == "cpu",
            )


def check_gold_answers(run: Run) -> None:
    """Score the gold answers of some rows for training and validation.

    Raises:
        UserError: One gets less than the best reward, so that no response to its row could be right.
    """
    for loader in run.loaders:
        if loader is not None:
            loader.check_gold()


def check_apart(models: Mapping[str, Path], folder: Path) -> None:
    """Refuse a model in the run's own folder: the folder's content is moved away when the run starts."""
    for role, path in models.items():
        if path.resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"`trainer.run_dir` is {str(folder)!r}, and `{role}` starts from {str(path)!r} in it;"
                " give this run a folder of its own"
            )


def check_hooks(module: RLModule, graph: Graph) -> None:
    """Refuse methods of a module that Lightning calls and rlflow does not.

    Raises:
        UserError: The module has one.
    """
    for name in dir(type(module)):
        if name not in graph.nodes and (name.startswith(MODULE_HOOKS) or name in MODULE_METHODS):
            fix = MODULE_METHODS.get(name, "write it in a `Callback`, whose hooks are in docs/callbacks.md")
            raise UserError(f"`{name}` of {type(module).__name__} is never called; {fix}")
