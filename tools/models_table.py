"""Trains a tiny model of every family of transformers; writes docs/models.md and its data.

`python -m tools.models_table [FAMILY ...]` builds a random model of each causal language model of
the installed transformers, trains it for two steps in every mode, and compares its own loss with
that of `fuse`. A run that was interrupted continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import signal
import tempfile
import textwrap
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from gac.config import load
from gac.data import Example
from gac.demo.task import make_tokenizer, write_rows
from gac.errors import UserError
from gac.evaluation.table import markdown_table
from gac.parallel import process_group
from gac.train_config import TrainConfig
from gac.training.trainer import train
from gac_kernels.heads.transformers import fuse
from tools.tiny_models import families, tiny_config

PAGE = Path("docs/models.md")
RESULTS = Path(__file__).with_name("model_families.json")
PART = RESULTS.with_suffix(".part")  # results of an unfinished run
MODES: dict[str, dict[str, Any]] = {
    "padded": {},
    "default": {"micro_batch_size": "null"},
    "packed": {"micro_batch_size": "null", "max_tokens_per_micro_batch": 64, "packing": "true"},
    "micro-batches": {"micro_batch_size": 2},
    "LoRA": {"model.lora.rank": 2},
    "FSDP2": {"parallel.mode": "fsdp"},
}
FALLBACK = "padding rows"  # part of the warning about a model that cannot be packed
FUSE, FUSED, FALLS_BACK, NOT_REACHED = "fuse", "fused", "exact fallback", "not reached"
UNPACKED = "rows are padded"
REASONS = {
    "padded": UNPACKED,
    FALLS_BACK: "computes its own loss from the logits, so `fuse` leaves it unchanged",
    NOT_REACHED: "does not call its LM head, so `fuse` leaves it unchanged",
    "does not run": "its own loss of `labels` fails here without `fuse`, so there is no comparison",
}
FUSE_TOLERANCE = 1e-4  # relative difference of the gradient of a parameter
NEGLIGIBLE = 1e-6  # share of the whole gradient; below, a difference is measured against this
SECONDS = 200  # limit of a mode
TOLERANCE = 2e-3  # relative difference of losses and gradient norms between modes
INTRODUCTION = """\
# Tested models

<!-- written by python -m tools.models_table; do not edit -->

A tiny random model of every causal language model in transformers {version}, trained for two steps
on rollouts and demonstrations: with its rows padded, as the default divides them, packed, in
micro-batches of two rows, with LoRA adapters, and sharded by FSDP2 (one process). A family passes
if the losses and gradient norms of the first step agree with those of the padded rows to a relative
{tolerance:g} (LoRA has its own gradients). {trained} of {total} families train. The result of each
mode is in `tools/model_families.json`; a model's family is the `model_type` in its config.json.

[`fuse`](integrations/transformers.md) computes the loss of `model(labels=...)` without logits. The
loss and the gradient of every parameter must agree with those without `fuse` to a relative
{fuse:g} (a gradient that is 0 but for rounding: to {negligible:g} of the whole). Of all families,
{fused}.
"""
WHOLE = """\
## Everything works

They train in all modes, and `fuse` computes their loss:
"""
PADDED = """\
## Without packing

As above, but their rows cannot be packed: rows of similar length are padded instead.
"""
EXCEPTIONS = """\
## Exceptions
"""
REFUSED = """\
## Refused

Encoders, whose output for a token depends on later tokens. One line at the start says so:
"""
UNTESTED = """\
## Not tested

The program could not make a tiny model of these families that loads and generates here;
`tools/model_families.json` has the errors:
"""


def reward(completion: str, example: Example) -> float:
    """The length of the response, which differs between the rollouts of a prompt."""
    return len(completion) / 10


def main(argv: Sequence[str] | None = None) -> int:
    """Train all families, or only those named, and write or update the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="model types; default: all")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.add_argument("--only-fuse", action="store_true", help="update only the column fuse")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.getLogger("gac_kernels").setLevel(logging.ERROR)  # fuse says which models it leaves
    signal.signal(signal.SIGALRM, _out_of_time)
    results = json.loads(RESULTS.read_text()) if options.families or options.only_fuse else {}
    done = json.loads(PART.read_text()) if PART.exists() else {}
    for family in options.families or families():
        if family not in done:
            known = results.get(family) if options.only_fuse else None
            modes = known or try_family(family, options.debug)
            done[family] = modes | {FUSE: try_fuse(family)}
            print(family, json.dumps(done[family]), flush=True)
            PART.write_text(json.dumps(done))
    results |= done
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(results))
    PART.unlink()
    return int(any(v.startswith("FAILED") for modes in results.values() for v in modes.values()))


def try_family(family: str, debug: bool) -> dict[str, str]:
    """Result by mode: "yes", "padded" or why the model is refused; "FAILED: ..." means a bug."""
    try:
        config = tiny_config(family)
    except Exception as error:  # the family's own configuration class raises anything
        return {"model": f"no tiny configuration: {_line(error)}"}
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


def try_fuse(family: str) -> str:
    """What `fuse` does with a tiny model: FUSED, FALLS_BACK, NOT_REACHED, or why none of them."""
    try:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(family)).eval()  # without dropout
        ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
        labels = torch.where(torch.arange(12) < 4, -100, ids)
        expected = _gradients(model, ids, labels)
    except Exception as error:  # of the model, without `fuse`
        return f"does not run: {_line(error)}"
    handle = fuse(model)
    found = _gradients(model, ids, labels)
    whole = math.hypot(*(grad.norm().item() for grad in expected.values()))
    for name, grad in expected.items():
        off = (found[name] - grad).norm() / max(grad.norm().item(), NEGLIGIBLE * whole)
        if off > FUSE_TOLERANCE:
            return f"FAILED: {name} is off by {off:.2g}"
    if handle.reason is None:
        return FUSED
    return NOT_REACHED if "does not call" in handle.reason else FALLS_BACK


def _gradients(model: Any, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The loss and the gradient of every parameter, in float64."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: x.detach().double() for name, x in {"loss": loss, **named}.items()}


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
        process_group.leave()


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
    kinds = Counter(modes[FUSE].partition(":")[0] for modes in results.values())
    trained = {family: modes for family, modes in results.items() if "padded" in modes}
    differ = {f: _exceptions(modes) for f, modes in trained.items()}
    others = {family: modes["model"] for family, modes in results.items() if family not in trained}
    refused = [f for f, reason in others.items() if reason.startswith("model type")]
    introduction = INTRODUCTION.format(
        version=transformers.__version__,
        tolerance=TOLERANCE,
        trained=len(trained),
        total=len(results),
        fuse=FUSE_TOLERANCE,
        negligible=NEGLIGIBLE,
        fused=", ".join(f"{n} {kind}" for kind, n in kinds.most_common()),
    )
    exceptions = [(f"`{f}`", "; ".join(x)) for f, x in differ.items() if x not in ([], [UNPACKED])]
    parts = [
        introduction,
        WHOLE,
        _listed(family for family, x in differ.items() if not x),
        PADDED,
        _listed(family for family, x in differ.items() if x == [UNPACKED]),
        EXCEPTIONS,
        markdown_table(("family", "differences"), exceptions) + "\n",
        REFUSED,
        _listed(refused),
        UNTESTED,
        _listed(family for family in others if family not in refused),
    ]
    return "\n".join(parts)


def _exceptions(modes: dict[str, str]) -> list[str]:
    """What does not work as it does for most families."""
    return [
        REASONS.get(result.partition(":")[0], f"{mode}: {result}")
        for mode, result in sorted(modes.items())
        if result not in ("yes", FUSED)
    ]


def _listed(families: Iterable[str]) -> str:
    return textwrap.fill(", ".join(f"`{f}`" for f in families), 118, break_on_hyphens=False) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
