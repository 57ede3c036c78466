"""Distance of the engine's logprobs from the trainer's, by precision; from the root of the repository:

    python benchmarks/precision.py transformers
    python benchmarks/precision.py vllm

A Qwen2 model of 5 million random weights, whose logits spread as a trained one's, generates 8 responses of 256 tokens;
the trainer's packed forward scores them with equal weights. Nothing is random but the model and the sampling's seeds.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlflow.models.causal_lm import CausalLM
from rlflow.models.handle import ForwardPlan
from rlflow.rollout import Completion, RankInfo, RolloutEngine, Sampling, TransformersEngine, VLLMEngine
from rlflow.values.batch import Batch
from rlflow.values.ragged import Ragged

VOCABULARY, WIDTH, LAYERS = 4096, 256, 3
PROMPTS, PROMPT, RESPONSE = 8, 32, 256
SPREAD = 4.0  # standard deviation of the logits; a trained model's is of that size
PRECISIONS = {
    "float32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "bf16, head in float32": (torch.bfloat16, True),
    "float16": (torch.float16, False),
    "float16, head in float32": (torch.float16, True),
}


def main(engine_name: str) -> None:
    """Print a row of the table for each precision."""
    prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(1)).tolist()
    print("| precision | mean | 99.9 % | largest | tokens off by more than 0.01 |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(Path(scratch))
        for name, (dtype, wide) in PRECISIONS.items():
            gaps = gap(engine_name, folder, prompts, dtype, wide)
            far, high = float((gaps > 0.01).double().mean()), float(gaps.quantile(0.999))
            print(f"| {name} | {gaps.mean():.1e} | {high:.1e} | {gaps.max():.1e} | {far:.1%} |", flush=True)


def write_model(folder: Path) -> Path:
    """Write a small model in Hugging Face form."""
    torch.manual_seed(0)
    size = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, **size, **heads, tie_word_embeddings=False))
    with torch.no_grad():
        model.lm_head.weight.normal_(std=SPREAD / WIDTH**0.5)  # what it reads has squares of 1 on average
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def gap(engine_name: str, folder: Path, prompts: list[list[int]], dtype: torch.dtype, wide: bool) -> Tensor:
    """The gap of every token."""
    cpu, engine = torch.device("cpu"), engine_of(engine_name)
    handle = CausalLM(str(folder), trainable=False)
    model = handle.load(folder, dtype, cpu)
    if wide:
        model.use_float32_head()
        engine.use_float32_head()
    handle.attach(model, ForwardPlan())
    engine.setup(str(folder), RankInfo(dtype, cpu))
    engine.update_weights([[(weight.name, weight.parameter)] for weight in model.weights()], 0)
    completions = engine.generate(prompts, list(range(PROMPTS)), Sampling(RESPONSE), 0)
    engine.close()
    rows = rows_of(prompts, completions)
    theirs = torch.tensor([completion.logprobs for completion in completions])
    return (handle.logprobs(rows) - theirs).abs().flatten()


def engine_of(name: str) -> RolloutEngine:
    """`transformers` or `vllm`."""
    return VLLMEngine(kv_cache_gib=0.25) if name == "vllm" else TransformersEngine()


def rows_of(prompts: list[list[int]], completions: list[Completion]) -> Batch:
    """The rows as the trainer scores them."""
    responses = torch.tensor([completion.token_ids for completion in completions])
    lengths = torch.full((PROMPTS,), RESPONSE)
    return Batch(Ragged.from_lists(prompts), responses, torch.ones_like(responses).bool(), lengths, [{}] * PROMPTS)


if __name__ == "__main__":
    main(sys.argv[1])
