"""Prints the peak memory of one linear loss on the CPU, in MiB beyond inputs and gradients.

Usage: python -m bench.peak_memory PROVIDER TOKENS.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

from gac_kernels import projection

from .batches import linear_batch
from .bench_cpu_linear import CPU, HEAD
from .linear_losses import providers, step


def resident(field: str) -> float:
    """VmRSS (current) or VmHWM (peak) of this process, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) / 1024


def main(name: str, tokens: int) -> float:
    loss = providers(CPU, compiled=False)[0][name].loss
    # warm-up: loads libraries and starts thread pools
    step(loss, linear_batch(256, HEAD, torch.float32, CPU))
    projection._kept.clear()  # otherwise the step reuses the gradient of the warm-up, uncounted
    batch = linear_batch(tokens, HEAD, torch.float32, CPU)
    gradients = (batch.hidden.nbytes + batch.weight.nbytes) / 2**20
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    step(loss, batch)
    return resident("VmHWM") - before - gradients


if __name__ == "__main__":
    print(main(sys.argv[1], int(sys.argv[2])))
