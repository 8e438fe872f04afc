"""Trains a pretrained model with a teacher: `python -m research.teacher MODEL OUT`.

Two experiments on the task of `gac demo --real`, in runs of `gac train` that resume:

- opd: a copy of the model with noise in its weights learns sums from the model.
- sdft beside sft: the model learns order codes from demonstrations, as the context of a teacher or
  as targets, with the same data, steps and learning rate, and paired seeds.

Prints their tables, which research/teacher.md quotes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gac.config import load, save_text
from gac.demo.real import has_fast_bfloat16
from gac.demo.real_task import codes, row, sums
from gac.evaluation.table import markdown_table
from gac.train_config import TrainConfig
from gac.training.trainer import train

NOISE = 0.06  # of the student's weights, relative to the standard deviation of each matrix
STEPS, SEEDS = 8, 3
LENGTH = 12  # tokens
ROWS = 8  # prompts, with one rollout each, or demonstrations per step
PROMPTS, HELD_OUT = 300, 48
ENDS = 3  # steps at the start and the end over which the divergence is averaged
STUDENT_T = {2: 4.303}  # 97.5% quantile by degrees of freedom


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    """Write rows as JSON lines; returns the path."""
    save_text(path, "".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def take(questions: Iterator[dict[str, str]], count: int) -> list[dict[str, Any]]:
    """Rows of the next questions, each with its answer as the demonstration."""
    rows = [row(next(questions)) for _ in range(count)]
    return [{**fields, "solution": fields["answer"]} for fields in rows]


def write_task(folder: Path) -> dict[str, str]:
    """Write training and held-out rows of both kinds; returns their paths by name."""
    rng = random.Random(0)
    paths = {}
    for name, questions in (("sums", sums(rng)), ("codes", codes(rng))):
        for part, count in (("train", PROMPTS), ("held_out", HELD_OUT)):
            key = f"{name}_{part}"
            paths[key] = write_rows(folder / f"{key}.jsonl", take(questions, count))
    return paths


def write_student(model: str, folder: Path) -> str:
    """Write a copy of the model with normal noise in every matrix; returns its folder."""
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        student = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        with torch.no_grad():
            for p in student.model.layers.parameters():
                if p.dim() == 2:
                    p.add_(torch.randn_like(p) * p.std() * NOISE)
        AutoTokenizer.from_pretrained(model).save_pretrained(folder)
        student.save_pretrained(folder)
    return str(folder)


def config(out: Path, model: str, prompts: str, held_out: dict[str, str], **keys: Any) -> Any:
    """A run, with an evaluation on each held-out file before and after."""
    first, *others = held_out
    length = {"max_completion_length": LENGTH}
    tasks = {name: {"data": {"prompts": held_out[name]}, **length} for name in others}
    settings: dict[str, Any] = {
        "out": str(out),
        "model": {"path": model, "dtype": "bfloat16" if has_fast_bfloat16() else "float32"},
        "data": {"prompts": prompts},
        "reward": "gac.demo.real_task:reward",
        "rollouts": {"num_prompts": ROWS, "num_generations": 1, **length},
        "demo_batch_size": ROWS,
        "steps": STEPS,
        "optim": {"lr": 2e-5, "warmup_steps": 2},
        "max_tokens_per_micro_batch": 2048,
        "eval": {"data": {"prompts": held_out[first]}, "every": STEPS, "tasks": tasks, **length},
        "checkpoint_every": STEPS // 2,
        "keep_checkpoints": 1,
        "export": False,
        **keys,
    }
    return load(TrainConfig, settings)


def rows_of(out: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a log of the run in `out`."""
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def interval(values: Sequence[float]) -> str:
    """Mean and 95% interval by Student's t."""
    mean = statistics.mean(values)
    half = STUDENT_T[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.3f} [{mean - half:.3f}, {mean + half:.3f}]"


def distill(model: str, out: Path, task: dict[str, str]) -> list[tuple[str, ...]]:
    """Experiment opd: rows of (model, accuracy on held-out sums, divergence from the teacher)."""
    student, held_out = write_student(model, out / "student"), {"sums": task["sums_held_out"]}
    keys = {"teacher": {"path": model}, "method": "opd", "optim": {"lr": 1e-4, "warmup_steps": 2}}
    run = train(config(out / "opd", student, task["sums_train"], held_out, **keys))
    first, last = rows_of(run, "eval")[:: len(rows_of(run, "eval")) - 1]
    losses = [row["teacher_loss"] for row in rows_of(run, "metrics")]
    return [
        ("student", share(first, ""), interval(losses[:ENDS])),
        ("after opd", share(last, ""), interval(losses[-ENDS:])),
    ]


def share(row: dict[str, Any], task: str) -> str:
    """Accuracy of a row of eval.jsonl on a task with its 95% interval; "": the first task."""
    suffix = f"/{task}" if task else ""
    low, high = row[f"ci95{suffix}"]
    return f"{row[f'accuracy{suffix}']:.1%} [{low:.1%}, {high:.1%}]"


def compare(model: str, out: Path, task: dict[str, str]) -> list[tuple[str, ...]]:
    """Experiment sdft beside sft: rows of (method, accuracy on codes, accuracy on sums)."""
    held_out = {"codes": task["codes_held_out"], "sums": task["sums_held_out"]}
    ends: dict[str, list[dict[str, Any]]] = {"sft": [], "sdft": []}
    start: dict[str, Any] = {}
    for seed in range(SEEDS):
        for method, rows in ends.items():
            run = config(
                out / f"{method}-{seed}",
                model,
                task["codes_train"],
                held_out,
                method=method,
                seed=seed,
            )
            start, *_, last = rows_of(train(run), "eval")
            rows.append(last)
    table: list[tuple[str, ...]] = [("before", share(start, ""), share(start, "sums"))]
    for method, rows in ends.items():
        columns = [[r[key] for r in rows] for key in ("accuracy", "accuracy/sums")]
        table.append((method, *map(interval, columns)))
    pairs = list(zip(ends["sdft"], ends["sft"], strict=True))
    gaps = [[a[key] - b[key] for a, b in pairs] for key in ("accuracy", "accuracy/sums")]
    table.append(("sdft - sft, paired", *map(interval, gaps)))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiments and print their tables."""
    parser = argparse.ArgumentParser(prog="python -m research.teacher", description=__doc__)
    parser.add_argument("model", help="folder of SmolLM2-135M-Instruct: python -m tools.real_model")
    parser.add_argument("out", type=Path, help="folder of the runs")
    parser.add_argument("--only", choices=("opd", "sdft"), help="one of the two experiments")
    given = parser.parse_args(argv)
    task = write_task(given.out)
    if given.only != "sdft":
        head = ("model", "accuracy on sums", "KL(model || teacher), nats per token")
        print(markdown_table(head, distill(given.model, given.out, task)), flush=True)
    if given.only != "opd":
        head = ("method", "accuracy on codes", "accuracy on sums")
        print(markdown_table(head, compare(given.model, given.out, task)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
