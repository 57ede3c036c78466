from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from rlflow.errors import UserError
from rlflow.models.optimizer import Optimizer


@pytest.mark.parametrize("setting", ["lr", "eps", "weight_decay", "warmup_steps", "gradient_clipping"])
def test_a_setting_of_an_optimizer_below_zero_is_refused(setting: str) -> None:
    with pytest.raises(UserError, match=f"`optimizer.{setting}` is -1"):
        Optimizer(**{setting: -1})  # type: ignore[arg-type]


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, -0.1)])
def test_betas_outside_their_range_are_refused(betas: tuple[float, float]) -> None:
    with pytest.raises(UserError, match=r"`optimizer\.betas`"):
        Optimizer(betas=betas)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "adam"}, "`optimizer.name` is 'adam'; give `adamw`"),
        (
            {"name": "torch.optim.Adamm"},
            "`optimizer.name` is 'torch.optim.Adamm', but torch.optim has no Adamm. Did you",
        ),
        ({"name": "torh.optim.Adam"}, "`optimizer.name` is 'torh.optim.Adam', but there is no module torh"),
        ({"name": "torch.nn.Linear"}, "`optimizer.name` is 'torch.nn.Linear', which is not a torch.optim.Optimizer"),
        ({"name": "torch.optim.Adam", "eps": 1e-6}, "`optimizer.eps` is 1e-06, and `optimizer.name` is a class"),
        ({"name": "sgd", "arguments": {"momentun": 0.9}}, "sgd: got an unexpected keyword argument 'momentun'"),
        ({"arguments": {"eps": 1e-6}}, "`optimizer.arguments` has `eps`; that is a setting"),
        ({"arguments": {"lr": 1.0}}, "`optimizer.arguments` has `lr`; that is a setting"),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_refused_by_its_constructor(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        Optimizer(**settings)


@pytest.mark.parametrize("given", [{"fused": False}, {"foreach": True}])
def test_arguments_of_adamw_decide_how_it_computes(given: dict[str, Any]) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    (group,) = Optimizer(arguments=given).made([{"params": [weight]}], {"weight": weight}).param_groups
    assert group | given == group
    assert not group["fused"]
