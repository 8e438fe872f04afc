"""The paper's table 14: step time, overhead and peak memory of `gac` under FSDP2.

Usage: `torchrun --nproc-per-node 8 -m bench.overhead_fsdp [--lengths 2048 4096 8192]`; on one GPU,
`python -m bench.overhead_fsdp`. The model has the shape of Qwen2.5-7B and random weights, or is the
folder given with `--model`, with its weights. Micro-batches have one row of L tokens. "Overhead" is
relative to the same step with phi and a constant mu, without statistics, KL and controller
(Token-phi in the paper); the two alternate on the same rows. Rollouts are random tokens, because
the paper's step has no generation. A refresh of the signals and the KL is measured as often as a
step without one, and counts for one step in `update_every`.

`--train full` keeps weights, gradients and AdamW's moments in bfloat16 (8 bytes per weight, and 2
for the reference): 76 GB for 7B on one GPU, which fits an H200. `--train lora` trains adapters of
rank 16 on frozen weights, which are also the reference: 15 GB, which fits an H100. Both use
gradient checkpointing. `--tiny` runs everything with a tiny model on CPU processes, and saves
nothing: CPU times and memory say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen2Config

from gac import collectives
from gac.config import load
from gac.demo.task import make_tokenizer, write_rows
from gac.evaluation.table import markdown_table
from gac.parallel.config import ParallelConfig
from gac.parallel.process_group import leave, make_accelerator
from gac.rollouts import Rollout
from gac.study.results import interval
from gac.train_config import TrainConfig, kl_rollouts
from gac.training.trainer import Trainer
from tools.origin import origin
from tools.pages import BENCHMARKS, fill

from .overhead import bare, with_method
from .record import RESULTS, copy_out, device_name, environment

QWEN = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
LENGTHS, TINY_LENGTHS = (2048, 4096, 8192), (32, 64)
ROLLOUTS, DEMOS = 8, 4  # rows per rank and step
EVERY = 10  # update_every of `gac`
PAPER = {
    2048: ("1.00", "+0.6%", "22.4"),
    4096: ("1.73", "+0.7%", "31.8"),
    8192: ("3.38", "+0.8%", "42.6"),
}
FILE = "overhead_fsdp.json"
SHAPE = "Qwen2.5-7B shape"


def play(prompts: Sequence[Any], engine: Any) -> list[Rollout]:
    """Rollouts that fill the row with random tokens, and have a random reward."""
    length = engine.params.max_completion_length
    rollouts = []
    for example in prompts:
        ids = tuple(random.randrange(3, 20) for _ in range(length))
        reward = float(random.random() < 0.5)
        rollouts.append(Rollout(example.prompt, ids, [1] * length, reward=reward))
    return rollouts


def write(folder: Path, sizes: Mapping[str, Any] | None, length: int) -> None:
    """Rows of `length` tokens; with `sizes`, also a Qwen2 model without weights, and a tokenizer.

    The trainer draws the weights. A demonstration is one token per character, or more.
    """
    rows = [{"prompt": "1+1=", "answer": "2", "solution": "7" * (length - 5)}] * 64
    write_rows(folder / "rows.jsonl", rows)
    if sizes is None:
        return
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    Qwen2Config(**sizes, **special, dtype="bfloat16").save_pretrained(folder / "model")


def configuration(
    folder: Path, model: Mapping[str, Any], length: int, ranks: int, train: str
) -> TrainConfig:
    """A run whose rows all have `length` tokens; folder: one that all ranks share."""
    lora = {"lora": {"rank": 16}} if train == "lora" else {"master_weights": False}
    checkpointing = {"gradient_checkpointing": True, "dtype": "bfloat16"}
    return load(
        TrainConfig,
        {
            "out": str(folder / f"run-{length}"),
            "model": {**model, **checkpointing, **lora},
            "method": {"name": "gac", "update_every": EVERY},
            "data": {
                "prompts": str(folder / "rows.jsonl"),
                "demo_field": "solution",
                "chat": False,
                "max_prompt_tokens": length,
                "max_demo_tokens": length,
            },
            "reward": "bench.overhead:random_reward",
            "rollouts": {
                "function": "bench.overhead_fsdp:play",
                "num_prompts": ranks,
                "num_generations": ROLLOUTS,
                "max_completion_length": length - 4,
                "correction": "none",
            },
            "demo_batch_size": DEMOS * ranks,
            "micro_batch_size": 1,
            "parallel": {"mode": "fsdp"},
            "optim": {"lr": 1e-6, "warmup_steps": 1},
            "steps": 100 * EVERY,
            "export": False,
        },
    )


def now() -> float:
    """Wall-clock seconds, once the work of all ranks is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter()


def peak_gib(reset: bool = False) -> float:
    """Peak memory of this rank since the last reset: the GPU's, or on a CPU the process's."""
    if not torch.cuda.is_available():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    peak = torch.cuda.max_memory_allocated() / 2**30
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return peak


def measure(trainer: Trainer, rounds: int) -> dict[str, Any]:
    """Step time, overhead and peak memory; the first round is a warm-up."""
    seconds: dict[tuple[str, bool], list[float]] = {}
    peaks = {"gac": 0.0, "bare": 0.0}
    for number in range(rounds + 1):
        for refresh in (True, False):
            # step t measures for update t + 1
            trainer.step = EVERY * (number + 1) - 1 if refresh else EVERY * number + 1
            rows, mu = trainer._sample(), trainer.mix.mu
            for arm in ("gac", "bare") if number % 2 else ("bare", "gac"):
                peak_gib(reset=True)
                began = now()
                with_method(trainer, rows) if arm == "gac" else bare(trainer, rows, mu)
                if number:
                    seconds.setdefault((arm, refresh), []).append(now() - began)
                    peaks[arm] = max(peaks[arm], peak_gib())
    return summary(seconds, {arm: collectives.largest([peak])[0] for arm, peak in peaks.items()})


def summary(
    seconds: Mapping[tuple[str, bool], Sequence[float]], peaks: Mapping[str, float]
) -> dict[str, Any]:
    """Time per step of each arm, a refresh counting for one step in `EVERY`; the overhead in %."""

    def per_step(arm: str) -> list[float]:
        pairs = zip(seconds[arm, True], seconds[arm, False], strict=True)
        return [(on + (EVERY - 1) * off) / EVERY for on, off in pairs]

    gac, plain = per_step("gac"), per_step("bare")
    overheads = [100 * (a / b - 1) for a, b in zip(gac, plain, strict=True)]
    return {
        "rounds": len(gac),
        "step_seconds": sum(gac) / len(gac),
        "token_phi_seconds": sum(plain) / len(plain),
        "overhead_percent": sum(overheads) / len(overheads),
        "ci95": interval(overheads),
        "peak_gib": peaks["gac"],
        "token_phi_peak_gib": peaks["bare"],
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per model and length; lengths of the 7B shape that were not run say so."""
    lines = []
    for row in rows:
        low, high = row["ci95"]
        lines.append(
            [
                f"{row['model']}, {row['train']}",
                f"{row['ranks']} x {row['device']}",
                str(row["length"]),
                f"{row['step_seconds']:.2f}",
                f"{row['overhead_percent']:+.2f} [{low:+.2f}, {high:+.2f}]",
                f"{row['peak_gib']:.1f}",
                f"{row['date']}, {row['commit']}",
            ]
        )
    known = {row["length"] for row in rows if row["model"] == SHAPE}
    missing = "not measured"
    lines += [[SHAPE, "", str(n), missing, missing, missing, ""] for n in LENGTHS if n not in known]
    lines += [
        ["the paper, Qwen2.5-7B", "8 GPUs", str(n), *PAPER[n], "arXiv 2605.26184"] for n in LENGTHS
    ]
    head = ["model", "device", "L", "s per step", "overhead in %", "peak GiB per GPU", "measured"]
    return markdown_table(head, lines)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Parse the arguments and measure; rank 0 prints and saves the rows, and returns them."""
    parser = argparse.ArgumentParser(prog="python -m bench.overhead_fsdp", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens per row")
    parser.add_argument("--model", help="a folder with weights, such as SmolLM2-135M-Instruct")
    parser.add_argument("--train", choices=("full", "lora"), default="full")
    parser.add_argument("--rounds", type=int, default=4, help="measured rounds, at least 2")
    parser.add_argument("--tiny", action="store_true", help="a dry run with a tiny model")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 2:
        parser.error(f"--rounds {arguments.rounds}: an interval needs at least 2")
    lengths = arguments.lengths or (TINY_LENGTHS if arguments.tiny else LENGTHS)
    random.seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        rows = [run(Path(scratch), arguments, length) for length in lengths]
        now()  # rank 0 deletes its folder when all are done
    if collectives.rank() == 0 and not arguments.tiny:
        save(rows)
    return rows


def run(folder: Path, arguments: argparse.Namespace, length: int) -> dict[str, Any]:
    """Measure one length; every rank calls it."""
    ranks = make_accelerator(ParallelConfig(mode="fsdp"), (), ".").num_processes
    folder = Path(collectives.gather(str(folder))[0])  # that of rank 0
    model: dict[str, Any] = {"path": arguments.model}
    if arguments.model is None:
        model = {"path": str(folder / "model"), "random_init": True}
    if collectives.rank() == 0:
        write(folder, None if arguments.model else TINY if arguments.tiny else QWEN, length)
    now()  # the files are there
    config = configuration(folder, model, length, ranks, arguments.train)
    trainer = Trainer(config, resume=False)
    result = measure(trainer, arguments.rounds)
    trainer.heartbeat.stop()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    row = {
        "model": "tiny" if arguments.tiny else Path(arguments.model or SHAPE).name,
        "train": arguments.train,
        "length": length,
        "ranks": ranks,
        "kl_rollouts": kl_rollouts(config),
        "rollouts": config.rollouts.num_prompts * config.rollouts.num_generations,
        **origin(),
        "device": device_name(device),
        **environment(device),
        **result,
    }
    if collectives.rank() == 0:
        print(json.dumps({k: v for k, v in row.items() if k != "versions"}))
    return row


def save(rows: Sequence[dict[str, Any]]) -> None:
    """Add the rows to the results; one replaces a row of the same model, length and device."""
    path = RESULTS / FILE
    stored = json.loads(path.read_text())["cases"] if path.exists() else []
    names = ("model", "train", "length", "ranks", "device")
    new = {tuple(row[name] for name in names): row for row in [*stored, *rows]}
    path.write_text(json.dumps({"cases": list(new.values())}, indent=1) + "\n")
    copy_out(path)
    fill(BENCHMARKS, "table-14", table(list(new.values())))


if __name__ == "__main__":
    main()
    leave()
