"""Errors of the epilogue head beside those of logits: on a CPU, in Triton's interpreter.

`python -m bench.epilogue_errors` writes bench/results/epilogue-errors.json and the table of
docs/kernels.md. Gradients are rounded to bfloat16; errors are relative to float64 (norms), that of
log-probs is the largest absolute one.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from torch import Tensor

from gac_kernels import fused_linear_gac_loss
from tools.origin import origin

from .batches import Batch, Head, linear_batch
from .interpreter import emulate_gpu
from .linear_losses import SPEC, eager, truth
from .settings import tiny

RESULTS = Path(__file__).parent / "results" / "epilogue-errors.json"
PAGE = Path(__file__).parents[1] / "docs" / "kernels.md"
CPU = torch.device("cpu")
TOKENS, HEAD = tiny(256, 4), tiny(Head(256, 4096), Head(16, 96))
# of 1000 MiB, so that the weight's gradient is a sum of so many chunks
CHUNKS = {"one chunk": None, "three chunks": tiny(86, 2)}


def gradients(loss: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    d_hidden, d_weight = torch.autograd.grad(loss, (batch.hidden, batch.weight))
    return d_hidden.double(), d_weight.double()


def ours(batch: Batch, head: str, rows: int | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The log-probs and the gradients with one of `epilogue.HEADS`."""
    os.environ["GAC_HEAD"] = head
    width, vocab = HEAD
    chunk = None
    if rows is not None:
        block = 4 * vocab * rows // 4 if head == "logits" else 4 * width * rows
        chunk = rows * 2 * (vocab + 2 * width) + block
    out = fused_linear_gac_loss(
        batch.hidden,
        batch.weight,
        batch.targets,
        batch.advantages,
        batch.is_demo,
        mu=batch.mu,
        spec=SPEC,
        backend="triton" if head == "epilogue" else "reference",
        chunk_bytes=chunk,
    )
    return out.logps, gradients(out.loss, batch)


def relative(x: Tensor, exact: Tensor) -> float:
    return ((x - exact).norm() / exact.norm()).item()


def measure() -> list[dict[str, Any]]:
    """The errors of each scheme."""
    emulate_gpu()
    batch = linear_batch(TOKENS, HEAD, torch.bfloat16, CPU)
    exact = gradients(truth(batch), batch)
    logits = batch.hidden.double() @ batch.weight.double().T
    logps = logits.log_softmax(-1).gather(-1, batch.targets[..., None]).squeeze(-1).detach()
    rounded = (batch.hidden @ batch.weight.T).float().log_softmax(-1)
    rounded = rounded.gather(-1, batch.targets[..., None]).squeeze(-1).detach()

    def row(name: str, found: Tensor, grads: tuple[Tensor, Tensor]) -> dict[str, Any]:
        d_hidden, d_weight = (relative(x, y) for x, y in zip(grads, exact, strict=True))
        worst = (found.double() - logps).abs().max().item()
        return {"scheme": name, "dH": d_hidden, "dW": d_weight, "log-prob": worst}

    rows = [row("bfloat16 logits (eager)", rounded, gradients(eager(batch), batch))]
    for head, name in (("logits", "float32 logits (default)"), ("epilogue", "epilogue")):
        for chunks, count in CHUNKS.items():
            rows.append(row(f"{name}, {chunks}", *ours(batch, head, count)))
    return rows


def table(result: dict[str, Any]) -> str:
    lines = ["| scheme | dH | dW | largest error of a log-prob |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {x['scheme']} | {x['dH']:.2e} | {x['dW']:.2e} | {x['log-prob']:.1e} |"
        for x in result["rows"]
    ]
    return "\n".join(lines)


def main() -> None:
    result = {"tokens": TOKENS, "hidden": HEAD.hidden, "vocab": HEAD.vocab, "rows": measure()}
    print(table(result))
    if tiny(False, True):
        return
    RESULTS.write_text(json.dumps({**origin(), **result}, indent=1) + "\n")
    pattern = "(?<=<!-- epilogue errors -->\n).*?(?=<!-- /epilogue errors -->)"
    text = re.sub(pattern, lambda _: table(result) + "\n", PAGE.read_text(), flags=re.DOTALL)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
