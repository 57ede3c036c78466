"""`ValueModel` and `RewardModel`: Hugging Face models for sequence classification with one label."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlflow.errors import UserError
from rlflow.models.handle import ModelHandle
from rlflow.models.optimizer import Optimizer
from rlflow.models.packed import SCALAR_AUTO_CLASS, PackedModel
from rlflow.models.packing import ALONE, Peers
from rlflow.models.picture_processor import reads_pictures
from rlflow.values.column_kinds import PerSample, PerToken
from rlflow.values.protocols import Tokens


class ValueModel(ModelHandle):
    """A model with one number at each token: `self.critic = ValueModel(self.model)`. Constructing it loads nothing.

    It is a Hugging Face model for sequence classification with one label. A causal language model has no such output
    layer. If `model` is one, the output layer starts with zeros, so all values are 0 at first.
    """

    default_optimizer = Optimizer(lr=1e-5)  # higher than that of a model that is tuned: this one learns from zeros

    def values(self, rows: Tokens) -> PerToken:
        """The value before each response token. Like the token's log-probability, it is computed at the token before.

        Args:
            rows: A `Batch`, a `Rollout`, or anything with their `prompt_ids`, `response_ids` and `lengths`.

        Returns:
            `[B, T]` in float32 (float64 where the model is), 0 where padded.
        """
        (values,) = self._scores(rows)
        return values

    def final_values(self, rows: Tokens) -> PerSample:
        """`[B]`, the value after the last response token: the reward still expected if the response was cut.

        For a row without a response it is the value after the prompt.
        """
        (values,) = self._scores(rows, at_end=True)
        return values[:, 0]

    @property
    def kind(self) -> type[ScalarModel]:
        """See `ModelHandle.kind`."""
        return ScalarModel


class RewardModel(ModelHandle):
    """A model with one number for a response: `self.reward_model = RewardModel(path, trainable=False)`.

    It is a Hugging Face model for sequence classification with one label. A reward model that is trained may be loaded
    from a causal language model; its output layer then starts with zeros. Constructing it loads nothing.
    """

    def scores(self, rows: Tokens) -> PerSample:
        """The score of each row, read at its last response token, or at the prompt's last if there is no response.

        Args:
            rows: A `Batch`, a `Rollout`, or anything with their `prompt_ids`, `response_ids` and `lengths`.

        Returns:
            `[B]` in float32 (float64 where the model is).
        """
        (scores,) = self._scores(rows, at_end=True)
        return scores[:, 0]

    @property
    def kind(self) -> type[ScalarModel]:
        """See `ModelHandle.kind`."""
        return ScalarModel


HEAD = "score"  # transformers' name of the output layer of decoders


class ScalarModel(PackedModel):
    """A model for sequence classification whose output layer is applied at every scored token.

    Args:
        classifier: The transformers model, with one label.

    Raises:
        UserError: The model has no output layer `score`, which decoders have.
    """

    auto_class = SCALAR_AUTO_CLASS
    head = HEAD

    def __init__(self, classifier: Any) -> None:
        head = getattr(classifier, HEAD, None)
        if not isinstance(head, nn.Linear):
            raise UserError(f"{type(classifier).__name__} has no output layer `{HEAD}`; use a decoder's model")
        setattr(classifier, HEAD, ScalarHead(head))
        super().__init__(classifier)

    @property
    def decoder(self) -> Any:
        """See `PackedModel.decoder`."""
        below: Any = self.model.base_model
        return below.get_decoder() if reads_pictures(self.model.config) else below

    @property
    def output_layer(self) -> Any:
        """See `PackedModel.output_layer`."""
        return getattr(self.model, HEAD)

    def check(
        self, forward: nn.Module, device: torch.device, share_prefixes: bool = False, peers: Peers = ALONE
    ) -> None:
        """See `PackedModel.check`. A new output layer gets random numbers for it: its zeros would hide differences."""
        self.output_layer.random = self.new_head
        super().check(forward, device, share_prefixes, peers)
        self.output_layer.random = False

    def own_scores(self, forward: nn.Module, tokens: Tensor, prompt: int) -> Tensor:
        """Numbers at the token before each token after the prompt; see `PackedModel.own_scores`."""
        config = self.model.config.get_text_config()
        pad, config.pad_token_id = config.pad_token_id, None  # without padding the model scores the last token
        found = [forward(tokens[None, :end])[0, 0] for end in range(prompt, len(tokens))]
        config.pad_token_id = pad
        scores = torch.stack(found)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))


class ScalarHead(nn.Module):
    """A model's output layer with one label, computed in float32 at least, as bfloat16 makes near values equal.

    It holds the weights of the layer that it replaces. All work is done within `forward`, since ZeRO-3 gathers the
    weights there.

    Args:
        layer: Layer that is replaced, with a weight `[1, H]`.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self.random = False  # compute with seeded random numbers in place of the weight

    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor]:
        """`[N, H]` hidden states to `[N]` numbers; the targets are not read."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        return (nn.functional.linear(hidden.to(dtype), self._weight().to(dtype), bias)[:, 0],)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., H]` hidden states to the numbers `[..., 1]` of the layer that this replaces."""
        return nn.functional.linear(hidden, self._weight(), self.bias)

    def _weight(self) -> Tensor:
        if not self.random:
            return self.weight
        drawn = torch.randn(self.weight.shape, generator=torch.Generator().manual_seed(0))
        return drawn.to(self.weight)

    @torch.no_grad()
    def zero(self) -> None:
        """Set all parameters to 0, so that every score is 0."""
        for parameter in self.parameters():
            parameter.zero_()
