"""Interleaved benchmark of one SFT micro-batch: a transformers model with its own loss, and fused.

Usage: python -m bench.bench_transformers [--device cpu] [--rounds 5] [--out PATH]

Each update is `model(input_ids, labels=labels).loss` and its backward; gradients must be equal.
Times and memory are measured as in `bench_trl`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gac_kernels.heads.transformers import fuse
from tools.origin import origin

from .bench_trl import CASES, TINY_CASES, TOLERANCE, Case, gradient, make_model, peak, seconds
from .record import copy_out, device_name
from .settings import RESULTS, tiny

OWN, FUSED = "transformers", "fused"


def measure(case: Case, rounds: int, device: str) -> list[dict[str, Any]]:
    """One row per provider; raises AssertionError if the gradients differ."""
    model: Any = make_model(case).to(device).train()
    draw = torch.Generator().manual_seed(0)
    shape = (case.rows, case.prompt + case.completion)
    ids = torch.randint(2, case.vocab, shape, generator=draw).to(device)

    def update(provider: str) -> None:
        model.zero_grad(set_to_none=True)
        handle = fuse(model) if provider == FUSED else None
        model(input_ids=ids, labels=ids).loss.backward()
        if handle:
            handle.undo()

    gradients, memory = {}, {}
    for provider in (OWN, FUSED):
        update(provider)  # warm-up
        gradients[provider] = gradient(model).cpu()
        model.zero_grad(set_to_none=True)
        memory[provider] = peak(lambda p=provider: update(p), device)
    error = (gradients[FUSED] - gradients[OWN]).norm() / gradients[OWN].norm()
    assert error < TOLERANCE, f"{case.name}: gradient off by {error}"
    times: dict[str, list[float]] = {OWN: [], FUSED: []}
    for _ in range(rounds):
        for provider, measured in times.items():
            measured.append(seconds(lambda p=provider: update(p), device))
    return [
        {
            **asdict(case),
            "provider": provider,
            "seconds": min(times[provider]),
            "speedup": min(times[OWN]) / min(times[provider]),
            "memory_mib": memory[provider],
        }
        for provider in times
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=tiny(5, 1))
    parser.add_argument("--out", type=Path, help="default: a file in bench/results per device")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    name = "transformers.json" if options.device == "cpu" else "transformers-cuda.json"
    out = options.out or RESULTS / name
    rows = []
    for case in tiny(CASES, TINY_CASES):
        for row in measure(case, options.rounds, options.device):
            rows.append(row)
            print(json.dumps(row), flush=True)
    about = {**origin(), "device": device_name(options.device), "torch": torch.__version__}
    document = {**about, "rows": rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n")
    copy_out(out)


if __name__ == "__main__":
    main()
