"""The cases of `gpu.py` that compare a device with the CPU: attention, gradients, engines after weight syncs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor

from rlflow import CausalLM, LoRA, Optimizer, ValueModel
from rlflow.models.attention import packed_attention
from rlflow.models.prefixes import Prefixes
from rlflow.models.tiny import tiny_tokenizer, write_model, write_tiny_model
from rlflow.rollout import RankInfo, RolloutEngine, Sampling, TransformersEngine, VLLMEngine
from rlflow.strategies import DeepSpeedStrategy, FSDPStrategy, SingleProcess, TrainingStrategy
from rlflow.types import Ragged
from rlflow.values.batch import TokenRows
from rlflow.values.columns import to_device
from rlflow.values.layout import Layout

ROWS, LONGEST = 12, 24
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Of gradients relative to their norm, and of logprobs. float32 resolves 6e-8 and sums up; bf16 4e-3.
GRADIENT_LIMIT = {"fp32": 1e-4, "bf16": 0.05}
ATTENTION_LIMIT = 0.02  # of bf16, relative to the norm
LOGPROB_LIMIT = {"fp32": 1e-3, "bf16": 0.05}  # the mean's; vLLM's float32 attention on GPUs may use TF32
SYNCS = 3

Found = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Case:
    """Something to run in a process of its own.

    Attributes:
        name: Name in the report.
        run: Called with a folder, the device, the number of devices, and `settings`; gives values and their limits.
        settings: Its own settings.
        devices: Ranks.
        needs_cuda: Whether the CPU cannot run it.
    """

    name: str
    run: Callable[..., Found]
    settings: dict[str, Any] = field(default_factory=dict)
    devices: int = 1
    needs_cuda: bool = False


def small_model(folder: Path) -> Path:
    """A Qwen2 of about 2 million random weights, whose matrices ZeRO-3 divides."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "layers": 3, "heads": 4, "kv_heads": 2}
    return write_tiny_model(folder / "model", seed=3, **sizes)


# Other than Qwen2: experts, and layers that carry a state in addition to attention. 128 tokens, as `small_model`.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2},
}
COMMON = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 0}


def small_family(folder: Path, family: str) -> Path:
    """A small model of a family in `FAMILIES`, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    more = {"pad_token_id": 1, "max_position_embeddings": 512, "tie_word_embeddings": False, **FAMILIES[family]}
    config = AutoConfig.for_model(family, **COMMON, **more)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    model.config.architectures = [type(model).__name__]  # by which vLLM finds its own
    return write_model(folder / "model", model, tiny_tokenizer(512))


def small_critic(folder: Path, model: Path) -> Path:
    """A model as `model`, with a random value head: one that starts with zeros gives no gradient below it."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(model, num_labels=1, pad_token_id=1)
    torch.manual_seed(3)
    critic = AutoModelForSequenceClassification.from_config(config)
    critic.save_pretrained(folder / "critic")
    tiny_tokenizer(512).save_pretrained(folder / "critic")
    return folder / "critic"


def strategy_of(name: str, precision: Any, **settings: Any) -> TrainingStrategy:
    """FSDP2 by `fsdp`, DeepSpeed by `zero0` to `zero3`."""
    if name == "fsdp":
        return FSDPStrategy(precision, **settings)
    stage: Any = int(name.removeprefix("zero"))
    return DeepSpeedStrategy(stage, precision, **settings)


def check_gradients(
    folder: Path,
    device: str,
    devices: int,
    *,
    strategy: str,
    precision: str = "fp32",
    experts_over: int = 0,
    trains: str = "actor",
    **settings: Any,
) -> Found:
    """Gradients of the same rows at once and in three micro-batches, against float64 on the CPU in one piece.

    With `experts_over`, of a mixture of experts, which so many ranks divide. `trains` is `actor`, `adapters` or
    `critic`.
    """
    model = small_family(folder, "qwen3_moe") if experts_over else small_model(folder)
    if trains == "critic":
        model = small_critic(folder, model)
    handle = partial(_handle, str(model), trains)
    expected, expected_norm = _gradients(SingleProcess("fp64"), "cpu", 1, handle, [1], Layout((0,), 1))[1]
    trained = strategy_of(strategy, precision, **settings)
    layout = Layout(tuple(range(devices)), devices, expert_parallel_size=max(1, experts_over))
    values, limits = {}, {}
    for parts, (found, norm) in _gradients(trained, device, devices, handle, [1, 3], layout).items():
        values[f"gradient_error_{parts}"] = _distance(found, expected)
        values[f"norm_error_{parts}"] = abs(norm - expected_norm) / expected_norm
        limits[f"gradient_error_{parts}"] = limits[f"norm_error_{parts}"] = GRADIENT_LIMIT[precision]
    return {"values": values, "limits": limits}


def _gradients(
    strategy: TrainingStrategy,
    device: str,
    devices: int,
    handle: Callable[[], CausalLM | ValueModel],
    all_parts: list[int],
    layout: Layout,
) -> dict[int, tuple[dict[str, Tensor], float]]:
    """Gradients of one update by number of micro-batches, as float64 on the CPU; and the norm from the update.

    A process has one group and one DeepSpeed, so all are of one strategy, and roles have different names.
    """
    fabric = Fabric(accelerator=device, devices=devices, strategy=strategy.processes)

    def updates(_: Fabric) -> dict[int, tuple[dict[str, Tensor], float]]:
        strategy.form_groups({f"actor{parts}": layout for parts in all_parts})
        return {parts: _update(strategy, handle(), parts, devices) for parts in all_parts}

    found: dict[int, tuple[dict[str, Tensor], float]] = fabric.launch(updates)
    return found


def _handle(model: str, trains: str) -> CausalLM | ValueModel:
    """Handle of the model to train: `actor`, `adapters` of one, or a `critic`."""
    optimizer = Optimizer("sgd", lr=0.1, gradient_clipping=0.0)
    if trains == "critic":
        return ValueModel(model, optimizer=optimizer)
    return CausalLM(model, optimizer=optimizer, lora=LoRA() if trains == "adapters" else None)


def _update(
    strategy: TrainingStrategy, handle: CausalLM | ValueModel, parts: int, devices: int
) -> tuple[dict[str, Tensor], float]:
    """This rank's share of the rows, every `devices`-th one, in so many micro-batches."""
    name = f"actor{parts}"
    strategy.setup_role(name, handle, Path(handle.model))
    tokens = int(_rows(range(ROWS), torch.device("cpu")).lengths.sum())
    here = range(strategy.global_rank if devices > 1 else 0, ROWS, devices)
    for part in range(parts):
        rows = _rows(here[part * len(here) // parts : (part + 1) * len(here) // parts], strategy.root_device)
        with handle.training():
            scores = handle.values(rows) if isinstance(handle, ValueModel) else handle.logprobs(rows)
            loss = -(scores * torch.linspace(0.5, 1.5, LONGEST, device=strategy.root_device)).sum()
        strategy.backward(name, loss / tokens, last=part == parts - 1)
    found = {key: gradient.detach().double().cpu().clone() for key, gradient in strategy.gradients(name).items()}
    return found, strategy.step(name)


def _rows(numbers: range, device: torch.device) -> TokenRows:
    """Rows of various lengths, the same in every process; padded to one width, so that weights are by position.

    Four rows in turn have one prompt, which they share.
    """
    prompts, lengths = [], []
    responses = torch.zeros(len(numbers), LONGEST, dtype=torch.int64)
    for row, number in enumerate(numbers):
        generator = torch.Generator().manual_seed(1000 + number // 4)
        prompts.append(torch.randint(32, 120, (9 + number // 4,), generator=generator).tolist())
        generator.manual_seed(number)
        length = LONGEST - number
        responses[row, :length] = torch.randint(32, 120, (length,), generator=generator)
        lengths.append(length)
    ragged = Ragged.from_lists(prompts)
    there = Ragged(ragged.values.to(device), ragged.lengths.to(device))
    return TokenRows(there, responses.to(device), torch.tensor(lengths, device=device))


def _distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The length of the difference of all gradients, relative to theirs."""
    assert found.keys() == expected.keys()
    error = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    return math.sqrt(error / sum(float(gradient.square().sum()) for gradient in expected.values()))


def check_attention(folder: Path, device: str, devices: int, *, share: bool, **scores: Any) -> Found:
    """Packed attention of three rows in bf16, and its gradients, against float64 on the CPU of the same numbers.

    The rows have 700, 130 and 400 tokens; with `share` the last two have a common prefix of 100, computed once.
    """
    rows, fresh = [np.arange(700), np.arange(700, 830), np.arange(830, 1230)], [700, 130, 400]
    if share:
        rows[2], fresh[2] = np.concatenate([rows[1][:100], np.arange(830, 1130)]), 300
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, heads, sum(fresh), 64, generator=generator).bfloat16() for heads in (8, 2, 2, 8)]
    if scores.pop("sinks", False):
        scores["s_aux"] = torch.randn(8, generator=generator).bfloat16()

    def computed(on: str, dtype: torch.dtype) -> list[Tensor]:
        *states, weights = (each.to(on, dtype).requires_grad_() for each in inputs)
        more = {name: each.to(on, dtype).requires_grad_() for name, each in scores.items() if isinstance(each, Tensor)}
        starts = torch.tensor([0, *fresh]).cumsum(0).to(on, torch.int32)
        prefixes = to_device(Prefixes.of(rows), torch.device(on)) if share else None
        line = {"cu_seq_lens_q": starts, "max_length_q": max(fresh), "prefixes": prefixes}
        found, _ = packed_attention(torch.nn.Identity(), *states, None, **line, **scores | more)
        gradients = torch.autograd.grad((found * weights.transpose(1, 2)).sum(), [*states, *more.values()])
        return [each.detach().double().cpu() for each in (found, *gradients)]

    names = ("output", "query", "key", "value", "sinks")
    pairs = zip(names, computed(device, torch.bfloat16), computed("cpu", torch.float64), strict=False)
    values = {f"error_of_{name}": float((found - expected).norm() / expected.norm()) for name, found, expected in pairs}
    return {"values": values, "limits": dict.fromkeys(values, ATTENTION_LIMIT)}


def check_engine(
    folder: Path,
    device: str,
    devices: int,
    *,
    engine: str,
    precision: str = "fp32",
    family: str = "qwen2",
    runner: Any = None,
) -> Found:
    """Syncs of changing weights, with sleep between: the logprobs of what is generated, against float32 on the CPU."""
    from transformers import AutoModelForCausalLM

    path = small_model(folder) if family == "qwen2" else small_family(folder, family)
    on = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    dtype = DTYPES[precision]
    built: RolloutEngine = TransformersEngine()
    if engine == "vllm":
        built = VLLMEngine(kv_cache_gib=0.25, gpu_memory_utilization=0.3, max_model_len=256, model_runner=runner)
    free = _free(device)
    built.setup(str(path), RankInfo(dtype, on))
    taken = free - _free(device)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = [list(range(40 + number, 48 + 5 * number)) for number in range(8)]
    values: dict[str, float] = {}
    gaps, stale, freed = [], [], []
    for version in range(SYNCS):
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        _perturb(model, version, dtype)
        report = built.update_weights(_buckets(model, on), version)
        completions = built.generate(prompts, list(range(8)), Sampling(32), version)
        rows = [(prompt, each.token_ids, each.logprobs) for prompt, each in zip(prompts, completions, strict=True)]
        gaps.append(_gap(model, rows))
        after = model.state_dict()
        model.load_state_dict(before)
        stale.append(_gap(model, rows))
        model.load_state_dict(after)
        values[f"verified_tensors_{version}"] = report.tensors
        free = _free(device)
        built.sleep()
        freed.append(_free(device) - free)
        built.wake_up()
    built.close()
    values |= {"logprob_gap": max(gaps), "gap_to_stale_weights": min(stale)}
    limits = {"logprob_gap": min(LOGPROB_LIMIT[precision], min(stale) / 4)}  # a sync that did nothing would show
    if device == "cuda" and engine == "vllm":  # the others keep their memory
        values |= {"gib_taken": taken / 2**30, "share_kept_asleep": 1 - min(freed) / taken}
        limits["share_kept_asleep"] = 0.5
    return {"values": values, "limits": limits}


def _free(device: str) -> int:
    """Bytes of the GPU that nobody has; 0 on the CPU."""
    return int(torch.cuda.mem_get_info()[0]) if device == "cuda" else 0


def _perturb(model: Any, seed: int, dtype: torch.dtype) -> None:
    """Change every weight, to values that the engine's dtype has."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter.to(dtype))


def _buckets(model: Any, device: torch.device) -> Iterator[list[tuple[str, Tensor]]]:
    for name, parameter in model.named_parameters():
        yield [(name, parameter.detach().to(device, copy=True))]


@torch.no_grad()
def _gap(model: Any, rows: list[tuple[list[int], tuple[int, ...], tuple[float, ...]]]) -> float:
    """The mean difference between an engine's logprobs and the model's, over all tokens."""
    differences = []
    for prompt, tokens, logprobs in rows:
        ids = torch.tensor([[*prompt, *tokens]])
        scores = torch.log_softmax(model(input_ids=ids).logits[0, len(prompt) - 1 : -1], -1)
        scored = scores.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        differences.append((scored - torch.tensor(logprobs)).abs())
    return float(torch.cat(differences).mean())
