"""Interleaved benchmark of one update of TRL's trainers with TRL's head, our head or our loss.

Usage: python -m bench.bench_trl [--device cpu] [--rounds 5] [--case NAME] [--out FILE]

Each update is a forward and backward pass of the same micro-batch by the same model; gradients must
be equal. On a CPU, one thread computes, and times are processor times. Memory is the peak above the
state before the update.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import itertools
import json
import logging
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gac.demo.real_model import fetch_model
from gac.demo.real_task import codes
from gac.evaluation.table import markdown_table
from gac_kernels import projection
from tools.origin import origin
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
    pretrained: bool = False
    """Whether it is the model of `gac demo --real`, on questions and answers of its task."""


CASES = (
    Case("hidden 256, vocabulary 32,000", 256, 4, 32_000, 16, 16, 128),
    Case("head of Qwen2.5-0.5B", 896, 2, 151_936, 8, 8, 64),
)
REAL_CASE = Case("SmolLM2-135M-Instruct", 576, 30, 49_152, 4, 32, 48, pretrained=True)
GPU_CASES = (
    *CASES,  # the time of one micro-batch so small is that of its kernel launches
    Case("head of Qwen2.5-0.5B, 8,192 tokens", 896, 2, 151_936, 16, 64, 512),
)
TINY_CASES = (Case("tiny", 32, 1, 499, 4, 3, 5),)


def make_model(case: Case, seed: int = 0) -> nn.Module:
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

    if case.pretrained:
        return AutoModelForCausalLM.from_pretrained(fetch_model(), dtype=torch.float32)
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
    """The model, and a function that runs a forward and backward pass with a given provider.

    The function returns the loss.
    """
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

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
    tokenizer = (
        AutoTokenizer.from_pretrained(fetch_model()) if case.pretrained else make_tokenizer()
    )
    rows = texts(case, tokenizer)
    if trainer == "DPO":
        rows = [
            {
                "prompt": row["prompt"],
                "chosen": row["completion"],
                "rejected": row["completion"][::-1],
            }
            for row in rows
        ]
    common = {
        "model": make_model(case),
        "args": getattr(trl, f"{trainer}Config")(**options),
        "train_dataset": Dataset.from_list(rows),
        "processing_class": tokenizer,
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
        inputs = rollouts(case, tokenizer)
    else:
        instance = getattr(trl, f"{trainer}Trainer")(**common)
        inputs = next(iter(instance.get_train_dataloader()))
    inputs = {k: v.to(device) if torch.is_tensor(v) else v for k, v in inputs.items()}
    model = instance.model.to(device).train()
    instance.current_gradient_accumulation_steps = 1
    own = type(instance)

    def update(provider: str) -> float:
        from gac_kernels.heads.trl import FusedGRPOTrainer, apply_fused_head

        instance.__class__ = FusedGRPOTrainer if provider == LOSS else own
        model.zero_grad(set_to_none=True)
        with apply_fused_head() if provider == HEAD else contextlib.nullcontext():
            loss = instance.compute_loss(model, dict(inputs))
            loss.backward()
        return float(loss)

    return model, update


def texts(case: Case, tokenizer: Any) -> list[dict[str, str]]:
    """A prompt and a completion for each row: digits, or questions of the demo and their answers.

    Each has about the number of tokens that `case` says.
    """
    if not case.pretrained:
        digits = "0123456789" * (1 + case.completion // 10)
        return [
            {"prompt": digits[: case.prompt], "completion": digits[: case.completion]}
        ] * case.rows
    rng = random.Random(0)
    questions = [
        f"{q['question']} {q['answer']}" for q in itertools.islice(codes(rng), 4 * case.rows)
    ]
    parts = [" ".join(questions[i :: case.rows]) for i in range(case.rows)]
    cut = [tokenizer(text)["input_ids"][: case.prompt + case.completion] for text in parts]
    return [
        {
            "prompt": tokenizer.decode(ids[: case.prompt]),
            "completion": tokenizer.decode(ids[case.prompt :]),
        }
        for ids in cut
    ]


def rollouts(case: Case, tokenizer: Any) -> dict[str, Any]:
    """A micro-batch as GRPOTrainer prepares it."""
    draw = torch.Generator().manual_seed(0)
    prompts, completions = (
        torch.randint(2, case.vocab, (case.rows, length), generator=draw)
        for length in (case.prompt, case.completion)
    )
    if case.pretrained:
        rows = texts(case, tokenizer)
        ids = [tokenizer(row["prompt"] + row["completion"])["input_ids"] for row in rows]
        whole = torch.tensor([row[: case.prompt + case.completion] for row in ids])
        prompts, completions = whole.split((case.prompt, case.completion), dim=1)
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


def kept_rows(path: Path, device: str, case: str) -> list[dict[str, Any]]:
    """The rows of the other cases in a file, which must be of the same device."""
    if not path.exists():
        return []
    document = json.loads(path.read_text())
    if document["device"] != device_name(device):
        raise SystemExit(f"{path} is of another device, {document['device']}: measure all cases")
    return [row for row in document["rows"] if row["name"] != case]


def save(rows: list[dict[str, Any]], path: Path, device: str) -> None:
    document = {
        **origin(),
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
    parser.add_argument("--case", help="measure only this one, and keep the file's other rows")
    parser.add_argument("--out", type=Path, help="default: a file in bench/results")
    options = parser.parse_args()
    out = options.out or RESULTS / FILES[options.device]
    for name in ("trl", "datasets"):
        if importlib.util.find_spec(name) is None:
            raise skip(f"no {name}")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if options.device == "cpu":
        torch.set_num_threads(1)
    cases = tiny(GPU_CASES if options.device == "cuda" else CASES, TINY_CASES)
    rows = []
    if options.case:
        cases = tuple(case for case in (*cases, REAL_CASE) if case.name == options.case)
        rows = kept_rows(out, options.device, options.case)
    for case in cases:
        # the pretrained model is its own teacher, so its divergence would be 0
        for trainer in [t for t in TRAINERS if not (case.pretrained and t == "Distillation")]:
            for row in measure(trainer, case, options.rounds, options.device):
                rows.append(row)
                print(json.dumps(row), flush=True)
            save(rows, out, options.device)  # a later one may fail or time out
    print(markdown(rows))
    if options.out is None and not DRY_RUN:
        fill_page()


if __name__ == "__main__":
    main()
