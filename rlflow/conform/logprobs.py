"""References for the logprobs of tokens, from logits or from a model, term by term."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlflow.conform import properties
from rlflow.conform.terms import Case, Choice, Interface, Option, View

# Log-probabilities of all tokens from logits and the temperature.
TEMPERATURES = {
    "once": Option("logits are divided by the temperature once", lambda z, t: (z / t).log_softmax(-1)),
    "none": Option("the temperature is not applied", lambda z, t: z.log_softmax(-1)),
    "twice": Option("logits are divided by the temperature twice", lambda z, t: (z / t**2).log_softmax(-1)),
    "multiplied": Option("logits are multiplied by the temperature", lambda z, t: (z * t).log_softmax(-1)),
    "after": Option(
        "logprobs are divided by the temperature, and no longer add up to 1", lambda z, t: z.log_softmax(-1) / t
    ),
}
OUTPUTS = {
    "log": Option("log-softmax", lambda x, z: x),
    "none": Option("logits that are not normalized", lambda x, z: z),
    "probability": Option("probabilities in place of logprobs", lambda x, z: x.exp()),
    "time": Option(
        "the softmax is over positions in place of tokens",
        lambda x, z: torch.cat([z[:, :-1].log_softmax(1), x[:, -1:]], 1),
    ),
}
SIGNS = {"plus": Option("logprobs", lambda x: x), "minus": Option("negative logprobs", lambda x: -x)}
SHIFTS = {
    "next": Option("logits score the token that follows", 0),
    "same": Option("logits score the token that they were computed from", 1),
    "late": Option("logits score the token after the next", -1),
}
MASKS = {
    "target": Option("the mask of the token that is scored", lambda m: m[:, 1:]),
    "input": Option("the mask one token off, m[:, :-1] in place of m[:, 1:]", lambda m: m[:, :-1]),
    "far": Option("the mask one token off, early", lambda m: torch.cat([m[:, 2:], torch.zeros_like(m[:, :1])], dim=1)),
}
POSITIONS = {
    "counted": Option("positions count the tokens that are not padding", lambda a: (a.cumsum(1) - 1).clamp(min=0)),
    "arange": Option(
        "positions count padding too, so they are shifted by it", lambda a: torch.arange(a.shape[1]).expand_as(a)
    ),
    "from 1": Option("positions begin with 1", lambda a: a.cumsum(1) * a),
}
ATTENTIONS = {
    "masked": Option("padding is not attended to", lambda a: a),
    "none": Option("padding is attended to", lambda a: torch.ones_like(a)),
}
LOGPROB_TERMS: Mapping[str, Mapping[str, Option]] = {
    "temperature": TEMPERATURES,
    "position": SHIFTS,
    "mask": MASKS,
    "normalization": OUTPUTS,
    "sign": SIGNS,
    "position ids": POSITIONS,
    "padding": ATTENTIONS,
}
VOCABULARY = 7


class ToyModel:
    """A causal model with learned positions, called as transformers' models are; its output depends on padding.

    Without `position_ids` it counts all places, as GPT-2 of transformers does.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self.tokens, self.positions = (
            torch.randn(12, VOCABULARY, generator=generator, dtype=torch.float64) for _ in range(2)
        )

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None, **_: Any
    ) -> Any:
        attended = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        places = POSITIONS["arange"](attended) if position_ids is None else position_ids
        read = self.tokens[input_ids] + self.positions[places.long()]
        weights = attended[:, None, :].double().tril() + 1e-9  # [B, T, T]
        return SimpleNamespace(logits=(weights @ read) / weights.sum(2, keepdim=True) + self.tokens[input_ids])

    def eval(self) -> ToyModel:
        """Return the model itself; it has no dropout."""
        return self


MODEL = ToyModel()


def _reference(view: View, choice: Choice) -> Tensor:
    given = view.given
    logits = given["logits"]
    if view.form.startswith("model"):
        attention = given["attention_mask"]
        attended = ATTENTIONS[choice["padding"]](attention)
        places = POSITIONS[choice["position ids"]](attention)
        logits = MODEL(given["ids"], attended, places).logits
    scored = TEMPERATURES[choice["temperature"]](logits, given["temperature"])
    scored = OUTPUTS[choice["normalization"]](scored, logits / given["temperature"])
    if view.form == "aligned":
        found = scored.roll(SHIFTS[choice["position"]].compute * -1, 1).gather(2, given["targets"][:, :, None])[:, :, 0]
        return torch.as_tensor(SIGNS[choice["sign"]](found))
    rolled = scored.roll(-SHIFTS[choice["position"]].compute, 1)
    found = rolled[:, :-1].gather(2, given["ids"][:, 1:, None])[:, :, 0]
    if choice["mask"] != "target":
        found = found * MASKS[choice["mask"]](given["mask"])
    return torch.as_tensor(SIGNS[choice["sign"]](found))


def _compared(view: View, output: Tensor) -> Tensor:
    mask = view.given["mask"] != 0
    width = mask.shape[1]
    if view.form == "aligned":
        return output[mask]
    if output.shape[1] == width:  # of all tokens: each at its own place, or at that of the token before
        output = output[:, :-1] if view.form.endswith("before") else output[:, 1:]
    return output[mask[:, 1:]]


def _cases() -> list[Case]:
    generator = torch.Generator().manual_seed(9)
    shape = (3, 6)
    logits = 2 * torch.randn(*shape, VOCABULARY, generator=generator, dtype=torch.float64)
    ids = torch.randint(1, VOCABULARY, shape, generator=generator)

    def made(prompt: int, left: tuple[int, ...], right: tuple[int, ...], temperature: float) -> dict[str, Any]:
        places = torch.arange(shape[1])
        real = (places >= torch.tensor(left)[:, None]) & (places < shape[1] - torch.tensor(right)[:, None])
        mask = real & (places >= prompt)
        read = ids.where(real, 0)
        return {
            "logits": logits,
            "ids": read,
            "targets": ids.roll(1, 1),
            "attention_mask": real.long(),
            "mask": mask.double(),
            "temperature": temperature,
        }

    none = (0, 0, 0)
    return [
        Case("temperature 1", "position", made(2, none, none, 1.0)),
        Case("temperature 0.5", "temperature", made(2, none, none, 0.5)),
        Case("a mask with one token", "mask", made(5, none, none, 1.0)),
        Case("padding on the right", "padding", made(2, none, (0, 2, 1), 0.7)),
        Case("padding on the left", "position ids", made(3, (0, 2, 1), none, 0.7)),
    ]


LOGPROBS = Interface(
    "logprobs",
    _cases(),
    LOGPROB_TERMS,
    _reference,
    _compared,
    "temperature 0.5",
    properties.LOGPROBS,
    needs={"mask": "mask", "position ids": "model", "padding": "model", "temperature": "temperature"},
)
