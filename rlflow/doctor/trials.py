"""The trials of `rlflow doctor`: real runs in child processes, with ranks that meet, steps, and weight syncs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from rlflow.doctor.checks import VLLM, Finding, ProcessResult, gpus, installed, run_process

AT_ONCE = 2
PROMPTS = ("1+1=", "1+2=", "2+2=", "3+2=")
MEET = timedelta(seconds=30)  # that two ranks may take to meet
STEPS = 2  # the second generates with the weights that the first trained and the sync brought


def trials(gpu: bool, folder: Path, seconds: float) -> Iterator[Finding]:
    """Try what this machine can do, two trials at a time: collectives of two ranks, then small GRPO runs.

    Args:
        gpu: Whether runs use its GPUs; NCCL is tried with 2 or more.
        folder: Folder in which each trial makes a new one for its files.
        seconds: Limit of each trial's time.
    """
    ranks = min(2, gpus(folder).output.count("\nGPU ")) if gpu else 2
    backends = ["gloo", "nccl"] if gpu and ranks == 2 else ["gloo"]
    divided, called = ("deepspeed", "DeepSpeed ZeRO-2") if installed("deepspeed") is not None else ("fsdp", "FSDP")
    runs: list[tuple[str, int, str, Any]] = [
        ("transformers engine, one process", 1, "single", "transformers"),
        (f"transformers engine, {called} on {ranks} ranks", ranks, divided, "transformers"),
    ]
    if any(installed(name) for name in VLLM):
        settings = {"gpu_memory_utilization": 0.3} if gpu else {"kv_cache_gib": 0.25}
        engine = {"class_path": "vllm", "init_args": settings | {"max_num_seqs": 16}}
        runs.append(("vLLM engine, one process", 1, "single", engine))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = [pool.submit(_meet, backend, folder, seconds) for backend in backends]
        found += [pool.submit(_train, gpu, *run, folder, seconds) for run in runs]
        for finding in found:
            yield finding.result()


def _meet(backend: str, folder: Path, seconds: float) -> Finding:
    what = f"two ranks meet and send by {backend}"
    here = folder / backend
    here.mkdir(parents=True)
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(lambda rank: _rank(backend, rank, here, seconds), range(2)))
    failed = next((each for each in ranks if each.code != 0), None)
    if failed is None:
        return Finding(f"{what}, {max(each.seconds for each in ranks):.1f} s")
    fix = "look at GLOO_SOCKET_IFNAME and the firewall" if backend == "gloo" else "run again with NCCL_DEBUG=INFO"
    return Finding(f"{what}: {failed.why}", "broken", fix)


def _rank(backend: str, rank: int, folder: Path, seconds: float) -> ProcessResult:
    arguments = ["-m", "rlflow.doctor.trials", backend, str(rank), str(folder / "store")]
    return run_process(folder / f"rank{rank}", arguments, seconds)


def _train(gpu: bool, name: str, ranks: int, strategy: str, engine: Any, folder: Path, seconds: float) -> Finding:
    what = f"steps and syncs: {name}"
    here = folder / name.replace(" ", "-").replace(",", "")
    here.mkdir(parents=True)
    (here / "rows.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    (here / "config.yaml").write_text(json.dumps(_config(gpu, ranks, strategy, engine)))
    ran = run_process(here, ["-m", "rlflow.cli", "fit", "--config", "config.yaml"], seconds, {"OMP_NUM_THREADS": "1"})
    fix = f"the run's own errors: rlflow doctor --keep FOLDER, then {here.name}/run/logs in it"
    if ran.code != 0:
        return Finding(f"{what}: {ran.why}", "broken", fix)
    last = json.loads((here / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    norm, synced, gap = (last.get(key) for key in ("actor/grad_norm", "sync/verified_tensors", "sync/logprob_gap"))
    if last["step"] != STEPS or not norm or not math.isfinite(norm) or not synced or gap is None:
        return Finding(
            f"{what}: gradient {norm}, {synced} tensors synced, log-probabilities apart {gap}", "broken", fix
        )
    return Finding(f"{what}: {synced:.0f} tensors, log-probabilities {gap:.0e} apart, {ran.seconds:.1f} s")


def _config(gpu: bool, ranks: int, strategy: str, engine: Any) -> dict[str, Any]:
    """The config of a run so small that it takes seconds."""
    return {
        "module": {
            "class_path": "GRPO",
            "init_args": {
                "actor": {"model": "tiny", "optimizer": {"lr": 1e-3}},
                "group_size": 4,
                "max_response_length": 8,
                "reward": "rlflow.doctor.trials.share_of_digits",
            },
        },
        "data": {"train": "rows.jsonl", "prompts_per_step": len(PROMPTS)},
        "trainer": {
            "run_dir": "run",
            "max_steps": STEPS,
            "devices": ranks,
            "accelerator": "cuda" if gpu else "cpu",
        },
        "strategy": strategy,
        "rollout": engine,
    }


def share_of_digits(response: str) -> float:
    """The share of digits among a response's characters, 0 to 1: a reward in which random responses differ."""
    return sum(each.isdigit() for each in response) / max(1, len(response))


def main(backend: str, rank: int, store: Path) -> None:
    """Run one of two ranks, which meet by the file `store`: gather a tensor from both; exit with 1 if it is wrong."""
    import torch
    import torch.distributed as dist

    from rlflow.databuffer.transport import Transport

    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2, timeout=MEET)
    mine = torch.full((3,), float(rank + 1), device=device)
    found = [each.tolist() for each in Transport(device, MEET).all_gather(mine, (0, 1))]
    dist.destroy_process_group()
    if found != [[1.0] * 3, [2.0] * 3]:
        sys.exit(f"rank {rank} received {found} from both ranks")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
