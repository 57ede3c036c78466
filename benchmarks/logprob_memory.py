"""Peak memory and time of logprobs and their backward: in chunks, and with all logits held at once.

    python benchmarks/logprob_memory.py [--tokens 8192] [--vocabulary 151936] [--hidden 896] [--device cpu]

Each way runs in a process of its own, on the same random float32 hidden states and weight. Memory is what the pass and
its gradients add to the inputs: of the process on the CPU, of torch's allocator on CUDA. In full, 8,192 tokens take
about 16 GiB. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from rlflow.models.logprobs import token_logprobs

GIB = 2**30


def in_chunks(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Logprobs in chunks, as rlflow computes them, with the entropy that it computes too."""
    return token_logprobs(hidden, weight, targets)[0]


def in_full(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Logprobs by their formula, by autograd."""
    return (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"chunked": in_chunks, "full": in_full}


def measure(way: str, tokens: int, vocabulary: int, width: int, device: str) -> dict[str, float]:
    """Seconds, added peak memory, and two figures by which the results of both ways are compared."""
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, width, device=device, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, width, device=device, generator=generator).div_(width**0.5).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device, generator=generator)
    before = peak_bytes(device)
    start = time.perf_counter()
    logprobs = WAYS[way](hidden, weight, targets)
    logprobs.sum().backward()
    added = peak_bytes(device) - before
    assert weight.grad is not None
    return {
        "seconds": time.perf_counter() - start,
        "added_gib": added / GIB,
        "logprob_mean": float(logprobs.detach().mean()),
        "weight_gradient_norm": float(weight.grad.norm()),
    }


def peak_bytes(device: str) -> int:
    """Most memory held so far."""
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Run each way in its own process and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--way", choices=list(WAYS), help="measure one way in this process")
    given = parser.parse_args()
    if given.way is not None:
        print(json.dumps(measure(given.way, given.tokens, given.vocabulary, given.hidden, given.device)))
        return
    found = {}
    for way in WAYS:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[way] = json.loads(answer.stdout.splitlines()[-1])
        print(f"{way}: {found[way]['added_gib']:.2f} GiB more at the peak, {found[way]['seconds']:.1f} s")
    summary = {"tokens": given.tokens, "vocabulary": given.vocabulary, "hidden": given.hidden, "device": given.device}
    memory_ratio = found["full"]["added_gib"] / found["chunked"]["added_gib"]
    print(json.dumps(summary | found | {"memory_ratio": memory_ratio}))


if __name__ == "__main__":
    main()
