"""A single row-kernel call, for profilers, sanitizers and tuning the split.

`python -m bench.row_case --backend native --dtype float32 --out bfloat16 --rows 40 --vocab 50257`
"""

from __future__ import annotations

import argparse
from types import ModuleType

import torch

from gac_kernels import LossSpec, backends
from gac_kernels.tokens import BatchInputs, plan

from .settings import DEVICE, DRY_RUN
from .timing import Step

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LENGTH = 8  # rows per sequence


def row_case(
    backend: ModuleType,
    rows: int,
    vocab: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    device: torch.device,
    overwrite: bool = False,
) -> Step:
    """A call of `backend.row_loss`: loss and gradient of [rows / 8, 8, V] logits."""
    g = torch.Generator(device).manual_seed(0)
    shape = (rows // LENGTH, LENGTH)
    logits = torch.randn(*shape, vocab, device=device, dtype=dtype, generator=g)
    targets = torch.randint(vocab, shape, device=device, generator=g)
    advantages = torch.randn(shape[0], device=device, generator=g)
    demo = torch.arange(shape[0], device=device) % 2 == 1
    tokens = plan(BatchInputs(targets, advantages, demo, 0.5), LossSpec())
    out = logits if overwrite else torch.empty_like(logits, dtype=out_dtype)
    return lambda: backend.row_loss(logits, tokens, LossSpec(), out)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.row_case", description=__doc__)
    parser.add_argument("--backend", default="native", choices=("reference", "triton", "native"))
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--out", default="bfloat16", choices=DTYPES)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=152064)
    parser.add_argument("--overwrite", action="store_true", help="in place; ignores --out")
    parser.add_argument("--device", default=DEVICE)
    options = parser.parse_args(arguments)
    if DRY_RUN:
        options.rows, options.vocab = LENGTH, 50
    device = torch.device(options.device)
    run = row_case(
        backends.load(options.backend, device),
        options.rows,
        options.vocab,
        DTYPES[options.dtype],
        DTYPES[options.out],
        device,
        options.overwrite,
    )
    for _ in range(3):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    shape = f"{options.rows} x {options.vocab}"
    print(f"{options.backend}: {shape} {options.dtype} to {options.out}: done")


if __name__ == "__main__":
    main()
