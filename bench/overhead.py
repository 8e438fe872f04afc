"""Overhead of a method over the same mixed loss at a constant mu: `python -m bench.overhead`.

Measures the method that a run uses when none is named, with its shipped settings; `--method` and
`--set` select others. Every step trains on the same rollouts and demonstrations with the method,
and with the bare mixed loss at the same mu, without statistics, KL or controller: three times each,
in alternation, and the fastest counts. Nothing else differs; the overhead is their difference as a
fraction of a full step, including sampling, so it contains
every kernel, collective and host second of the method. The cost of the statistics is the
difference between the loss's forward pass with and without them, in alternation. Lengths and batch
sizes are those of examples/gsm8k.yaml divided by 16 and multiplied by --times; the head has the
same share of the model's weights as in a 1.5B model (15%). On a CPU, CPU time is measured. Writes
bench/results/overhead.json and the table of docs/benchmarks.md; the last line is
`overhead X.XX % [low, high]`, with a 95% interval. `--all` measures every case of that table.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import operator
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

import gac.models.head
from gac import collectives
from gac.config import load
from gac.demo.task import write_task
from gac.evaluation.table import markdown_table
from gac.methods import METHODS, Constant
from gac.rows import Row
from gac.step_end import end_step
from gac.train_config import TrainConfig, kl_rollouts
from gac.training import gradients
from gac.training.gradients import Forward, SampledKL
from gac.training.step import step_result, trainer_columns
from gac.training.trainer import Trainer
from gac.types import StepNeeds
from gac_kernels import TokenMoments
from tools.origin import origin
from tools.pages import BENCHMARKS, fill

from .record import RESULTS, copy_out, device_name, environment, slug

PARTS = ("statistics", "reference forward", "controller", "communication")
STEPS = 10  # steps per cycle; GAC refreshes its signals once per cycle
CASES: list[tuple[str, list[str]]] = [
    ("constant-alarm", []),
    ("guarded", []),
    ("gac", []),
    ("gac-paper", ["method.alpha_every=refresh"]),
    ("gac-paper", []),
    ("gac-paper", ["kl_sample_size=100000"]),
    ("gac-gated", ["method.gradient_parts=2"]),  # each part needs a prompt
    ("rewvar-ctrl", []),
    ("gradnorm-ctrl", []),
    ("kl-ctrl", ["kl_sample_size=2"]),
    ("kl-ctrl", []),
]
"""Method and keys of the cases in the table of docs/benchmarks.md."""
RESAMPLES = 2000
REPEATS = 3  # runs of each arm in a step; the fastest counts, because other work only slows down
TRIM = 0.2  # share of the cycles that is left out at each end: a busy machine has slow outliers
ROUNDS = 2  # forward passes of the loss with statistics, and as many without
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 560,
    "num_hidden_layers": 4,
    "vocab_size": 1400,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}


def clock() -> float:
    """CPU time in seconds or, on a GPU, wall-clock time after a synchronization."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def configuration(
    folder: Path, method: str | None, changes: Sequence[str], steps: int, times: int
) -> TrainConfig:
    """A scaled-down examples/gsm8k.yaml on an untrained model; changes: `key=value` overrides."""
    write_task(folder / "task", seed=0)
    start = folder / "task" / "init"
    model = AutoConfig.from_pretrained(start)
    model.update({**SIZES, "layer_types": None, "max_position_embeddings": 1024})
    model.save_pretrained(start)
    data = {
        "prompts": str(folder / "task" / "prompts.jsonl"),
        "demos": str(folder / "task" / "demos.jsonl"),
    }
    return load(
        TrainConfig,
        {
            "out": str(folder / "run"),
            "model": {"path": str(start), "random_init": True},
            **({} if method is None else {"method": method}),
            "data": data,
            "reward": "bench.overhead:random_reward",
            "steps": steps + 1,
            "rollouts": {
                "num_prompts": 2 * times,
                "num_generations": 8,
                "max_completion_length": 32 * times,
            },
            "demo_batch_size": 4 * times,
            "micro_batch_size": 8,
            "optim": {"lr": 1e-6, "warmup_steps": 1},
        },
        changes,
    )


def random_reward(completion: str, example: Any) -> float:
    """A random 0 or 1, so that groups have non-zero advantages."""
    return float(random.random() < 0.5)


@contextlib.contextmanager
def without_statistics() -> Iterator[None]:
    """Compute no statistics in the fused loss, and exchange none between ranks."""
    original, all_reduce = gac.models.head.fused_linear_gac_loss, TokenMoments.all_reduce

    def loss(hidden: Any, *batch: Any, **keywords: Any) -> Any:
        out = original(hidden, *batch, moments=False, **keywords)
        return out._replace(moments=TokenMoments.zeros(hidden.device))

    gac.models.head.fused_linear_gac_loss = loss
    token_weights, gradients.TOKEN_WEIGHTS = gradients.TOKEN_WEIGHTS, ()
    TokenMoments.all_reduce = lambda self, group=None: self  # type: ignore[method-assign] # no-op
    try:
        yield
    finally:
        gac.models.head.fused_linear_gac_loss = original
        gradients.TOKEN_WEIGHTS = token_weights
        TokenMoments.all_reduce = all_reduce  # type: ignore[method-assign] # restored


class Parts:
    """Measures the time of those parts of the method that are separate calls."""

    def __init__(self, trainer: Trainer) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.enabled = False
        self.losses: list[Callable[..., Any]] = []  # forward calls of the current step's losses
        for owner, names, part in (
            (Forward, ("reference_logprobs",), "reference forward"),
            (SampledKL, ("__init__",), "reference forward"),
            (type(trainer.method), ("mix", "report"), "controller"),
            (collectives, ("total",), "communication"),
            (TokenMoments, ("all_reduce",), "communication"),
            (TokenMoments, ("merged", "signals"), "statistics"),
        ):
            for name in names:
                self._watch(owner, name, part)
        self._record_losses()

    def _record_losses(self) -> None:
        inner = gac.models.head.fused_linear_gac_loss

        def record_loss(*args: Any, **keywords: Any) -> Any:
            if self.enabled:
                plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
                self.losses.append(functools.partial(inner, *plain, **keywords))
            return inner(*args, **keywords)

        gac.models.head.fused_linear_gac_loss = record_loss

    @torch.no_grad()
    def time_statistics(self) -> None:
        """Measure how long the loss statistics of a step take, then clear the recorded losses."""
        for loss in self.losses:
            for number in range(2 * ROUNDS):
                moments = number % 4 in (1, 2)
                began = clock()
                loss(moments=moments)
                seconds = (clock() - began) / ROUNDS
                self.seconds["statistics"] += seconds if moments else -seconds
        self.losses.clear()

    def _watch(self, owner: Any, name: str, part: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **keywords: Any) -> Any:
            if not self.enabled:
                return inner(*args, **keywords)
            began = clock()
            try:
                return inner(*args, **keywords)
            finally:
                self.seconds[part] += clock() - began

        setattr(owner, name, timed)


def with_method(trainer: Trainer, rows: list[Row]) -> None:
    """Run one step as the trainer does."""
    step = trainer._assemble(rows, trainer.mix)
    measured = trainer.gradients(step)
    update = trainer._apply(step, measured)
    trainer_columns(step, measured, update, trainer.rollouts, {})
    result = step_result(step, measured, update, None)
    _, trainer.state, trainer.mix = end_step(trainer.method, trainer.state, result)


def bare(trainer: Trainer, rows: list[Row], mu: float) -> None:
    """Run a step on `rows` at a given mu, without the method and its measurements."""
    step = trainer._assemble(rows, gac.methods.Mix(mu))
    step = dataclasses.replace(step, needs=StepNeeds())
    with without_statistics():
        measured = trainer.gradients(step)
    update = trainer._apply(step, measured)
    trainer_columns(step, measured, update, None, {})
    end_step(Constant(mu), {}, step_result(step, measured, update, None))


Times = dict[str, float]
"""Seconds of a step: "sampling", "bare", "method" and the names in PARTS."""


def measure(config: TrainConfig, cycles: int, steps: int = STEPS) -> list[list[Times]]:
    """Run cycles of `steps` steps; returns the times of all but the first cycle (warm-up)."""
    trainer = Trainer(config, resume=False)
    parts = Parts(trainer)
    measured: list[list[Times]] = []
    for number in range((cycles + 1) * steps):
        if number % steps == 0:
            measured.append([])
        times, mu = dict.fromkeys(("sampling", "bare", "method", *PARTS), 0.0), trainer.mix.mu
        measured[-1].append(times)
        began = clock()
        rows = trainer._sample()
        times["sampling"] += clock() - began
        before = trainer.state, trainer.mix
        tried: dict[str, list[Times]] = {"bare": [], "method": []}
        for repeat in range(REPEATS):
            for arm in ("bare", "method") if (number + repeat) % 2 else ("method", "bare"):
                parts.seconds.clear()
                parts.losses.clear()
                trainer.state, trainer.mix = before
                parts.enabled = arm == "method"
                began = clock()
                with_method(trainer, rows) if parts.enabled else bare(trainer, rows, mu)
                tried[arm].append({arm: clock() - began, **parts.seconds})
                parts.enabled = False
        for arm, repeats in tried.items():
            times |= min(repeats, key=operator.itemgetter(arm))
        parts.seconds.clear()
        parts.time_statistics()  # not between the arms, whose caches it would change
        times["statistics"] += parts.seconds["statistics"]
        trainer.step += 1
    return measured[1:]


def per_step(table: np.ndarray) -> np.ndarray:
    """Mean over the steps of a cycle of the trimmed means over cycles; table: [..., cycles, steps].

    A step does the same work in every cycle, so that what is trimmed is other work of the machine.
    """
    ordered, cut = np.sort(table, axis=-2), int(TRIM * table.shape[-2])
    return ordered[..., cut : table.shape[-2] - cut, :].mean((-2, -1))


def fraction(cycles: list[list[Times]], part: Callable[[Times], float]) -> dict[str, Any]:
    """Time of `part` per step: as a percentage of a step without the method, and in milliseconds.

    The percentage has a 95% bootstrap interval over cycles.
    """
    own = np.array([[part(times) for times in cycle] for cycle in cycles])
    whole = np.array([[t["sampling"] + t["bare"] for t in cycle] for cycle in cycles])
    drawn = np.random.default_rng(0).integers(len(cycles), size=(RESAMPLES, len(cycles)))
    low, high = np.quantile(100 * per_step(own[drawn]) / per_step(whole[drawn]), (0.025, 0.975))
    return {
        "percent": round(float(100 * per_step(own) / per_step(whole)), 3),
        "ci95": [round(float(low), 3), round(float(high), 3)],
        "ms": round(1e3 * float(per_step(own)), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__)
    parser.add_argument(
        "--cycles", type=int, default=24, help=f"number of cycles of {STEPS} steps, at least 2"
    )
    parser.add_argument("--method", choices=METHODS, help="default: the method of TrainConfig")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="other keys of the run"
    )
    parser.add_argument(
        "--times", type=int, default=1, help="multiplier of the lengths and batch sizes"
    )
    parser.add_argument("--all", action="store_true", help="measure every case of the table")
    parser.add_argument(
        "--keep", type=Path, help="folder of the times of earlier calls, to which this one adds"
    )
    arguments = parser.parse_args()
    if arguments.cycles < 2:
        parser.error(f"--cycles {arguments.cycles}: an interval needs at least 2")
    cases = CASES if arguments.all else [(arguments.method, arguments.set)]
    for method, changes in cases:
        run_case(method, changes, arguments.cycles, arguments.times, arguments.keep)
    fill(
        BENCHMARKS, "overhead", table(json.loads((RESULTS / "overhead.json").read_text())["cases"])
    )


def run_case(
    method: str | None, changes: Sequence[str], cycles: int, times: int, keep: Path | None
) -> None:
    """Measure, print and save one case; keep: a folder of the times of its earlier calls.

    On a busy machine, several short calls are easier to fit in than a long one.
    """
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(Path(folder), method, changes, STEPS * (cycles + 1), times)
        measured = measure(config, cycles)
    keys = {
        "method": config.method.name,
        "set": list(changes),
        "times": times,
        "rollouts": config.rollouts.num_prompts * config.rollouts.num_generations,
        "kl_rollouts": kl_rollouts(config),
    }
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        path = keep / f"{slug(json.dumps(keys))}.json"
        measured += json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps(measured))
    save(keys, summary(measured))


def summary(cycles: list[list[Times]]) -> dict[str, Any]:
    """Overhead per part and in total, as printed and saved."""
    base = fraction(cycles, lambda t: t["sampling"] + t["bare"])["ms"]
    return {
        "cycles": len(cycles),
        "bare_step_ms": round(base, 1),
        "sampling_share": round(fraction(cycles, operator.itemgetter("sampling"))["ms"] / base, 3),
        **{part: fraction(cycles, operator.itemgetter(part)) for part in PARTS},
        "other": fraction(
            cycles, lambda t: t["method"] - t["bare"] - sum(t[part] for part in PARTS)
        ),
        "overhead": fraction(cycles, lambda t: t["method"] - t["bare"]),
    }


def save(keys: Mapping[str, Any], result: dict[str, Any]) -> None:
    """Print one case and add it to the results file; it replaces a result with the same keys."""
    path, device = RESULTS / "overhead.json", "cuda" if torch.cuda.is_available() else "cpu"
    stored = json.loads(path.read_text())["cases"] if path.exists() else []
    row = {**keys, **origin(), "device": device_name(device), **environment(device), **result}
    if device == "cuda":
        row["method"] += ", on a GPU"
    names = ("method", "set", "times")
    kept = [old for old in stored if any(old[name] != row[name] for name in names)]
    path.write_text(json.dumps({"cases": [*kept, row]}, indent=1) + "\n")
    copy_out(path)
    print(*(f"{name:18} {value}" for name, value in row.items() if name != "versions"), sep="\n")
    low, high = result["overhead"]["ci95"]
    print(f"overhead {result['overhead']['percent']:.2f} % [{low:.2f}, {high:.2f}]")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per stored case; percentages of a step without the method."""
    shown = [(*case, times) for case in CASES for times in sorted({row["times"] for row in rows})]

    def position(row: Mapping[str, Any]) -> int:
        case = (row["method"], row["set"], row["times"])
        return shown.index(case) if case in shown else len(shown)

    lines = []
    for row in sorted(rows, key=position):
        low, high = row["overhead"]["ci95"]
        keys = "".join(f", `{change}`" for change in row["set"])
        sample = f"{min(row['kl_rollouts'] or math.inf, row['rollouts'])} of {row['rollouts']}"
        lines.append(
            [
                f"`{row['method']}`{keys}",
                str(row["times"]),
                sample if row["reference forward"]["ms"] else "",
                f"{row['overhead']['percent']:.2f} [{low:.2f}, {high:.2f}]",
                *(f"{row[part]['percent']:.2f}" for part in PARTS),
                f"{row['bare_step_ms']:.0f}",
                f"{row['date']}, {row['commit']}",
            ]
        )
    known = [(row["method"], row["set"]) for row in rows]
    for method, changes in CASES:
        if (method, changes) not in known:
            name = "".join([f"`{method}`", *(f", `{change}`" for change in changes)])
            lines.append([name, "", "", "not measured", *[""] * (len(PARTS) + 2)])
    head = ("method", "times", "rollouts with a KL", "overhead in % [95% interval]", *PARTS)
    return markdown_table((*head, "ms per step", "measured"), lines)


if __name__ == "__main__":
    main()
