"""RLModule: the class that an algorithm subclasses, declaring the nodes of its graph as decorated methods."""

from __future__ import annotations

import inspect
import sys
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from rlflow.context.logged import (
    ReduceFx,
    check_levels,
    check_ranks,
    check_unused,
    check_value,
    check_weight,
    how_logged,
)
from rlflow.context.node_context import AllRows, NodeContext
from rlflow.dag.node import BATCH, NodeConfig
from rlflow.dotted_path import object_at
from rlflow.environments.environment import Environment
from rlflow.errors import UserError, did_you_mean
from rlflow.functional import Aggregation, merge_moments, quantiles, row_moments, standardize
from rlflow.functional.whitening import broken_rows, not_finite
from rlflow.models.causal_lm import CausalLM
from rlflow.models.handle import ModelHandle
from rlflow.models.model_arguments import check_fields, make_models
from rlflow.rewards.reward import Reward
from rlflow.rewards.weighted_sum import RewardLike, as_reward
from rlflow.rollout.engine import Sampling, check_asked
from rlflow.rollout.sampling import to_be_continued, without_truncated
from rlflow.state.adaptive_coefficient import AdaptiveCoefficient
from rlflow.state.curriculum import Curriculum
from rlflow.state.prompt_memory import PromptMemory
from rlflow.state.replay_buffer import ReplayBuffer
from rlflow.values.batch import Batch
from rlflow.values.column_kinds import PerSample
from rlflow.values.path import NO_GROUP
from rlflow.values.protocols import WithTexts
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Rollout
from rlflow.values.truncation import Truncation


class RLModule:
    """An algorithm: settings and models in `__init__`, its graph in methods marked `@node`.

    Models are handles (`CausalLM`, ...) that are passed to the constructor. The name of an attribute is the name of the
    role. `configure_models` makes handles that are derived from these, such as a reference.

    A node's name is the name of the value that it makes, and its parameters are the values that it reads. `batch` is
    the rows of the dataset. The first dimension of every tensor is the rows of this rank, and a module needs no code
    for ranks.

    `log`, `mean`, `whiten`, `quantile`, `all_rows` and `dataset_rows` read the rows of all ranks, and all ranks must
    make the same calls. Rows on which a reward with `on_error` `drop` failed do not count.

    Attributes:
        reward: The reward that scores responses; `reward_function` calls it. A `Reward`, a function, its dotted path,
            or a list or dict of these; `rlflow.rewards.as_reward` makes it a `Reward`. None for no scores.
        loss_aggregation: Reduction of per-token losses to one number; see `rlflow.functional.aggregate`.
        group_size: Number of samples of each prompt in one step.
        max_response_length: Tokens after which a response is cut, and the divisor of the `constant` aggregation.
        stop_token_ids: Tokens that end a response, in addition to the end tokens of the model and its tokenizer.
        mask_truncated: Whether responses that were cut at `max_response_length` are left out of losses. They stay in
            their group's baseline. The overlong filtering of DAPO, arXiv 2503.14476, section 3.4.
        max_draws: Maximum number of batches of prompts that a filter draws to fill a step.
        unclipped: Whether the loss has no clip, cap or mask at all. If a run then makes several updates a step, or
            trains on samples of older weights, it prints one warning.
        writes_prompts: Whether nodes write prompts from the texts of rows. A picture would have no place in them, so
            rows with pictures are refused before models are loaded.
        depends_on: Names of columns of `rlflow check` on which the gradient is meant to depend, such as `order`.
        config_models: Model handles by role from a config, in addition to or in place of those of `configure_models`.
        config_nodes: Nodes by name that a config adds, or that replace other nodes; None removes a node.
        given_models: Model handles by role as the constructor set them, before a run changed copies of them.
        run_models: The handles of the last run, including derived handles.
        run_settings: By role, the settings of these handles when the run was configured.
        logs_hparams: Whether loggers get the `hparams` in a run without a config.
        data_curriculum: The curriculum that chooses the prompts of an epoch in a run with `data.curriculum`; else None.
    """

    reward: RewardLike | None = None
    loss_aggregation: Aggregation = "token-mean"
    group_size: int = 1
    max_response_length: int = 256
    stop_token_ids: tuple[int, ...] = ()
    mask_truncated: bool = False
    max_draws: int = 10
    unclipped: ClassVar[bool] = False
    writes_prompts: ClassVar[bool] = False
    depends_on: ClassVar[Collection[str]] = ()
    config_models: Mapping[str, ModelHandle] = MappingProxyType({})
    config_nodes: Mapping[str, NodeConfig | str | None] = MappingProxyType({})
    given_models: Mapping[str, ModelHandle] = MappingProxyType({})
    run_models: Mapping[str, ModelHandle] = MappingProxyType({})
    run_settings: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    logs_hparams: bool = True
    data_curriculum: Curriculum | None = None
    _context: NodeContext | None = None

    @property
    def ignores_sampler(self) -> bool:
        """Whether no term of the loss holds the policy near the policy that sampled, if that one had older weights."""
        return self.unclipped

    def __post_init__(self) -> None:
        """Make handles of models' names, and refuse invalid arguments; a dataclass's constructor calls it."""
        self.reward = self.scorer
        check_fields(self)
        make_models(self)

    @property
    def scorer(self) -> Reward | None:
        """The module's `reward` as a `Reward`, with which nodes score."""
        if self.reward is not None and not isinstance(self.reward, Reward):
            self.reward = as_reward(self.reward)
        return self.reward

    def configure_models(self) -> None:
        """Assign the handles that are derived from those of the constructor, such as a reference or an average.

        It is called for each run, graph or simulation. The handles of the constructor are then copies, which it may
        change.
        """

    def configure_optimizers(self) -> Any:
        """Make the optimizers of models that are trained, in the forms of Lightning. By default models make their own.

        It is called before processes start. Get parameters from `self.actor.named_parameters()`, or those of all models
        from `self.named_parameters()`. They have shapes and no values. A model without an optimizer from here has the
        optimizer of its settings. The settings `warmup_steps`, `schedule`, `interval` and `gradient_clipping` also hold
        for an optimizer that is made here.

        Example:
            ```python
            def configure_optimizers(self):
                matrices = [each for each in self.actor.parameters() if each.dim() > 1]
                others = [each for each in self.actor.parameters() if each.dim() < 2]
                groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
                return torch.optim.AdamW(groups, lr=1e-6, weight_decay=0.1)
            ```

        Returns:
            A torch optimizer, `{"optimizer": ..., "lr_scheduler": {"scheduler": ..., "interval": "step"}}`, or several
            of these. Each has the parameters of one model.
        """

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights of all models that are trained, with names such as `actor.model.norm.weight`.

        Raises:
            UserError: It is called outside `configure_optimizers`.
        """
        for role, handle in handles(self).items():
            if handle.trainable:
                yield from ((f"{role}.{name}", weight) for name, weight in handle.named_parameters())

    def parameters(self) -> Iterator[nn.Parameter]:
        """The weights of `named_parameters` without their names."""
        for _, parameter in self.named_parameters():
            yield parameter

    def save_hyperparameters(
        self, *given: str | Mapping[str, Any] | Namespace, ignore: str | Sequence[str] = (), logger: bool = True
    ) -> None:
        """Store the constructor's arguments in `hparams`, as in Lightning. Call it in `__init__` or `__post_init__`.

        Arguments that are numbers, texts, lists or dicts are written to `hparams.json` of the run's folder. In a run
        without a config, loggers get them too. `load_from_checkpoint` reads them.

        Args:
            given: Names of arguments to store (none given: all arguments); or a dict or `Namespace` of further values.
            ignore: One or more names of arguments to leave out, even if the parent's constructor stored them.
            logger: Whether loggers get the arguments.

        Raises:
            UserError: There is no argument of a given name, or a given value has none of these forms.
        """
        found, frame = dict[str, Any](), sys._getframe(1)
        while frame.f_locals.get("self") is self and frame.f_code.co_name in ("__init__", "__post_init__"):
            names, _, more, values = inspect.getargvalues(frame)
            found |= {name: values[name] for name in names if name != "self"} | (values[more] if more else {})
            assert frame.f_back is not None  # a constructor is called by somebody
            frame = frame.f_back
        kept = found if not given else {}
        for each in given:
            if isinstance(each, Mapping | Namespace):
                kept |= each if isinstance(each, Mapping) else vars(each)
            elif each in found:
                kept[each] = found[each]
            else:
                raise UserError(
                    f"`save_hyperparameters` was given {each!r:.80}, which is not an argument of {type(self).__name__};"
                    f" give names of arguments, or a dict of values.{did_you_mean(str(each), found)}"
                )
        self.hparams.update(kept)
        for name in [ignore] if isinstance(ignore, str) else ignore:
            self.hparams.pop(name, None)
        self.logs_hparams = logger

    @property
    def hparams(self) -> dict[str, Any]:
        """The values that `save_hyperparameters` stored, which are read as `hparams["lr"]` or `hparams.lr`."""
        from lightning.fabric.utilities.data import AttributeDict

        found: dict[str, Any] = vars(self).setdefault("_hparams", AttributeDict())
        return found

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: str | Path, **arguments: Any) -> Self:
        """The module of a run, with the run's last weights and state, for more training or for generating.

        Its arguments are those of the run's config. If the run had no config, they are those that
        `save_hyperparameters` stored. These do not include settings of models, such as a temperature: set them in the
        module that is returned.

        Args:
            checkpoint_path: Folder of a run, or one of its checkpoints. The weights of a checkpoint are exported to
                `exported/` of the run's folder. So are an adapter, merged, and the newest checkpoint of a run that has
                not ended: its `model` may be of an earlier step.
            arguments: Arguments of the constructor in place of those of the run, such as a reward function or a model,
                whose weights are then not loaded from the run.

        Raises:
            UserError: There is no run, its config has another class, the weights of a model are missing, or an argument
                is not known.
        """
        # Configs and runs are above this module, and nothing else here needs them.
        load = object_at("rlflow.commands.loading.load_module", "`load_from_checkpoint`")
        module: Self = load(cls, Path(checkpoint_path), arguments)
        return module

    def validation_step(self, batch: Any) -> None:
        """Log metrics of held-out rows that no generated response gives: `self.log("val/margin", margin)`.

        If it is overridden, it runs in each validation, without gradients, over this rank's share of `data.validation`.
        All ranks must make the same calls of models, even ranks that have no rows.

        Args:
            batch: A `Batch`, or `Pairs` in an algorithm of pairs.
        """

    def choose_prompts(self, epoch: int, prompts: Tensor) -> Tensor:
        """Choose the rows of the dataset that an epoch draws. By default all rows, or those of `data.curriculum`.

        It is called when the first step of an epoch is loaded, on the ranks that load rows. The module's `PromptMemory`
        then has the results of all steps that are trained. With `trainer.max_staleness` these are fewer than the steps
        that are generated. All ranks must choose the same rows, so random draws must follow from `epoch`. If a module
        overrides this method, its run must end by `trainer.max_steps`.

        Args:
            epoch: Epoch, from 0.
            prompts: `[N]` int64, places in the dataset, counted from 0, in the epoch's order, which follows from the
                seed.

        Returns:
            `[M]` int64, some of `prompts` in the order in which to draw them. A prompt may occur several times. There
            must be at least as many as a step takes.
        """
        return prompts if self.data_curriculum is None else self.data_curriculum.choose(epoch, prompts)

    def state_dict(self) -> dict[str, Any]:
        """The module's state from step to step: coefficients with a target, memories of prompts, replay buffers.

        An override may add JSON-able values and tensors, by name and in dicts of any depth. All ranks must change a
        tensor in the same way, so compute the change from `all_rows`, `mean` or the like. Checkpoints have tensors in a
        separate file.
        """
        coefficients = {name: x for name, x in vars(self).items() if isinstance(x, AdaptiveCoefficient)}
        adapted = {name: x.value for name, x in coefficients.items() if x.target is not None}  # the rest are settings
        return adapted | {name: kept.state_dict() for name, kept in self._kept().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`, before the first step of a resumed run."""
        kept = self._kept()
        for name, value in state.items():
            if name in kept:
                kept[name].load_state_dict(value)
            elif isinstance(coefficient := getattr(self, name, None), AdaptiveCoefficient):
                if coefficient.target is not None:
                    coefficient.value = value
            elif name != "data_curriculum":  # which belongs to the data of a run, and this one is not resumed
                found = f"the checkpoint has `{name}` of its module, and {type(self).__name__} keeps no such thing"
                raise UserError(
                    f"{found}; continue with the algorithm that wrote it, or start a new run from its model"
                )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add values to a checkpoint that a resumed run needs: `checkpoint["seen"] = self.seen`.

        It is called on every rank. It is also called when no checkpoint is written: before each step that a signal may
        interrupt.

        Args:
            checkpoint: An empty dict. It may get values of the kinds that `state_dict` may return.
        """

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore what `on_save_checkpoint` added, if anything, before the first step of a resumed run."""

    def memories(self) -> dict[str, PromptMemory]:
        """The module's `PromptMemory` objects, by the names of their attributes."""
        return {name: value for name, value in vars(self).items() if isinstance(value, PromptMemory)}

    def _kept(self) -> dict[str, PromptMemory | ReplayBuffer]:
        return {name: value for name, value in vars(self).items() if isinstance(value, PromptMemory | ReplayBuffer)}

    def attach(self, context: NodeContext) -> None:
        """Called by the controller before the first step."""
        self._context = context
        for name, memory in self.memories().items():
            memory.attach(partial(context.remember, name))
        for name, handle in handles(self).items():
            if isinstance(handle, CausalLM):
                handle.attach_generator(partial(self._generate, name), partial(self._converse, name))

    def generate(self, batch: Batch, n: int = 1, temperature: float | None = None) -> Rollout:
        """Sample `n` responses to each prompt; the samples of a prompt are consecutive rows.

        This is short for `self.actor.generate(batch, n)` if the node names one policy.

        With `trainer.partial_rollout`, the node that calls this gets unfinished responses too. Later nodes get only
        responses that have ended.

        Args:
            batch: Prompts, `B` rows.
            n: Number of responses to each prompt; the result has `B * n` rows.
            temperature: Temperature in place of the policy's own; 0 for greedy decoding.
        """
        return self._generate(None, batch, n, temperature, None, ())

    def converse(self, batch: Batch, environment: Environment, n: int = 1, temperature: float | None = None) -> Rollout:
        """Hold `n` conversations with an environment from each prompt.

        This is short for `self.actor.converse(batch, environment, n)` if the node names one policy.

        Args:
            batch: Prompts, `B` rows.
            environment: The environment that answers.
            n: Number of conversations from each prompt; the result has `B * n` rows.
            temperature: Temperature in place of the policy's own; 0 for greedy decoding.
        """
        return self._converse(None, batch, environment, n, temperature, (), {})

    def _generate(
        self,
        policy: str | None,
        rows: Any,
        n: int,
        temperature: float | None,
        max_new_tokens: int | None,
        stop: tuple[int, ...],
    ) -> Rollout:
        """Generate with this policy, or with the only one of the node."""
        longest = self.max_response_length if max_new_tokens is None else max_new_tokens
        check_asked(n, longest, self.max_response_length)
        if self.mask_truncated and isinstance(rows, Rollout):
            rows = to_be_continued(rows, self.max_response_length)
        name, own, truncation = self._policy(policy)
        sampling = Sampling(longest, own, stop, truncation=truncation)
        rollout = self._running().generate(rows, n, sampling, self.max_response_length, name, temperature)
        return without_truncated(rollout, self.max_response_length) if self.mask_truncated else rollout

    def _converse(
        self,
        policy: str | None,
        rows: Batch,
        environment: Environment,
        n: int,
        temperature: float | None,
        stop: tuple[int, ...],
        players: Mapping[str, CausalLM],
    ) -> Rollout:
        check_asked(n, self.max_response_length, self.max_response_length)
        name, own, truncation = self._policy(policy)
        sampling = Sampling(self.max_response_length, own, stop, truncation=truncation)
        others = {seat: self._player(seat, model) for seat, model in players.items()}
        rollout = self._running().converse(rows, environment, n, sampling, name, others, temperature)
        return without_truncated(rollout, self.max_response_length) if self.mask_truncated else rollout

    def _policy(self, name: str | None) -> tuple[str, float, Truncation]:
        """The policy of this name, or the only one of the node, with its temperature and truncation."""
        name = self._running().policy(name)
        model = handles(self)[name]
        assert isinstance(model, CausalLM), name
        return name, model.temperature, model.truncation

    def _player(self, seat: str, model: CausalLM) -> tuple[str, float, Truncation]:
        """The policy that speaks for a seat: its name, temperature and truncation."""
        name = next((name for name, handle in handles(self).items() if handle is model), None)
        if name is None:
            raise UserError(
                f"`players` has {model!r:.60} for `{seat}`, which is not a model of {type(self).__name__}; assign it to"
                " `self` in `__init__` or `configure_models`, and name it in `generates`"
            )
        return self._policy(name)

    def tokens(self, text: str) -> list[int]:
        """The token ids of a text as a prompt, for example for `Rollout.as_prompts`."""
        return self._running().encode(text)

    @property
    def longest_prompt(self) -> int | None:
        """Tokens of the longest prompt that a node may write, `data.max_prompt_length`; None for no limit."""
        return self._running().longest_prompt

    def prompts(self, rows: Sequence[dict[str, Any]], template: str) -> Ragged:
        """Token ids of prompts that a template writes from rows of the dataset, in the dataset's chat template if any.

        Args:
            rows: `B` rows of the dataset. A node's parameter of the type `WithDatasetRows` or `WithTexts` has them.
            template: Template such as `{prompt} The answer is {answer}.`. `{prompt}` is the dataset's own prompt; if it
                is a list of messages, it is the last message of the user. Other names are columns; dots step into a
                column. `{{` and `}}` are braces.

        Raises:
            UserError: The template cannot be read, a row lacks one of its columns, or a prompt is longer than
                `data.max_prompt_length`.
        """
        return self._running().prompts(rows, template)

    def reward_function(self, rollout: WithTexts, name: str = "reward") -> PerSample:
        """The module's `reward` of each sample, `[B]` float32. All ranks of the node must call it.

        Args:
            rollout: The samples, with their texts and their rows of the dataset.
            name: Name under which the reward is logged, as `<name>/mean`, and under which its parts are logged.
        """
        return self._scored(rollout, name)[0]

    def environment_returns(self, rollout: WithTexts, name: str = "reward") -> PerSample:
        """The sum of an environment's rewards for each conversation, `[B]`. All ranks of the node must call it.

        Args:
            rollout: Conversations, with their texts and their rows of the dataset.
            name: The rewards are logged as `<name>/environment`, and also as `<name>/mean` if the module has no
                `reward`.
        """
        returns = self._running().returned(rollout, name, self.reward is None)
        if self.reward is None:
            self._measure(rollout, returns, name)
        return returns

    def reward_parts(self, rollout: WithTexts, name: str = "reward") -> dict[str, PerSample]:
        """The parts of the module's `reward`: `[B]` float32 by the part's name, with the same names on all ranks.

        All ranks of the node must call it. The parts are those of a `WeightedSum`, before they are weighted, or those
        of the dict that a reward function returns. This method scores the samples like `reward_function`, so call only
        one of the two. A node returns parts as `dict[str, PerSample]`, or as a frozen dataclass of `PerSample` that it
        makes from them.

        Args:
            rollout: The samples, with their texts and their rows of the dataset.
            name: Name under which the reward is logged, as `<name>/mean`, and under which its parts are logged.

        Raises:
            UserError: The reward has no parts. Reading a part that it lacks raises one too, on all ranks.
        """
        parts = self._scored(rollout, name)[1]
        if not parts:
            raise UserError(
                f"{type(self).__name__} reads the reward's parts, and {self.scorer} gives one number alone; set"
                " `module.reward` to a WeightedSum, or to a function that returns a dict of names to numbers"
            )
        return parts

    def log(
        self,
        name: str,
        value: Tensor | float,
        mask: Tensor | None = None,
        *,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: ReduceFx = "mean",
        sync_dist: bool | None = None,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
        enable_graph: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        metric_attribute: str | None = None,
    ) -> None:
        """Log the mean of `value` over all rows of all ranks, or over the entries where `mask` is True.

        The arguments are those of Lightning's `self.log`. A metric is one number of a step, or of a validation. Each
        entry counts once, on whatever rank and in whatever micro-batch it is. Several calls in a step are reduced
        together.

        Args:
            name: The metric, such as `actor/kl`. Each call with this name must have the same arguments.
            value: `[B]` or `[B, T]`; or 0-dim, or a number, which counts once for each row of the node on this rank.
            mask: Entries that count, in the shape of `value`; needed for `[B, T]`, where padding must not count.
            prog_bar: Whether the terminal shows the metric in the step's line.
            logger: Whether loggers and `metrics.jsonl` record the metric. Callbacks always get it.
            on_step: True changes nothing in nodes, which log for each step, and is refused in `validation_step`.
            on_epoch: True changes nothing in `validation_step`, and is refused in nodes.
            reduce_fx: `mean`, `sum`, `max` or `min` of the entries, or torch's function of that name.
            sync_dist: True changes nothing: metrics are always over all ranks.
            batch_size: Number of rows for which a 0-dim `value` counts in the mean.
            rank_zero_only: Refused: a metric is over all ranks.
            enable_graph: Refused: logged values have no gradient.
            sync_dist_group: Refused, as `rank_zero_only`; use `mask` to leave rows out.
            add_dataloader_idx: False is refused: names are never changed.
            metric_attribute: Refused: a torchmetrics.Metric cannot be logged.

        Raises:
            UserError: An argument has no meaning here, or the name is logged with other arguments.
        """
        check_value(name, value, mask)
        check_ranks(name, sync_dist, rank_zero_only)
        check_unused(name, enable_graph, sync_dist_group, add_dataloader_idx, metric_attribute)
        how = how_logged(name, prog_bar, logger, reduce_fx)
        if not isinstance(value, Tensor):
            value = torch.tensor(float(value), dtype=torch.float64, device=self._running().device)
        check_weight(name, value, how, batch_size)
        check_levels(name, on_step, on_epoch, self._running().validates)
        self._running().log(name, value, mask, how, batch_size)

    def log_dict(self, dictionary: Mapping[str, Tensor | float], mask: Tensor | None = None, **arguments: Any) -> None:
        """Log several values by name. The further arguments are those of `log`, and hold for each value."""
        for name, value in dictionary.items():
            self.log(name, value, mask, **arguments)

    def mean(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The mean over all rows of all ranks, 0-dim float64; with a `mask`, over the entries where it is True.

        The result has the same bits on any number of ranks, as with `whiten`: each row is summed by itself, and then
        the rows in order.
        """
        mean: Tensor = self._moments(x, self._all_of(x, mask))[1]
        return mean

    def whiten(self, x: Tensor, mask: Tensor | None = None, unbiased: bool = True) -> Tensor:
        """Shift and scale `x` to mean 0 and standard deviation 1 over all rows of all ranks; masked entries are 0.

        Args:
            x: `[B]` or `[B, T]`.
            mask: Entries that count, in the shape of `x`; None for all.
            unbiased: `N - 1` in the variance's denominator instead of `N`.

        Raises:
            UserError: An entry that counts is infinite or NaN on any rank. All ranks raise it, and it names the row.
        """
        counts = self._all_of(x, mask)
        statistics = self._moments(x, counts)
        if not statistics.isfinite().all():  # alike on all ranks
            raise not_finite(self.all_rows(broken_rows(x, counts)).nonzero().flatten())
        return standardize(x, counts, statistics, unbiased)

    def quantile(self, x: Tensor, q: float | Sequence[float], mask: Tensor | None = None) -> Tensor:
        """The `q`-quantile of the entries of all rows of all ranks, as `torch.quantile` would give for all of them.

        The result is exact, and the same on any number of ranks. The data that ranks exchange does not grow with the
        number of entries. Use it to choose some tokens of a step, such as those of highest entropy, arXiv 2506.01939.

        Args:
            x: `[B]` or `[B, T]`.
            q: Share from 0 to 1, or several.
            mask: Entries that count, in the shape of `x`; needed for `[B, T]`, where padding must not count.

        Returns:
            0-dim float64, or `[Q]` for several; NaN where no entry counts.

        Raises:
            UserError: A `q` is not from 0 to 1, or an entry that counts is NaN. All ranks raise it.
        """
        context = self._running()
        entries = x[self._all_of(x, mask).bool()]
        return quantiles(entries, q, lambda counts: context.of_each_shard(counts).sum(dim=0)).to(x.device)

    def all_rows(self, x: AllRows) -> AllRows:
        """The entries of the rows of all ranks, `[N]`, ordered by the rows' ids. The result is the same on every rank.

        Args:
            x: `[B]`, a number for each row of this rank; or `Ragged`, such as token ids.
        """
        if isinstance(x, Tensor) and x.dim() != 1:
            raise UserError(f"all_rows takes one number a row, `[B]`, or Ragged; it was given {list(x.shape)}")
        return self._running().all_rows(x)

    def dataset_rows(self, group: Tensor) -> Tensor:
        """Places of prompts in the dataset, `[B]` int64, counted from 0. `group` is `rollout.group`, `[B]`.

        Raises:
            UserError: It was called in a train node or in validation.
        """
        return self._running().dataset_rows(group)

    def _moments(self, x: Tensor, counts: Tensor) -> Tensor:
        """Count, mean and sum of squared deviations `[3]` of the counted entries of all ranks."""
        return merge_moments(self._running().all_rows(row_moments(x, counts)))

    def _all_of(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The entries that count: entries of the mask, in rows that were not dropped."""
        counts = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
        kept = self._running().kept(x)
        return counts if kept is None else counts.bool() & kept.view(-1, *[1] * (x.dim() - 1))

    def _scored(self, rollout: WithTexts, name: str) -> tuple[Tensor, dict[str, Tensor]]:
        if self.scorer is None:
            raise UserError(f"{type(self).__name__} has no reward to score responses with; set `module.reward`")
        rewards, parts = self._running().score(self.scorer, rollout, name)
        self._measure(rollout, rewards, name)
        return rewards, parts

    def _measure(self, rollout: WithTexts, rewards: Tensor, name: str) -> None:
        """Let the curriculum know which samples `[B]` of the step passed."""
        if self.data_curriculum is None or name != "reward" or self._running().validates:
            return
        passed = (rewards >= self.data_curriculum.pass_reward).double()
        self.log("curriculum/pass_rate", passed)
        kept = self._running().kept(passed)
        group = rollout.group_of(BATCH)
        self.data_curriculum.update(group if kept is None else group.masked_fill(~kept, NO_GROUP), passed)

    def _running(self) -> NodeContext:
        if self._context is None:
            raise UserError(
                f"{type(self).__name__}: nodes are run by `Trainer.fit`, and there is no step in progress here; call"
                " this in a node or in `validation_step`"
            )
        return self._context


def chooses_prompts(module: RLModule) -> str | None:
    """The setting that chooses the prompts of an epoch, for errors; None if none does."""
    if type(module).choose_prompts is not RLModule.choose_prompts:
        return "the module's `choose_prompts`"
    return None if module.data_curriculum is None else "`data.curriculum`"


def aggregation_of(module: RLModule, handle: ModelHandle) -> Aggregation:
    """The way in which the losses per token of a handle of the module become one number."""
    return handle.loss_aggregation or module.loss_aggregation


def handles(module: RLModule) -> dict[str, ModelHandle]:
    """The module's model handles by role, in the order of assignment."""
    return {name: value for name, value in vars(module).items() if isinstance(value, ModelHandle)}


def environments(module: RLModule) -> dict[str, Environment]:
    """The environments of the module's policies, by the names of the attributes."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Environment)}


def has_validation_step(module: RLModule) -> bool:
    """Whether the module has a `validation_step` of its own."""
    return type(module).validation_step is not RLModule.validation_step
