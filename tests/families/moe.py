"""An update of a mixture of experts, with its load-balancing loss and replayed experts: by rlflow, and without it.

The reference is plain transformers in float64, a row at a time. Its routers are replaced by functions written from the
papers: R3 (arXiv 2510.11370) weighs the given experts by the router's probabilities, normalised over them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlflow.models.causal_lm import CausalLM
from rlflow.models.moe import MoE
from rlflow.models.optimizer import Optimizer
from rlflow.strategies import DeepSpeedStrategy, FSDPStrategy, TrainingStrategy
from rlflow.values.batch import TokenRows
from rlflow.values.layout import Layout
from rlflow.values.ragged import Ragged
from tests.strategies.reference import ROWS, TEMPERATURE, TOKENS
from tests.strategies.strategy_update import MICRO_BATCHES, Outcome, all_weights, rows_of

COEF = 0.3  # large, so that its gradient counts
LAYERS, CHOSEN = 2, 2
EXPERTS = {"qwen3_moe": 8, "mixtral": 4, "gpt_oss": 4}
SGD = Optimizer(name="sgd", lr=0.1, gradient_clipping=0.0)
# Made in the ranks: what a strategy is, by name.
STRATEGIES: dict[str, Callable[[], TrainingStrategy]] = {
    "zero2": lambda: DeepSpeedStrategy(2),
    "zero3": lambda: DeepSpeedStrategy(3),
    "fsdp": lambda: FSDPStrategy(),
}


def replayed(name: str) -> list[Tensor]:
    """`[tokens, layers, k]` for each row of the reference: experts that no router would choose."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for prompt, response, _ in ROWS:
        tokens = len(prompt) + len(response) - 1
        found.append(torch.rand(tokens, LAYERS, EXPERTS[name], generator=generator).argsort(-1)[..., :CHOSEN])
    return found


def routed_rows(numbers: list[int], experts: list[Tensor] | None) -> TokenRows:
    """Rows of the reference, with their experts."""
    batch = rows_of(numbers)
    told = {}
    if experts is not None and numbers:
        lengths = torch.tensor([len(experts[number]) for number in numbers])
        told["experts"] = Ragged(torch.cat([experts[number] for number in numbers]).to(torch.uint8), lengths)
    return TokenRows(batch.prompt_ids, batch.response_ids, batch.lengths, told)


def moe_update(
    name: str, folder: Path, strategy: str, moe: MoE, checkpointing: bool = False, layers: int = 1, experts: int = 1
) -> Outcome:
    """One update through a strategy, in uneven micro-batches, with so many ranks to a layer and to its experts."""
    made: Any = STRATEGIES[strategy]()
    world = torch.distributed.get_world_size()
    Fabric(accelerator="cpu", devices=world, strategy=made.processes).launch()
    layout = Layout(tuple(range(world)), world // layers, tensor_parallel_size=layers, expert_parallel_size=experts)
    made.form_groups({"actor": layout})
    handle = CausalLM(
        str(folder), optimizer=SGD, temperature=TEMPERATURE, gradient_checkpointing=checkpointing, moe=moe
    )
    made.setup_role("actor", handle, folder)
    chosen = replayed(name) if moe.routing_replay else None
    own = MICRO_BATCHES[layout.shards][layout.shard(made.global_rank)]
    count, outcome = made.agree("actor", len(own)), Outcome()
    for part in range(count):
        numbers = own[part] if part < len(own) else []
        weights = torch.tensor([ROWS[number][2] for number in numbers])
        with handle.training():
            logprobs = handle.logprobs(routed_rows(numbers, chosen))
        loss = -(weights[:, None] * logprobs).sum() / TOKENS
        uneven, *_ = handle.take_routed()
        if uneven is not None:
            loss = loss + uneven / len(ROWS)
        made.backward("actor", loss, last=part == count - 1)
    outcome.gradients.append({key: value.clone() for key, value in made.gradients("actor").items()})
    outcome.norms.append(made.step("actor"))
    outcome.weights = all_weights(made, "actor")
    return outcome


def plain_moe_update(name: str, folder: Path, coef: float, replay: bool, frozen: bool = False) -> dict[str, Tensor]:
    """The gradient of the same update in float64, by name; without routers' where they are frozen."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **eager)
    seen: list[tuple[Tensor, Tensor]] = []  # logits and experts used in each layer, of the row in progress
    experts, row = replayed(name), 0
    for number, layer in enumerate(model.model.layers):
        router = layer.mlp.router if name == "gpt_oss" else layer.mlp.gate
        if frozen:
            router.requires_grad_(False)

        def route(hidden: Tensor, router: Any = router, number: int = number) -> tuple[Tensor, Tensor, Tensor]:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T + getattr(router, "bias", 0.0)
            chosen = experts[row][:, number] if replay else logits.topk(CHOSEN).indices
            seen.append((logits, chosen))
            odds = torch.zeros_like(logits).scatter(1, chosen, 1.0) * logits.exp()  # I_e exp(s_e)
            return logits, (odds / odds.sum(1, keepdim=True)).gather(1, chosen), chosen

        router.forward = route
    for row, (prompt, response, weight) in enumerate(ROWS):  # noqa: B007 - routers read it
        seen.clear()
        tokens = torch.tensor([prompt + response])
        logits = model(tokens[:, :-1]).logits[0, len(prompt) - 1 :]
        of_all = torch.log_softmax(logits / TEMPERATURE, dim=-1)
        logprobs = of_all[torch.arange(len(response)), tokens[0, len(prompt) :]]
        loss = -weight * logprobs.sum() / TOKENS
        for router_logits, chosen in seen:
            count = router_logits.shape[1]
            f = torch.stack([(chosen == e).double().sum() / chosen.numel() for e in range(count)])
            p = router_logits.softmax(1).mean(0)
            loss = loss + coef * count * (f * p).sum() / LAYERS / len(ROWS)
        loss.backward()
    return {key: value.grad.clone() for key, value in model.named_parameters() if value.requires_grad}
