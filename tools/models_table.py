"""Trains a tiny model of every family of transformers; writes docs/models.md and its data.

`python -m tools.models_table [FAMILY ...]` builds a random model of each causal language model of
the installed transformers and trains it for two steps in every mode.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import signal
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import transformers

from gac.config import load
from gac.data import Example
from gac.demo.task import make_tokenizer, write_rows
from gac.errors import UserError
from gac.evaluation.cells import markdown_table
from gac.models.families import RESULTS
from gac.parallel import setup
from gac.train_config import TrainConfig
from gac.training.trainer import train
from tools.tiny_models import families, tiny_config

PAGE = Path("docs/models.md")
MODES: dict[str, dict[str, Any]] = {
    "padded": {},
    "default": {"micro_batch_size": "null"},
    "packed": {"max_tokens_per_micro_batch": 64},
    "micro-batches": {"micro_batch_size": 2},
    "LoRA": {"model.lora.rank": 2},
    "FSDP2": {"parallel.mode": "fsdp"},
}
FALLBACK = "padding rows"  # part of the warning about a model that cannot be packed
SECONDS = 200  # limit of a mode
TOLERANCE = 2e-3  # relative difference of losses and gradient norms between modes
INTRODUCTION = """\
# Tested models

<!-- written by python -m tools.models_table; do not edit -->

A tiny random model of every causal language model in transformers {version}, trained for two steps
on rollouts and demonstrations: with its rows padded, as the default divides them, packed, in
micro-batches of two rows, with LoRA adapters, and sharded by FSDP2 (one process).

*yes*: it trains, and the losses and gradient norms of the first step agree with those of the padded
rows to a relative {tolerance:g} (LoRA has its own gradients). *padded*: packed rows are not
supported, so rows of similar length are padded instead. *no*: see the note below the table.
Models that are refused get one line at the start that gives the reason.

{trained} of {total} families train.
"""
UNTESTED = """\
The program could not make a tiny model of these families that loads and generates here.
"""


def reward(completion: str, example: Example) -> float:
    """The length of the response, which differs between the rollouts of a prompt."""
    return len(completion) / 10


def main(argv: Sequence[str] | None = None) -> int:
    """Train all families, or only those named, and write or update the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="model types; default: all")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _out_of_time)
    results = json.loads(RESULTS.read_text()) if options.families and RESULTS.exists() else {}
    for family in options.families or families():
        results[family] = try_family(family, options.debug)
        print(family, json.dumps(results[family]), flush=True)
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(results))
    return int(any(v.startswith("FAILED") for modes in results.values() for v in modes.values()))


def try_family(family: str, debug: bool) -> dict[str, str]:
    """Result by mode: "yes", "padded" or why the model is refused; "FAILED: ..." means a bug."""
    try:
        config = tiny_config(family)
    except Exception as error:  # the family's own configuration class raises anything
        return {"configuration": f"no tiny configuration: {_line(error)}"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config.save_pretrained(folder / "model")
        make_tokenizer().save_pretrained(folder / "model")
        write_rows(folder / "data.jsonl", _rows())
        results: dict[str, str] = {}
        expected: dict[str, float] = {}
        for mode, keys in MODES.items():
            signal.alarm(SECONDS)
            try:
                with _one_process_group(mode == "FSDP2"), _warnings() as messages:
                    losses = _train(folder, mode, keys)
            except UserError as error:
                results[mode] = _line(error).replace(str(folder), "")
            except Exception as error:  # a bug, of ours or of the model
                if debug:
                    traceback.print_exc()
                results[mode] = f"FAILED: {type(error).__name__}: {_line(error)}"
            else:
                fallback = any(FALLBACK in message for message in messages)
                expected = expected or losses
                results[mode] = "padded" if fallback else _compare(mode, losses, expected)
            finally:
                signal.alarm(0)
            if mode == "padded" and results[mode] != "yes":
                return {"model": results[mode]}
    return results


def _out_of_time(number: int, frame: object) -> None:
    raise TimeoutError(f"no result after {SECONDS} s")


def _compare(mode: str, losses: dict[str, float], expected: dict[str, float]) -> str:
    for name, value in losses.items():
        if mode == "LoRA" and name == "grad_norm":
            continue
        if not math.isclose(value, expected[name], rel_tol=TOLERANCE, abs_tol=1e-6):
            return f"FAILED: {name} is {value:.6g}, padded {expected[name]:.6g}"
    return "yes"


def _train(folder: Path, mode: str, keys: dict[str, Any]) -> dict[str, float]:
    """Train two steps; returns the losses and the gradient norm of the first step."""
    settings = {
        "out": str(folder / mode),
        "model": {"path": str(folder / "model"), "random_init": True},
        "method": {"name": "constant", "mu": 0.5},
        "data": {"prompts": str(folder / "data.jsonl"), "answer_field": None},
        "reward": "tools.models_table:reward",
        "rollouts": {"num_prompts": 2, "num_generations": 4, "max_completion_length": 6},
        "demo_batch_size": 4,
        "micro_batch_size": 8,
        "steps": 2,
        "export": False,
        "guards": {"patience": 1},
    }
    out = train(load(TrainConfig, settings, [f"{key}={value}" for key, value in keys.items()]))
    row = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    return {name: row[name] for name in ("rollout_loss", "demo_loss", "grad_norm")}


def _rows() -> list[dict[str, str]]:
    return [{"prompt": f"+{i}" * (1 + i % 3), "solution": "1." * (1 + i % 4)} for i in range(8)]


@contextmanager
def _one_process_group(enabled: bool) -> Iterator[None]:
    if enabled:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        setup.leave()


class _Messages(logging.Handler):
    """Collects the messages that are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """The messages that gac logs inside the block."""
    handler, logger = _Messages(), logging.getLogger("gac")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield handler.messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def page(results: dict[str, dict[str, str]]) -> str:
    """Render docs/models.md."""
    trained = {family: modes for family, modes in results.items() if "padded" in modes}
    text = INTRODUCTION.format(
        version=transformers.__version__,
        tolerance=TOLERANCE,
        trained=len(trained),
        total=len(results),
    )
    head = ("family", *MODES)
    notes: dict[str, int] = {}
    rows = []
    for family, modes in trained.items():
        cells = [
            v if v in ("yes", "padded") else f"no [{notes.setdefault(v, len(notes) + 1)}]"
            for v in (modes[mode] for mode in MODES)
        ]
        rows.append((f"`{family}`", *cells))
    others = {
        family: next(iter(modes.values()))
        for family, modes in results.items()
        if family not in trained
    }
    refused, untested = (
        [(f"`{f}`", reason) for f, reason in others.items() if reason.startswith("model type") == x]
        for x in (True, False)
    )
    parts = [text, markdown_table(head, rows) + "\n"]
    parts += [f"[{number}] {reason}\n" for reason, number in notes.items()]
    parts += ["## Refused\n", markdown_table(("family", "reason"), refused) + "\n"]
    parts += [f"## Not tested\n\n{UNTESTED}", markdown_table(("family", "reason"), untested) + "\n"]
    return "\n".join(parts)


if __name__ == "__main__":
    raise SystemExit(main())
