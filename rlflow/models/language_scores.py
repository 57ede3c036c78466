"""What a language model says of rows: log-probabilities, entropy, the likeliest tokens, hidden states, divergence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.models.packing import Scorable, no_rows, response_mask, take, whole
from rlflow.models.readouts import Divergence, FrozenLayer, OfTokens, states
from rlflow.models.routed_handle import RoutedHandle
from rlflow.values.batch import TokenRows
from rlflow.values.cuts import PerSample, PerToken
from rlflow.values.host_copy import rows_at
from rlflow.values.ragged import Ragged


def _ignore(rows: Scorable, logprobs: Tensor) -> None:
    """Nobody watches."""


class LanguageScores(RoutedHandle):
    """The methods of a language model that score. Each is a collective of the role's ranks.

    Attributes:
        temperature: Divides the logits.
        watch: Called with the log-probabilities of all responses that are scored, after their rows.
    """

    temperature: float
    watch: Callable[[Scorable, Tensor], None] = staticmethod(_ignore)

    def score(self, rows: Scorable) -> tuple[PerToken, PerToken]:
        """Log-probability of each response token, and entropy of the distribution that it was drawn from.

        Args:
            rows: A `Batch`, a `Rollout`, or anything with their `prompt_ids`, `response_ids` and `lengths`.

        Returns:
            `[B, T]` each, in float32 (float64 where the model is), 0 where padded.
        """
        logprobs, entropy = self._scores(rows, self.temperature)
        self.watch(rows, logprobs)
        return logprobs, entropy

    def logprobs(self, rows: Scorable) -> PerToken:
        """The first of `score`."""
        return self.score(rows)[0]

    def entropy(self, rows: Scorable) -> PerToken:
        """The second of `score`."""
        return self.score(rows)[1]

    def logprobs_of(self, rows: Scorable, ids: Tensor) -> Tensor:
        """Log-probabilities of given tokens where each response token stands.

        Args:
            rows: A `Batch`, a `Rollout`, or anything with their `prompt_ids`, `response_ids` and `lengths`.
            ids: `[B, T, K]` int64, tokens of the vocabulary; what stands where responses are padded is not read.

        Returns:
            `[B, T, K]`, in float32 (float64 where the model is), 0 where padded.
        """
        if ids.dim() != 3 or ids.shape[:2] != rows.response_ids.shape:
            raise UserError(
                f"`logprobs_of` was given tokens {list(ids.shape)} for responses {list(rows.response_ids.shape)}; give"
                " K tokens for each response token, [B, T, K]"
            )
        return self._of_tokens(rows, OfTokens(), ids)[0]

    def topk(self, rows: Scorable, k: int) -> tuple[Tensor, Tensor]:
        """The `k` likeliest tokens where each response token stands, the likeliest first.

        Args:
            rows: As of `logprobs_of`.
            k: From 1 to the size of the vocabulary.

        Returns:
            `[B, T, k]` log-probabilities, with gradients within training, and `[B, T, k]` int64 tokens; 0 where padded.
        """
        if k < 1:
            raise UserError(f"`topk` was asked for {k} tokens; ask for 1 or more")
        logprobs, tokens = self._of_tokens(rows, OfTokens(top=k))
        return logprobs, tokens

    def hidden(self, rows: Scorable) -> PerSample:
        """What the output layer reads at the last token of each row; at the prompt's last where there is no response.

        Args:
            rows: As of `logprobs_of`.

        Returns:
            `[B, H]` in float32 (float64 where the model is).
        """
        (states_there,) = self._scores(whole(rows), self.temperature, states)
        return states_there[:, 0]

    def kl(
        self,
        rows: Scorable,
        other: LanguageScores,
        given: Ragged | None = None,
        over: Literal["self", "other"] = "self",
    ) -> PerToken:
        """The Kullback-Leibler divergence from a frozen model, over the whole vocabulary, at each response token.

        By default it is KL(self || other), the sum of p log(p / q) with p this model's distribution and q that of
        `other`: what distillation calls reverse KL where this model is the student (MiniLLM, arXiv 2306.08543; GKD,
        arXiv 2306.13649). The logits of each model are divided by its own temperature. In a train node, name `other`
        in the mark's `uses`, and read `given` as a value of its own, `Ragged`.

        Args:
            rows: As of `logprobs_of`.
            other: A frozen model of the same vocabulary on the same ranks; no gradient goes to it.
            given: Other prompts, one a row, after which `other` reads the same responses; None for those of `rows`.
            over: Whose distribution the sum is weighted by: `other` gives KL(other || self), forward KL.

        Returns:
            `[B, T]` in nats, in float32 (float64 where the model is), 0 where padded.

        Raises:
            UserError: `other` is trained, has another vocabulary, or `given` is of other rows.
        """
        self._check_kl(rows, other, given, over)

        def divergence(part: Tensor | None) -> tuple[Tensor, ...]:
            own: Scorable = rows if part is None else take(rows, part)
            prompts = own.prompt_ids if given is None else given if part is None else given.take(part)
            layer = FrozenLayer(other.plan.gathers)
            with torch.no_grad():
                of_other = TokenRows(prompts, own.response_ids, own.lengths)
                _, (beside,) = other._forward_once(of_other, other.temperature, layer)
            return self._score_once(own, self.temperature, Divergence(layer, over == "other"), beside=beside)

        kl, logprobs = self._by_micro_batch(rows, divergence, () if given is None else (given,))
        self.watch(rows, logprobs)
        return kl

    def _check_kl(self, rows: Scorable, other: LanguageScores, given: Ragged | None, over: str) -> None:
        if other.trainable:
            raise UserError(
                f"`kl` to {other.model!r}, which is trained: no gradient would go to it; give a frozen model, as"
                f" CausalLM({other.model!r}, trainable=False) or `averaged`"
            )
        if over not in ("self", "other"):
            raise UserError(f"`over` of `kl` is {over!r}; it is 'self' or 'other'")
        if given is not None and len(given) != len(rows.lengths):
            raise UserError(f"`kl` was given {len(given)} other prompts for {len(rows.lengths)} rows; give one a row")

    def _of_tokens(self, rows: Scorable, readout: OfTokens, ids: Tensor | None = None) -> tuple[Tensor, ...]:
        def of_part(part: Tensor | None) -> tuple[Tensor, ...]:
            own: Scorable = rows if part is None else take(rows, part)
            if ids is None:
                return self._score_once(own, self.temperature, readout)
            asked = ids if part is None else rows_at(ids, part)
            places = response_mask(own).flatten().nonzero().flatten()  # counted on the host: no device is waited for
            return self._score_once(own, self.temperature, readout, beside=rows_at(asked.flatten(0, 1), places))

        logprobs, *found = self._by_micro_batch(rows, of_part)
        self.watch(rows, logprobs)
        return tuple(found)

    def score_nothing(self) -> Tensor:
        """See `ModelHandle.score_nothing`."""
        return self._scores(no_rows(), self.temperature)[0].sum()
