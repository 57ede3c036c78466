"""Settings of a model's optimizer, and optimizers that a module makes."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from rlflow.dotted_path import object_at
from rlflow.errors import UserError

# Limits far beyond values that train: a larger one is a typing error, and would make weights infinite.
MOST = {"lr": 1e3, "eps": 1e3, "weight_decay": 1e3, "warmup_steps": 1e9, "gradient_clipping": 1e9}
LEAST_EPS = 1e-30  # float32 still distinguishes it from 0


@dataclass(frozen=True)
class Optimizer:
    """Settings of a model's optimizer.

    Attributes:
        name: `adamw`, `sgd`, or the path of a class, such as `torch.optim.Adam`. If ranks shard the optimizer's states,
            the optimizer sees pieces of the weights. So an optimizer that uses the shapes of weights, such as Adafactor
            or Muon, works only with ZeRO 0 and `SingleProcess`.
        lr: The highest learning rate, which is reached after the warm-up.
        betas: Decays of AdamW's two moments.
        eps: Number that AdamW adds to its divisor.
        weight_decay: Weight decay: decoupled from the gradient in AdamW, added to the gradient in SGD.
        warmup_steps: Number of updates, or of steps if `interval` is `steps`, over which the learning rate rises from
            0.
        schedule: Course of the learning rate after the warm-up, until the last update.
        interval: Unit of `warmup_steps` and `schedule`: updates, or steps of the run. If the number of rows is not
            known in advance, neither is the number of updates; the number of steps is.
        gradient_clipping: Largest norm of the gradient over all parameters; 0 for no limit.
        arguments: More arguments of the class, as in `{momentum: 0.9}`. A class given by its path gets these and `lr`.
    """

    name: str = "adamw"
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    interval: Literal["updates", "steps"] = "updates"
    gradient_clipping: float = 1.0
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay", "warmup_steps", "gradient_clipping"):
            if not getattr(self, name) >= 0:
                raise UserError(f"`optimizer.{name}` is {getattr(self, name)}; give 0 or more")
            if getattr(self, name) > MOST[name]:
                none = ", or 0 for no limit" if name == "gradient_clipping" else ""
                raise UserError(f"`optimizer.{name}` is {getattr(self, name)}; give at most {MOST[name]:g}{none}")
        if self.name == "adamw" and self.eps < LEAST_EPS:
            raise UserError(
                f"`optimizer.eps` is {self.eps}, and where a gradient is 0 the step is 0 / eps; give {LEAST_EPS:g} or"
                " more"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"`optimizer.betas` is {self.betas}; give two numbers from 0 to below 1")
        if self.name not in ("adamw", "sgd"):
            for name in ("betas", "eps", "weight_decay"):
                if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    raise UserError(
                        f"`optimizer.{name}` is {getattr(self, name)}, and `optimizer.name` is a class; give it in"
                        f" `optimizer.arguments` if {self.name} has it"
                    )
        if self.name != "adamw" or self.arguments:
            try:
                inspect.signature(self.kind).bind([], **self.keywords)
            except TypeError as error:
                raise UserError(
                    f"`optimizer.arguments` is {self.arguments}; {self.name}: {error}. Correct it"
                ) from error

    @property
    def kind(self) -> type[torch.optim.Optimizer]:
        """The class that `name` names."""
        path = {"adamw": "torch.optim.AdamW", "sgd": "torch.optim.SGD"}.get(self.name, self.name)
        if "." not in path:
            raise UserError(
                f"`optimizer.name` is {self.name!r}; give `adamw`, `sgd` or the path of a class such as"
                " `torch.optim.Adam`"
            )
        found = object_at(path, f"`optimizer.name` is {self.name!r}")
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
            raise UserError(f"`optimizer.name` is {self.name!r}, which is not a torch.optim.Optimizer; name one")
        return found

    def made(self, groups: Sequence[Mapping[str, Any]], trained: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of a loaded model.

        Args:
            groups: Parameters in groups, as torch's optimizers take them.
            trained: Trained parameters by name.
        """
        return self.kind([{**group} for group in groups], **self.keywords)

    def small(self, device: torch.device | str = "cpu") -> torch.optim.Optimizer:
        """An optimizer of the class with one small weight that has a gradient, from whose step its states are seen."""
        weight = nn.Parameter(torch.zeros(2, 2, device=device))
        weight.grad = torch.ones_like(weight)
        return self.kind([weight], **self.keywords)

    def check_divides(self) -> None:
        """Refuse a class that updates a whole weight differently than its pieces; called if ranks shard the weights.

        The update of a small matrix is compared with the updates of its halves, for the same gradients.

        Raises:
            UserError: The updates differ.
        """
        generator = torch.Generator().manual_seed(0)
        before, *gradients = torch.randn(3, 4, 6, dtype=torch.float64, generator=generator)
        whole = self._moved(before, gradients)
        halves = [self._moved(before[rows], [each[rows] for each in gradients]) for rows in (slice(2), slice(2, 4))]
        if not torch.allclose(torch.cat(halves), whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max())):
            raise UserError(
                f"`optimizer.name` is {self.name!r}, whose step for a matrix differs from the steps for its parts, and"
                " the ranks of this strategy have parts of it; use `adamw` or `sgd`, or ZeRO 0"
                " (`strategy.init_args.stage: 0`)"
            )

    def _moved(self, before: Tensor, gradients: list[Tensor]) -> Tensor:
        """The change of a weight after a step with each gradient."""
        weight = torch.nn.Parameter(before.clone())
        optimizer = self.kind([weight], **self.keywords)
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        return weight.detach() - before

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments of the class in addition to the parameters."""
        given: dict[str, Any] = {"lr": self.lr}
        if self.name in ("adamw", "sgd"):
            given["weight_decay"] = self.weight_decay
        if self.name == "adamw":
            given |= {"betas": self.betas, "eps": self.eps}
        if twice := given.keys() & self.arguments.keys():
            name = min(twice)
            raise UserError(f"`optimizer.arguments` has `{name}`; that is a setting, so give `optimizer.{name}`")
        if self.name == "adamw" and "foreach" not in self.arguments:
            given["fused"] = True  # one pass over weights, gradients and moments, on the CPU too
        return given | self.arguments


@dataclass(frozen=True)
class GroupedOptimizer(Optimizer):
    """An optimizer from a module's `configure_optimizers`, with groups of weights that have their own settings.

    Of the settings, `warmup_steps`, `schedule`, `interval` and `gradient_clipping` hold for all groups; each group has
    a highest learning rate of its own.

    Attributes:
        given: The optimizer over parameters without values; `made` puts those of the loaded model in their place.
        groups: For each group the names of its weights (`weights`), and its highest learning rate (`lr`).
        scheduler: Scheduler of the optimizer's learning rates, instead of `warmup_steps` and `schedule`; None for none.
    """

    given: Any = None
    groups: Sequence[Mapping[str, Any]] = ()
    scheduler: LRScheduler | None = None

    @property
    def kind(self) -> type[torch.optim.Optimizer]:
        return type(self.given)

    @property
    def keywords(self) -> dict[str, Any]:
        known = inspect.signature(self.kind).parameters
        return {name: value for name, value in self.given.defaults.items() if name in known}

    def made(self, groups: Sequence[Mapping[str, Any]], trained: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        for group, of in zip(self.given.param_groups, self.groups, strict=True):
            group["params"] = [trained[name] for name in of["weights"]]
            group["highest_lr"] = of["lr"]
        optimizer: torch.optim.Optimizer = self.given
        return optimizer

    def advance(self, updates: int) -> None:
        """Let the scheduler set the learning rates after this number of further updates."""
        assert self.scheduler is not None
        with warnings.catch_warnings():  # it expects an update before each call; a run that resumes made them before
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(updates):
                self.scheduler.step()
