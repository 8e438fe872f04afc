"""The GEMM with exponentials in its epilogue beside cuBLAS: `python3 -m bench.epilogue_gemm`.

For several tiles and numbers of rows: time in one hot loop with `torch.mm` and bfloat16 output, and
the errors of the log-probs and entropies of 256 rows against float64.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from gac_kernels import reference
from gac_kernels.backends.triton import exponentials as kernels
from gac_kernels.tokens import Scaling

from .batches import HEADS, Head
from .hot_loop import hot
from .record import Record
from .settings import DEVICE, DRY_RUN, tiny

ROWS = tiny((1024, 2816, 8192), (8,))
SECONDS = tiny(2.0, 0.0)
TILES = tiny(
    {
        "128 x 256, group 8": kernels.Tiles(),
        "128 x 256, group 16": kernels.Tiles(group=16),
        "128 x 256, group 4": kernels.Tiles(group=4),
        "128 x 128, group 8": kernels.Tiles(columns=128, warps=4),
    },
    {"16 x 64, group 2": kernels.Tiles(rows=16, columns=64, depth=16, group=2, block=64)},
)


def measure(shape: str, head: Head, rows: int, device: torch.device, record: Record) -> None:
    """Time and record one head and one number of rows."""
    g = torch.Generator(device).manual_seed(0)

    def noise(*size: int) -> torch.Tensor:
        x = torch.randn(*size, device=device, generator=g)
        return x.to(torch.bfloat16)

    width, vocab = head
    x, weight = noise(rows, width), noise(vocab, width) * width**-0.5
    targets = torch.randint(vocab, (rows,), device=device, generator=g)
    columns = -(-vocab // 64) * 64
    values = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)[:, :vocab]
    tokens = torch.arange(rows, device=device)
    factors = torch.zeros(rows, device=device)

    def run(tiles: kernels.Tiles) -> kernels.Exponentials:
        kernels.TILES = tiles
        return kernels.exponentials(
            rows=x,
            weight=weight,
            bias=None,
            targets=targets,
            scaling=Scaling(1.0),
            values=values,
            tokens=tokens,
            factors=factors,
        )

    logits = reference.linear_logits(x[:256].double(), weight.double())
    logps, entropy, _ = reference.row_stats(logits, targets[:256], Scaling(1.0))
    steps = {"torch.mm": lambda: torch.mm(x, weight.T, out=values)}
    errors = {}
    for name, tiles in TILES.items():
        found = run(tiles)
        errors[name] = [
            (a[:256].double() - b).abs().max().item()
            for a, b in ((found.logps, logps), (found.entropy, entropy))
        ]
        steps[name] = lambda tiles=tiles: run(tiles)
    times = {name: statistics.median(x) for name, x in hot(steps, device, SECONDS).items()}
    for name, ms in times.items():
        tflops = 2 * rows * width * vocab / ms / 1e9
        record.add(
            device=device.type,
            work="epilogue GEMM",
            shape=shape,
            tokens=rows,
            case="",
            provider=name,
            ms=ms,
            tflops=tflops,
            errors=errors.get(name),
        )
        share = times["torch.mm"] / ms
        print(
            f"{shape} M={rows:5} {name:20} {ms:8.3f} ms {tflops:5.0f} TFLOP/s, {share:.3f} of "
            f"cuBLAS, errors {errors.get(name)}",
            flush=True,
        )
    record.save()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python3 -m bench.epilogue_gemm", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS)[:2])
    options = parser.parse_args(arguments)
    if DRY_RUN:
        from .interpreter import emulate_gpu

        emulate_gpu()
    for rows in options.rows:
        for shape in options.heads:
            measure(shape, HEADS[shape], rows, torch.device(DEVICE), Record())


if __name__ == "__main__":
    main()
