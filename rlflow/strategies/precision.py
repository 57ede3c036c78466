"""The precisions of Lightning's trainer, in the precisions of strategies."""

from __future__ import annotations

from rlflow.errors import UserError
from rlflow.strategies.strategy import TrainingStrategy

OWN = {"64": "fp64", "32": "fp32", "bf16": "bf16", "16": "fp16"}
SHORT = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}  # what Lightning makes of them


def keeps_float32(precision: str | int | None) -> bool:
    """Whether a precision of Lightning's computes in half precision, and keeps weights in float32."""
    return SHORT.get(str(precision), str(precision)).endswith("-mixed")


def own_name(precision: str | int) -> str:
    """The name that strategies have for a precision of Lightning's: `bf16` for `bf16-mixed`."""
    return OWN[str(precision).partition("-")[0]]


def use_precision(strategy: TrainingStrategy, precision: str | int) -> None:
    """Let a strategy train in a precision that is named as in Lightning: `bf16-mixed`, `32-true`, 16.

    Raises:
        UserError: There is no such precision, or the strategy does not train in it; or it has one of its own already.
    """
    name = SHORT.get(str(precision), str(precision))
    bits, _, kind = name.partition("-")
    if bits not in OWN or kind not in ("true", "mixed") or (kind == "mixed" and bits not in ("16", "bf16")):
        raise UserError(
            f"`trainer.precision` is {precision!r}; give one of 32-true, bf16-mixed, 16-mixed, bf16-true, 64-true"
        )
    if strategy.dtype != strategy.precisions["fp32"]:
        raise UserError(f"`trainer.precision` is {precision!r}, and the strategy has a precision too; give one of them")
    is_half, keeps = bits in ("16", "bf16"), strategy.stage is not None  # strategies that divide keep float32 weights
    if is_half and keeps != (kind == "mixed"):
        kept, other = ("keeps weights in float32", "mixed") if keeps else ("keeps no weights in float32", "true")
        more = "" if keeps else ", or `strategy: fsdp`, on one rank too"
        raise UserError(
            f"`trainer.precision` is {precision!r}, and {type(strategy).__name__} {kept}; give {bits}-{other}{more}"
        )
    strategy.use_precision(own_name(precision))
