"""Interleaved benchmark of one update of TRL's trainers with TRL's head, our head or our loss.

Usage: python -m bench.bench_trl [--device cpu] [--rounds 5] [--out FILE]

Each update is a forward and backward pass of the same micro-batch by the same model; gradients must
be equal. On a CPU, one thread computes, and times are processor times. Memory is the peak above the
state before the update.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gac.evaluation.table import markdown_table
from gac_kernels import projection
from tools.pages import BENCHMARKS, fill

from .peak_memory import resident
from .record import copy_out, device_name
from .settings import DRY_RUN, RESULTS, skip, tiny

TOLERANCE = 1e-4  # relative, of the whole gradient; float32 rounding is 1e-6 to 1e-5
TRAINERS = ("GRPO", "SFT", "DPO", "Distillation")
FILES = {"cpu": "trl.json", "cuda": "trl-cuda.json"}  # in bench/results
OWN, HEAD, LOSS = "TRL", "fused head", "fused loss"


@dataclass(frozen=True)
class Case:
    """A model's sizes and a micro-batch."""

    name: str
    hidden: int
    layers: int
    vocab: int
    rows: int
    prompt: int
    completion: int


CASES = (
    Case("hidden 256, vocabulary 32,000", 256, 4, 32_000, 16, 16, 128),
    Case("head of Qwen2.5-0.5B", 896, 2, 151_936, 8, 8, 64),
)
GPU_CASES = (
    *CASES,  # the time of one micro-batch so small is that of its kernel launches
    Case("head of Qwen2.5-0.5B, 8,192 tokens", 896, 2, 151_936, 16, 64, 512),
)
TINY_CASES = (Case("tiny", 32, 1, 499, 4, 3, 5),)


def make_model(case: Case, seed: int = 0) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    heads = max(case.hidden // 64, 1)
    return Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=case.hidden,
            intermediate_size=2 * case.hidden,
            num_hidden_layers=case.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            vocab_size=case.vocab,
            tie_word_embeddings=True,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def make_update(trainer: str, case: Case, folder: Path, device: str) -> tuple[nn.Module, Callable]:
    """The model, and a function that runs a forward and backward pass with a given provider."""
    import trl
    from datasets import Dataset

    from gac.demo.task import make_tokenizer

    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": case.rows,
        "use_cpu": device == "cpu",
        "bf16": False,
        "report_to": [],
        "gradient_checkpointing": False,
    }
    if trainer == "GRPO":
        options["num_generations"] = 2
    digits = "0123456789" * (1 + case.completion // 10)
    prompt, completion = digits[: case.prompt], digits[: case.completion]
    row = {"prompt": prompt, "completion": completion}
    if trainer == "DPO":
        row = {"prompt": prompt, "chosen": completion, "rejected": completion[::-1]}
    common = {
        "model": make_model(case),
        "args": getattr(trl, f"{trainer}Config")(**options),
        "train_dataset": Dataset.from_list([row] * case.rows),
        "processing_class": make_tokenizer(),
    }
    if trainer == "DPO":
        common["ref_model"] = make_model(case)
    if trainer == "Distillation":
        common["teacher_model"] = make_model(case, seed=1)
    if trainer in ("GRPO", "Distillation"):
        common["args"].max_completion_length = case.completion
        if trainer == "GRPO":
            common["reward_funcs"] = lambda **_: None
        instance = getattr(trl, f"{trainer}Trainer")(**common)
        inputs = rollouts(case)
    else:
        instance = getattr(trl, f"{trainer}Trainer")(**common)
        inputs = next(iter(instance.get_train_dataloader()))
    inputs = {k: v.to(device) if torch.is_tensor(v) else v for k, v in inputs.items()}
    model = instance.model.to(device).train()
    instance.current_gradient_accumulation_steps = 1
    own = type(instance)

    def update(provider: str) -> None:
        from gac_kernels.heads.trl import FusedGRPOTrainer, apply_fused_head

        instance.__class__ = FusedGRPOTrainer if provider == LOSS else own
        model.zero_grad(set_to_none=True)
        with apply_fused_head() if provider == HEAD else contextlib.nullcontext():
            instance.compute_loss(model, dict(inputs)).backward()

    return model, update


def rollouts(case: Case) -> dict[str, Any]:
    """A micro-batch as GRPOTrainer prepares it."""
    draw = torch.Generator().manual_seed(0)
    prompts, completions = (
        torch.randint(2, case.vocab, (case.rows, length), generator=draw)
        for length in (case.prompt, case.completion)
    )
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": torch.randn(case.rows, generator=draw),
        "num_items_in_batch": torch.tensor(completions.numel()),
    }


def peak(run: Callable[[], object], device: str) -> float:
    """Peak memory of `run` in MiB, minus the memory in use before it."""
    projection._kept.clear()  # otherwise ours reuses the gradient of the step before, uncounted
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    run()
    return resident("VmHWM") - before


def seconds(run: Callable[[], object], device: str) -> float:
    clock = time.process_time if device == "cpu" else time.perf_counter
    if device != "cpu":
        torch.cuda.synchronize()
    start = clock()
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - start


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def measure(trainer: str, case: Case, rounds: int, device: str) -> Iterator[dict[str, Any]]:
    """One row per provider; raises AssertionError if gradients differ."""
    providers = (OWN, HEAD, LOSS) if trainer == "GRPO" else (OWN, HEAD)
    with tempfile.TemporaryDirectory() as folder:
        model, update = make_update(trainer, case, Path(folder), device)
        gradients, memory = {}, {}
        for provider in providers:
            update(provider)  # warm-up
            gradients[provider] = gradient(model).cpu()
            model.zero_grad(set_to_none=True)
            memory[provider] = peak(lambda p=provider: update(p), device)
            error = (gradients[provider] - gradients[OWN]).norm() / gradients[OWN].norm()
            assert error < TOLERANCE, f"{trainer}, {case.name}, {provider}: gradient off by {error}"
        times: dict[str, list[float]] = {provider: [] for provider in providers}
        for _ in range(rounds):
            for provider in providers:
                times[provider].append(seconds(lambda p=provider: update(p), device))
    for provider in providers:
        own = min(times[OWN])
        yield {
            "trainer": trainer,
            **asdict(case),
            "provider": provider,
            "seconds": min(times[provider]),
            "speedup": own / min(times[provider]),
            "memory_mib": memory[provider],
            "gradient_norm": float(gradients[provider].norm()),
        }


def markdown(rows: list[dict[str, Any]]) -> str:
    """The Markdown table of docs/benchmarks.md."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for r in rows:
        time = f"{r['seconds']:.3g} s" if r["provider"] == "TRL" else f"{r['speedup']:.2f}x"
        group = cells.setdefault((r["trainer"], r["name"]), {})
        group[r["provider"]] = f"{time}, {r['memory_mib']:,.0f} MiB"
    head = ("trainer", "model", "TRL", "fused head", "fused loss")
    return markdown_table(head, [(*k, *(g.get(p, "") for p in head[2:])) for k, g in cells.items()])


def fill_page() -> None:
    """Write the newest table of each device to docs/benchmarks.md."""
    documents = [json.loads(p.read_text()) for f in FILES.values() if (p := RESULTS / f).exists()]
    fill(
        BENCHMARKS,
        "trl",
        "\n\n".join(f"{d['device']}:\n\n{markdown(d['rows'])}" for d in documents),
    )


def save(rows: list[dict[str, Any]], path: Path, device: str) -> None:
    document = {
        "device": device_name(device),
        **{name: version(name) for name in ("trl", "torch", "transformers")},
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    copy_out(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=tiny(5, 1))
    parser.add_argument("--out", type=Path, help="default: a file in bench/results")
    options = parser.parse_args()
    out = options.out or RESULTS / FILES[options.device]
    for name in ("trl", "datasets"):
        if importlib.util.find_spec(name) is None:
            raise skip(f"no {name}")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if options.device == "cpu":
        torch.set_num_threads(1)
    rows = []
    for case in tiny(GPU_CASES if options.device == "cuda" else CASES, TINY_CASES):
        for trainer in TRAINERS:
            for row in measure(trainer, case, options.rounds, options.device):
                rows.append(row)
                print(json.dumps(row), flush=True)
            save(rows, out, options.device)  # a later one may fail or time out
    print(markdown(rows))
    if options.out is None and not DRY_RUN:
        fill_page()


if __name__ == "__main__":
    main()
