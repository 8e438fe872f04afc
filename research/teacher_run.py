"""Runs the study of a teacher: `python -m research.teacher_run --model DIR`.

Its protocol is in research/teacher.md. All runs take place in one process; each appends one line to
research/results/teacher/runs.jsonl. Rerun an interrupted command to continue: a run that was cut
off is repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from gac.config import load
from gac.data import DataConfig, load_demos
from gac.data.micro_batches import demo_row
from gac.demo.task import write_rows
from gac.models.config import ModelConfig
from gac.rows import Row
from gac.train_config import TrainConfig
from gac.training import policy
from gac.training.trainer import Trainer
from research.adaptive_model import answer_logits, is_answer, reduce_vocabulary, share_frozen
from research.adaptive_run import REWARD, commit, execute_all
from research.adaptive_task import SUMS, held_out, rows

RESULTS = Path(__file__).resolve().parent / "results" / "teacher"
SEEDS, LEAST = range(8), 5
"""Those of every arm, and how many of them must be complete in all arms of a table."""
STEPS, EVERY = 16, 4
"""Optimizer steps of a run, and the steps between two evaluations."""
EVALUATED = 500
PROMPTS, GENERATIONS = 8, 4
TRAINED = 4
"""Layers, the last ones, that have adapters."""
DROPPED = range(16, 18)
"""The layers that the student of `opd` lacks."""
LRS = (3e-4, 1e-3)
TOP_K = 16


class Run(NamedTuple):
    """One run of the study."""

    experiment: str
    arm: str
    lr: float
    seed: int


ARMS: dict[str, dict[str, dict[str, Any]]] = {
    "opd": {
        "opd": {"method": "opd", "teacher": {"top_k": TOP_K}},
        "opd-k2": {"method": "opd", "teacher": {"loss": "k2"}},
        "grpo": {"method": "grpo", "teacher": {"top_k": TOP_K, "coef": 0.0}},
        "grpo-teacher": {"method": "grpo", "teacher": {"top_k": TOP_K}},
    },
    "sdft": {
        "sft": {"method": "sft"},
        "sdft": {"method": "sdft", "teacher": {"top_k": TOP_K}},
    },
}
"""Experiment -> arm -> the keys in which its runs differ; a teacher of `opd` is the whole model."""


def runs(seeds: Sequence[int] = SEEDS) -> Iterator[Run]:
    """All runs in order: `opd` itself, `sdft` beside `sft`, then the other arms of `opd`."""
    first, *others = ARMS["opd"]
    groups: list[tuple[str, list[tuple[str, float]]]] = [
        ("opd", [(first, LRS[-1])]),
        *(("sdft", [(arm, lr) for arm in ARMS["sdft"]]) for lr in reversed(LRS)),
        ("opd", [(arm, LRS[-1]) for arm in others]),
    ]
    for experiment, arms in groups:
        for seed in seeds:
            for arm, lr in random.Random(f"{experiment}/{seed}").sample(arms, len(arms)):
                yield Run(experiment, arm, lr, seed)


def others() -> dict[str, list[dict[str, Any]]]:
    """The tasks that no run trains on, whose answers have two digits as well."""
    products = {f"{a} x {b}": a * b for a in range(2, 10) for b in range(2, 10) if a * b >= 10}
    successors = {f"{a} + 1": a + 1 for a in range(11, 90)}
    return {
        name: [
            {"prompt": prompt, "answer": str(answer), "solution": str(answer)}
            for prompt, answer in problems.items()
        ]
        for name, problems in (("products", products), ("successors", successors))
    }


def write_models(source: str, folder: Path) -> None:
    """Write the model with the task's tokens to `folder`/teacher, with fewer layers to /student."""
    more = [
        SUMS.template.format(prompt=row["prompt"]) for part in others().values() for row in part
    ]
    reduce_vocabulary(source, folder / "teacher", [*SUMS.texts(), *more])
    write_student(folder / "teacher", folder / "student")


def write_student(teacher: Path, student: Path, dropped: Sequence[int] = DROPPED) -> None:
    """Write a model like Llama without the layers `dropped`."""
    model = AutoModelForCausalLM.from_pretrained(teacher)
    kept = [layer for i, layer in enumerate(model.model.layers) if i not in dropped]
    model.model.layers = nn.ModuleList(kept)
    for i, layer in enumerate(kept):
        layer.self_attn.layer_idx = i
    model.config.num_hidden_layers = len(kept)
    model.save_pretrained(student)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(student)


class SharedModels:
    """The models of all runs: loaded once, with the layers that are not trained as a `Frozen`."""

    def __init__(self) -> None:
        self.loaded: dict[tuple[str, bool], Any] = {}
        """By path and whether it has adapters."""
        self.initial: dict[tuple[str, bool], dict[str, Tensor]] = {}

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Let trainers take the models from here; each starts from the initial adapters."""
        original = policy.make_model

        def make(source: ModelConfig, *args: Any, **keywords: Any) -> Any:
            key = source.path, source.lora is not None
            if key not in self.loaded:
                model = self.loaded[key] = original(source, *args, **keywords)
                layers = model.config.num_hidden_layers
                share_frozen(model, layers - TRAINED if source.lora else layers)
                self.initial[key] = {n: p.detach().clone() for n, p in adapters(model)}
            for name, weight in adapters(self.loaded[key]):
                weight.data.copy_(self.initial[key][name])
            return self.loaded[key]

        policy.make_model = make
        try:
            yield
        finally:
            policy.make_model = original


def adapters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The trainable weights of a model."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


@dataclass
class Evaluation:
    """Held-out problems, and the answers of a reference model to them.

    Everything is exact: two tokens are the whole answer, and the vocabulary is small.
    """

    problems: dict[str, list[Row]]
    """By task."""
    reference: dict[str, Tensor]
    """Task -> log-probs [S, 2, V] of the reference, after the first digits of the answer."""

    @classmethod
    def of(cls, model: nn.Module, problems: dict[str, list[Row]]) -> Evaluation:
        """The evaluation against `model`."""
        return cls(problems, {task: answer_logps(model, part) for task, part in problems.items()})

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """For each task: `accuracy`, greedy; `kl` of model and reference per token, both ways."""
        found = {}
        for task, part in self.problems.items():
            own, other = answer_logps(model, part), self.reference[task]
            found[f"accuracy/{task}"] = float(is_answer(own.argmax(-1), part).double().mean())
            found[f"reverse_kl/{task}"] = divergence(own, other)
            found[f"forward_kl/{task}"] = divergence(other, own)
        return {name: round(x, 6) for name, x in found.items()}


def answer_logps(model: nn.Module, part: list[Row]) -> Tensor:
    """Log-probs [S, 2, V], float64."""
    return answer_logits(model, part, SUMS.length).double().log_softmax(-1)


def divergence(p: Tensor, q: Tensor) -> float:
    """Mean KL(p || q) per token of distributions given by log-probs [S, 2, V], nats."""
    return float((p.exp() * (p - q)).sum(-1).mean())


class EvaluatingTrainer(Trainer):
    """A trainer that evaluates where others save: a run that is cut off is repeated."""

    evaluation: Evaluation
    curve: list[dict[str, float]]

    def save(self) -> None:
        """Evaluate, and write nothing."""
        self.curve.append({"step": self.step, **self.evaluation(self.policy)})


class Study:
    """The runs of the study.

    Args:
        folder: of the models that `write_models` wrote.
        changes: keys of `TrainConfig` that replace those of the study, for tests and pilots.
        evaluated: number of held-out sums.
        steps: optimizer steps of a run, with an evaluation after every `every`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        changes: Mapping[str, Any] | None = None,
        evaluated: int = EVALUATED,
        steps: int = STEPS,
        every: int = EVERY,
    ) -> None:
        self.folder, self.changes, self.steps, self.every = folder, changes or {}, steps, every
        self.held_out = {"sums": held_out(SUMS, evaluated), **others()}
        self.models, self.evaluations = SharedModels(), dict[str, Evaluation]()
        self.commit = commit()

    def config(self, run: Run, folder: Path) -> TrainConfig:
        """Write the data of a run to `folder`; returns its configuration."""
        excluded = {row["prompt"] for row in self.held_out["sums"]}
        problems = rows(SUMS, "demos", run.seed, PROMPTS, [False] * self.steps, excluded)
        for kind in ("prompts", "demos"):
            write_rows(folder / f"{kind}.jsonl", problems)
        own = ARMS[run.experiment][run.arm]
        is_student, teacher = run.experiment == "opd", str(self.folder / "teacher")
        path = str(self.folder / "student") if is_student else teacher
        layers = ModelLayers.of(path)
        settings = {
            "out": str(folder / "run"),
            "run_name": run.arm,
            "model": {"path": path, "dtype": "bfloat16", "lora": layers.lora()},
            "data": data(folder),
            "reward": REWARD,
            "rollouts": {
                "num_prompts": PROMPTS,
                "num_generations": GENERATIONS,
                "max_completion_length": SUMS.length,
                "function": "research.adaptive_model:sample",
                "correction": "none",
                "log_samples_every": 0,
            },
            "demo_batch_size": PROMPTS,
            "steps": self.steps,
            "optim": {
                "lr": run.lr,
                "warmup_steps": 2,
                "schedule": "constant",
                "betas": [0.9, 0.99],
            },
            "micro_batch_size": 1000,
            "monitor_kl_every": 0,
            "checkpoint_every": self.every,
            "export": False,
            "seed": run.seed,
            **own,
        }
        if is_student:
            settings["teacher"] = {**own["teacher"], "path": teacher}
        return load(TrainConfig, settings | self.changes)

    def execute(self, run: Run) -> dict[str, Any]:
        """Train and evaluate; returns the raw row of the run."""
        cpu = time.process_time()
        with self.models.shared(), tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with contextlib.redirect_stderr(io.StringIO()):
                trainer = EvaluatingTrainer(self.config(run, folder))
                if run.experiment not in self.evaluations:
                    reference = trainer.teacher_model or trainer.policy  # with initial adapters
                    problems = {task: self.rows(task, trainer) for task in self.held_out}
                    self.evaluations[run.experiment] = Evaluation.of(reference, problems)
                trainer.evaluation, trainer.curve = self.evaluations[run.experiment], []
                trainer.save()  # before the first step
                trainer.run()
            lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        return {
            **run._asdict(),
            "curve": trainer.curve,
            **{name: [short(step.get(name)) for step in steps] for name in COLUMNS},
            "cpu_seconds": round(time.process_time() - cpu, 2),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": self.commit,
        }

    def rows(self, task: str, trainer: Trainer) -> list[Row]:
        """The held-out problems of a task as rows with their right answers."""
        with tempfile.TemporaryDirectory() as name:
            write_rows(Path(name) / "demos.jsonl", self.held_out[task])
            config = load(DataConfig, {**data(Path(name)), "prompts": None})
            return [demo_row(example) for example in load_demos(config, trainer.tokenizer)]


COLUMNS = ("teacher_loss", "demo_loss", "reward_mean", "entropy", "grad_norm")
"""Metrics of each step that a raw row keeps."""


class ModelLayers(NamedTuple):
    """The layers of a model that have adapters."""

    first: int
    last: int

    @classmethod
    def of(cls, path: str) -> ModelLayers:
        """Those of the model in a folder: the last `TRAINED`."""
        count = json.loads((Path(path) / "config.json").read_text())["num_hidden_layers"]
        return cls(count - TRAINED, count - 1)

    def lora(self) -> dict[str, Any]:
        """The section `model.lora`."""
        numbers = "|".join(map(str, range(self.first, self.last + 1)))
        return {"rank": 16, "alpha": 32, "target_modules": rf".*layers\.({numbers})\..*_proj"}


def data(folder: Path) -> dict[str, Any]:
    """The keys of `data` for the rows in `folder`."""
    files = {kind: str(folder / f"{kind}.jsonl") for kind in ("prompts", "demos")}
    return {**files, "template": SUMS.template, "order": "research.adaptive_task:InOrder"}


def key(row: Mapping[str, Any]) -> Run:
    """The run of a raw row."""
    return Run(*(row[name] for name in Run._fields))


def short(value: Any) -> Any:
    """A number with few digits."""
    return round(value, 6) if isinstance(value, float) else value


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run what has no row yet; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m research.teacher_run", description=__doc__)
    parser.add_argument("--model", required=True, help="folder that tools.real_model wrote")
    parser.add_argument("--out", type=Path, default=Path("runs/teacher"), help="for its copies")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the raw rows")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no run after that time")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    end = time.monotonic() + 60 * args.minutes
    if not (args.out / "student" / "tokenizer_config.json").exists():  # the last file written
        write_models(args.model, args.out)
    execute_all(Study(args.out).execute, runs(), args.results, end)
    return 0


if __name__ == "__main__":
    sys.exit(main())
