"""Times each of the three GEMMs of the linear loss: `python -m bench.gemm_probe`.

The speed of a library's GEMM depends on the number of rows M and the output dtype; the chunked
head chooses both (`gac_kernels/linear.py`).
"""

from __future__ import annotations

import argparse

import torch

from .batches import HEADS, Head
from .record import Record
from .settings import DEVICE, tiny
from .timing import Step, interleave, runnable

# 512: a block of logits; 2048 and 8192: chunks of that many tokens; then other chunk sizes, at
# least one of which does not fill whole waves of tiles (1408).
ROWS = tiny((512, 2048, 8192, 2304, 1024, 1408, 1536, 2816, 640, 1280, 4096), (4, 8))
SECONDS = tiny(0.4, 0)  # per shape, over all rounds


def gemms(rows: int, head: Head, device: torch.device) -> dict[str, Step]:
    """The GEMMs for M rows, by name."""
    bf16, f32 = torch.bfloat16, torch.float32
    g = torch.Generator(device).manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=bf16, generator=g)

    hidden, vocab = head
    x, weight, dz = noise(rows, hidden), noise(vocab, hidden), noise(rows, vocab)

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    logits = {t: empty(t, rows, vocab) for t in (bf16, f32)}
    dx = {t: empty(t, rows, hidden) for t in (bf16, f32)}
    dw = {t: empty(t, vocab, hidden) for t in (bf16, f32)}
    return {
        "logits, bfloat16": lambda: torch.mm(x, weight.T, out=logits[bf16]),
        "logits, float32": lambda: torch.mm(x, weight.T, f32, out=logits[f32]),
        "dX, bfloat16": lambda: torch.mm(dz, weight, out=dx[bf16]),
        "dX, float32": lambda: torch.mm(dz, weight, f32, out=dx[f32]),
        "dW, bfloat16": lambda: torch.mm(dz.T, x, out=dw[bf16]),
        "dW, float32": lambda: torch.mm(dz.T, x, f32, out=dw[f32]),
        "dW accumulated, bfloat16": lambda: dw[bf16].addmm_(dz.T, x),
        "dW accumulated, float32": lambda: torch.addmm(dw[f32], dz.T, x, f32, out=dw[f32]),
    }


def probe(
    record: Record, shape: str, head: Head, rows: int, device: torch.device, seconds: float
) -> dict[str, float]:
    """Time and record one head and one M; returns TFLOP/s per GEMM."""
    failed: dict[str, str] = {}
    steps = runnable(gemms(rows, head, device), failed)
    speeds = {}
    common = {"device": device.type, "work": "gemm", "shape": shape, "tokens": rows, "case": ""}
    for name, timing in (interleave(steps, device, seconds) if steps else {}).items():
        speeds[name] = 2 * rows * head.hidden * head.vocab / timing.best / 1e9
        record.add(
            **common,
            provider=name,
            ms=timing.best,
            median_ms=timing.median,
            rounds=timing.rounds,
            tflops=speeds[name],
        )
        print(f"{shape:14} M={rows:5} {name:26} {timing.best:8.3f} ms {speeds[name]:6.0f} TFLOP/s")
    for name, reason in failed.items():
        record.add(**common, provider=name, not_run=reason)
        print(f"{shape:14} M={rows:5} {name:26} not run: {reason}")
    return speeds


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gemm_probe", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS)[:2])
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--device", default=DEVICE)
    options = parser.parse_args(arguments)
    for rows in options.rows:  # the most important rows first, for every head
        for shape in options.heads:
            record = Record()
            probe(record, shape, HEADS[shape], rows, torch.device(options.device), options.seconds)
            record.save()  # save after each shape, so that a timeout does not lose everything


if __name__ == "__main__":
    main()
