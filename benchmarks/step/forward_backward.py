"""Three ways to compute the forward and backward passes of a step: the fastest of them is the part.

- `ours`: rlflow's packed model, on the micro-batches of the run, where prompts are in a line once.
- `padded`: transformers' own model, rows of like length side by side, right-padded.
- `packed`: transformers' own model on packed lines, distinguished by position ids that start again; its mask grows with
  the square of a line, so lines are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.step.recorded_parts import Pass
from benchmarks.step.timing import over_ranks
from benchmarks.step.workloads import LEARNING_RATE, Workload
from rlflow.models.attention import PACKED_ATTENTION
from rlflow.models.causal_lm import ScoringModel
from rlflow.models.packing import packed_micro_batches, padded_micro_batches
from rlflow.models.scalar import ScalarModel

WAYS = ("ours", "padded", "packed")
TOKENS = {"padded": 1024, "packed": 512}  # of a micro-batch; more were slower on two cores
CPU = torch.device("cpu")

Update = list[tuple[Any, ...]]  # arguments of one forward pass each


def inputs(way: str, passes: Sequence[Pass]) -> list[Update]:
    """Inputs of a model in these passes, one list for each update; a single list for passes that train nothing."""
    updates: list[list[Pass]] = [[]]
    for each in passes:
        updates[-1].append(each)
        if each.ends_update:
            updates.append([])
    return [_of_update(way, update) for update in updates if update]


def _of_update(way: str, passes: Sequence[Pass]) -> Update:
    if way == "ours":
        return [
            (p.input_ids, p.position_ids, p.cu_seqlens, p.max_seqlen, p.scored, p.prefixes, p.targets) for p in passes
        ]
    rows = [row for each in passes for row in _rows(each)]
    counts = torch.tensor([len(row.tokens) for row in rows])
    split = padded_micro_batches if way == "padded" else packed_micro_batches
    number = int(over_ranks(len(split(counts, TOKENS[way])), dist.ReduceOp.MAX))  # ranks reduce gradients together
    read = _padded if way == "padded" else _packed
    return [read([rows[i] for i in index.tolist()]) for index in split(counts, TOKENS[way], number)]


@dataclass(frozen=True)
class _Row:
    """A whole sequence: tokens `[L]`, whether each is scored `[L]`, and the token after it `[L]`, 0 where it is not."""

    tokens: Tensor
    scored: Tensor
    targets: Tensor


def _rows(of: Pass) -> list[_Row]:
    """The sequences in the order in which they are scored; a sequence is scored up to its last token."""
    by_end = {int(places[-1]): places for places in of.sequences}
    rows, start = [], 0
    for at, place in enumerate(of.scored.tolist()):
        if place not in by_end:
            continue
        places, end = by_end[place], at + 1
        scored = torch.zeros(len(places), dtype=torch.bool)
        scored[len(places) - (end - start) :] = True
        targets = torch.zeros(len(places), dtype=torch.int64).masked_scatter(scored, of.targets[start:end])
        rows.append(_Row(of.input_ids[0][places], scored, targets))
        start = end
    assert start == len(of.scored), "a sequence ends where another goes on"
    return rows


NOTHING = _Row(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64))


def _padded(rows: list[_Row]) -> tuple[Any, ...]:
    rows = rows or [NOTHING]
    tokens, scored, targets = (
        nn.utils.rnn.pad_sequence([getattr(row, name) for row in rows], batch_first=True)
        for name in ("tokens", "scored", "targets")
    )
    return tokens, None, scored.flatten().nonzero()[:, 0], targets[scored]


def _packed(rows: list[_Row]) -> tuple[Any, ...]:
    rows = rows or [NOTHING]
    tokens, scored, targets = (
        torch.cat([getattr(row, name) for row in rows]) for name in ("tokens", "scored", "targets")
    )
    positions = torch.cat([torch.arange(len(row.tokens)) for row in rows])
    return tokens[None], positions[None], scored.nonzero()[:, 0], targets[scored]


class OwnForward(nn.Module):
    """Transformers' own decoder and output layer, which is computed at scored tokens only."""

    def __init__(self, model: Any, decoder: Any, head: nn.Linear) -> None:
        super().__init__()
        self.model = model
        self.decoder = decoder
        self.head = head

    def forward(self, input_ids: Tensor, position_ids: Tensor | None, scored: Tensor, targets: Tensor) -> Tensor:
        """`[R]` logprobs of the targets, or numbers where the output layer has one label."""
        states = self.decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        output: Tensor = self.head(states.flatten(0, 1)[scored]).float()
        if output.shape[1] == 1:
            return output[:, 0]
        nll: Tensor = nn.functional.cross_entropy(output, targets, reduction="none")
        return -nll


class OurForward(nn.Module):
    """The first of what a `PackedModel` returns: logprobs or values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arguments: Any) -> Tensor:
        """`[R]`, of `ModelInput.arguments`, the prefixes before the last of them."""
        *read, prefixes, targets = arguments
        scores: Tensor = self.model(*read, targets, prefixes=prefixes)[0]
        return scores


def build(way: str, folder: Path, workload: Workload, critic: bool) -> nn.Module:
    """The model, which returns scores `[R]` of what `inputs` gives; with adapters where the workload has them."""
    if way == "ours":
        packed: ScoringModel | ScalarModel
        if critic:
            packed = ScalarModel.load(folder / "model", workload.dtype, CPU)
        else:
            packed = ScoringModel.load(folder / "model", workload.dtype, CPU)
        assert packed.model.config._attn_implementation == PACKED_ATTENTION
        if workload.lora is not None:
            packed.add_adapters(workload.lora, str(folder / "model"))
        return OurForward(packed)
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind: Any = AutoModelForSequenceClassification if critic else AutoModelForCausalLM
    settings = {"num_labels": 1} if critic else {}
    own = kind.from_pretrained(folder / "model", dtype=workload.dtype, **settings)
    assert own.config._attn_implementation == "sdpa"
    if workload.lora is not None:
        from peft import LoraConfig, get_peft_model

        lora = workload.lora
        adapted = get_peft_model(
            own, LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        own = adapted.get_base_model()
    return OwnForward(own, own.model, own.score if critic else own.lm_head)


def deepspeed_engine(model: nn.Module, workload: Workload) -> Any:
    """ZeRO-2 around a model, as rlflow has it."""
    import deepspeed

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    elements = sum(parameter.numel() for parameter in trained)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": elements, "allgather_bucket_size": elements},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": workload.dtype == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
    return deepspeed.initialize(config=config, model=model, optimizer=optimizer, dist_init_required=False)[0]


@torch.no_grad()
def score(model: nn.Module, updates: Sequence[Update]) -> None:
    """Forward passes alone."""
    model.eval()
    for update in updates:
        for arguments in update:
            model(*arguments)


def train(engine: Any, updates: Sequence[Update]) -> None:
    """Forward, backward and optimizer."""
    engine.train()
    for update in updates:
        total = sum(len(arguments[-1]) for arguments in update)
        for number, arguments in enumerate(update, 1):
            scores = engine(*arguments)
            engine.set_gradient_accumulation_boundary(number == len(update))
            engine.backward(-scores.sum() / max(1, total))
        engine.step()
