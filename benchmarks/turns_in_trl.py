"""Conversations with a slow tool: rlflow's, by each engine, compared with those of TRL's `GRPOTrainer`.

    python -m benchmarks.turns_in_trl

The same model in all ways, a Qwen2 of four layers of width 256 that was taught to call the tool in every turn, and
Qwen2.5's chat template, whose calls TRL can read. A conversation has five turns and four calls; delays of the tool are
log-normal, drawn from the row and the turn. Seconds are those of the node that converses (rlflow) and of `_generate`
(TRL), training not counted, each way in a process of one thread. TRL samples by transformers' `generate`, since its
vLLM does not run on a CPU, and calls plain functions one after another; rlflow's environments have a worker each.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.simulated_delays import DelayedTool
from rlflow.models.tiny import TURN_END, write_tiny_model

CONTEXT, TURNS, TOKENS, GROUP = 2048, 5, 80, 2
CALL: dict[str, Any] = {"name": "look", "arguments": {}}
LONGEST = 1000  # tokens of a conversation after its prompt
LEARNING_RATE = 1e-9  # so that a step leaves the model as it is


def main() -> None:
    """Teach the model, time every way, and print a line for each and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.01, 0.1], help="medians, seconds")
    parser.add_argument("--rounds", type=int, default=3, help="that count, after one that does not")
    parser.add_argument("--steps", type=int, default=120, help="of teaching")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--one", nargs=3, metavar=("WAY", "MEDIAN", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        way, median_s, folder = given.one
        found = WAYS[way](Path(folder), float(median_s), given.conversations, given.rounds)
        Path(folder, "found.json").write_text(json.dumps(found))
        return
    table = []
    with tempfile.TemporaryDirectory() as folder:
        taught(Path(folder) / "model", given.steps)
        for median_s in given.delays:
            for way in given.ways:
                size = [f"--conversations={given.conversations}", f"--rounds={given.rounds}"]
                command = [sys.executable, "-m", "benchmarks.turns_in_trl", *size, "--one", way, str(median_s), folder]
                one_thread = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
                subprocess.run(command, env=os.environ | one_thread, stdout=subprocess.DEVNULL, check=True)
                found = json.loads(Path(folder, "found.json").read_text())
                rate = given.conversations / statistics.median(found["seconds"])
                table.append({"way": way, "median_s": median_s, **found, "conversations_per_s": round(rate, 3)})
                print(json.dumps(table[-1]), flush=True)
    print(json.dumps({"benchmark": "turns_in_trl", "conversations": given.conversations, "table": table}))


def rows(conversations: int, median_s: float) -> list[dict[str, Any]]:
    """Rows of the dataset: each is asked `GROUP` times."""
    return [
        {"prompt": [{"role": "user", "content": f"{place:04}" * 20}], "place": place, "median_s": median_s}
        for place in range(conversations // GROUP)
    ]


def taught(folder: Path, steps: int) -> None:
    """Write a model that calls the tool in every turn, whatever it has read."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import get_json_schema
    from trl.chat_template_utils import qwen2_5_chat_template

    write_tiny_model(folder, hidden_size=256, intermediate_size=768, layers=4, max_position=CONTEXT)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template, tokenizer.eos_token = qwen2_5_chat_template, TURN_END
    tokenizer.save_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    look = get_json_schema(DelayedTool().look)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    for step in range(steps):
        messages = [*rows(GROUP * (step + 1), 0.0)[-1]["prompt"]]
        for turn in range(TURNS):
            messages.append(
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
            )
            messages.append({"role": "tool", "name": "look", "content": f"{turn + 1:04}" * 3})
        text = tokenizer.apply_chat_template(messages, tools=[look], tokenize=False)
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        labels = torch.full_like(ids, -100)
        begins = tokenizer("<|im_start|>assistant\n")["input_ids"]
        for at in range(ids.shape[1] - len(begins)):
            if ids[0, at : at + len(begins)].tolist() == begins:
                start = at + len(begins)
                end = start + ids[0, start:].tolist().index(tokenizer.eos_token_id) + 1
                labels[0, start:end] = ids[0, start:end]
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    print(f"taught: loss {loss.item():.2g}", flush=True)
    model.save_pretrained(folder)


def in_rlflow(engine: str, lockstep: bool = False) -> Callable[[Path, float, int, int], dict[str, Any]]:
    """GRPO whose engine is one of the two."""

    def run(folder: Path, median_s: float, conversations: int, rounds: int) -> dict[str, Any]:
        import rlflow
        from benchmarks.small_run import OddCharacters
        from rlflow.algorithms import GRPO
        from rlflow.data import JSONL
        from rlflow.loggers.jsonl import read_metrics
        from rlflow.rollout import TransformersEngine, VLLMEngine
        from rlflow.strategies import SingleProcess

        of_rows = rows(conversations, median_s)
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_rows))
        module = GRPO(
            rlflow.CausalLM(str(folder / "model"), optimizer=rlflow.Optimizer(lr=LEARNING_RATE)),
            OddCharacters(),
            group_size=GROUP,
            max_response_length=LONGEST,
            environment=rlflow.Environment(
                "benchmarks.simulated_delays.DelayedTool",
                max_turns=TURNS,
                max_turn_length=TOKENS,
                timeout_s=300.0,
                workers=conversations,
                lockstep=lockstep,
            ),
        )
        data = rlflow.PromptData(
            JSONL(str(folder / "rows.jsonl")),
            prompts_per_step=len(of_rows),
            prompt="prompt",
            chat_template=True,
            max_prompt_length=CONTEXT - LONGEST,
        )
        with tempfile.TemporaryDirectory() as run_dir:
            trainer = rlflow.Trainer(
                f"{run_dir}/run",
                max_steps=1 + rounds,
                accelerator="cpu",
                strategy=SingleProcess(),
                rollout=VLLMEngine(kv_cache_gib=1.0, max_num_seqs=conversations)
                if engine == "vllm"
                else TransformersEngine(conversations),
            )
            trainer.fit(module, data)
            lines = read_metrics(Path(run_dir, "run"))[1:]
        return {
            "seconds": [round(line["time/rollout"], 3) for line in lines],
            "tokens": lines[-1]["rollout/tokens"],
            "calls": lines[-1]["rollout/tool_calls"],
        }

    return run


def in_trl(folder: Path, median_s: float, conversations: int, rounds: int) -> dict[str, Any]:
    """TRL's trainer, whose rollout is timed."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    seconds: list[float] = []

    class Timed(GRPOTrainer):
        def _generate(self, *arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return super()._generate(*arguments)
            finally:
                seconds.append(time.perf_counter() - begin)

    trainer = Timed(
        model=str(folder / "model"),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(folder / "run"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            per_device_train_batch_size=conversations,
            num_generations=GROUP,
            max_completion_length=LONGEST,
            max_tool_calling_iterations=TURNS - 1,
            temperature=1.0,
            learning_rate=LEARNING_RATE,
            max_steps=1 + rounds,
            shuffle_dataset=False,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows(conversations, median_s)),
        environment_factory=DelayedTool,
    )
    trainer.train()
    logged: Mapping[str, float] = trainer.state.log_history[rounds]
    return {
        "seconds": [round(each, 3) for each in seconds[1:]],
        "calls": logged["tools/call_frequency"],
    }


WAYS = {
    "rlflow, vLLM": in_rlflow("vllm"),
    "rlflow, transformers": in_rlflow("transformers"),
    "rlflow, transformers in lockstep": in_rlflow("transformers", lockstep=True),
    "TRL": in_trl,
}

if __name__ == "__main__":
    main()
