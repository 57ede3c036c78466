"""Settings for the responses to some prompts that replace the run's: of a dataset, or of validation."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.errors import UserError
from rlflow.values.truncation import Truncation

HOTTEST = 1e4  # highest temperature; logits divided by its inverse, the lowest, are still finite in float16


@dataclass(frozen=True)
class SamplingSettings(Truncation):
    """Settings with which responses to some prompts are sampled, in place of the policy's own settings.

    Args:
        top_p: Sample from the smallest set of likeliest tokens with at least this total probability; 1 for all tokens.
        top_k: Sample from this number of likeliest tokens; None for no limit.
        min_p: Sample from tokens with at least this share of the likeliest token's probability; 0 for all tokens.
        temperature: Temperature of sampling.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_temperature(self.temperature)


@dataclass(frozen=True)
class ResponseSettings:
    """A dataset's settings for the responses to its prompts, in a mixture.

    Attributes:
        max_tokens: Tokens of the longest response; None for those of the run.
        sampling: Settings with which the responses are sampled; None for the policy's settings.
    """

    max_tokens: int | None = None
    sampling: SamplingSettings | None = None


def require_temperature(temperature: float) -> None:
    """Refuse a temperature of 0, or one at which logits are no longer finite."""
    if not 1 / HOTTEST <= temperature <= HOTTEST:
        raise UserError(
            f"`temperature` is {temperature}; it divides the logits, so give a number from {1 / HOTTEST:g} to"
            f" {HOTTEST:g}"
        )
