"""The gradient filter: time over the GEMMs, errors, and the effect on training.

`python -m bench.bench_filter [time] [errors] [training]`: all parts without arguments. The logits
are those of `bench.filter_model`, scaled to a given entropy. On a CPU, times are the CPU time of
one thread, which other processes disturb less than the wall time. `--device cuda` measures times in
bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from gac.evaluation.table import markdown_table
from gac_kernels import (
    GradientFilter,
    LossOutput,
    LossSpec,
    fused_gac_loss,
    fused_linear_gac_loss,
)
from gac_kernels.filter import ColumnFilter

from .filter_model import LENGTH, Text, text
from .linear_losses import SPEC
from .record import Record
from .settings import tiny
from .timing import gemm_step, once

SIZES = tiny(((1024, 512), (256, 768)), ((16, 24),))  # tokens, hidden size
GPU_SIZES = tiny(((4096, 3584), (4096, 1536)), ((16, 24),))
ENTROPIES, ROUNDS = (0.5, 1.0, 2.5), tiny(5, 1)  # nats
TRAINING_STEPS, TRAINING_TOKENS, TRAINING_LR = tiny(200, 2), tiny(128, 8), 5e-5
HIDDEN_ONLY, BOTH = GradientFilter(), GradientFilter(weight=True)
SFT = LossSpec(demo_weight="one")
# provider: the GEMMs that its time is divided by, and the most at entropies up to 1 nat
TARGETS = {
    "exact": ("three GEMMs", None),
    "hidden filtered": ("three GEMMs", 0.8),
    "both filtered": ("three GEMMs", 0.6),
    "frozen head, filtered": ("two GEMMs", 0.75),
}


class Rows(NamedTuple):
    """Rows of a head, half of them rollouts and half demonstrations, in alternation."""

    hidden: Tensor  # [B, T, H]
    weight: Tensor  # [V, H]
    targets: Tensor  # [B, T]: sampled in rollouts, the text in demonstrations
    advantages: Tensor  # [B]
    is_demo: Tensor  # [B]

    def gradients(
        self, settings: GradientFilter | None, frozen: bool = False
    ) -> tuple[LossOutput, tuple[Tensor, ...]]:
        """The output, and the gradients of hidden and, unless it is frozen, of weight."""
        hidden, weight = (x.detach().requires_grad_() for x in self[:2])
        inputs = [hidden] if frozen else [hidden, weight]
        keywords: dict[str, Any] = {"mu": 0.5, "spec": SPEC, "gradient_filter": settings}
        head = weight.detach() if frozen else weight
        out = fused_linear_gac_loss(hidden, head, *self[2:], **keywords)
        return out, torch.autograd.grad(out.loss, inputs)


def entropy(logits: Tensor) -> float:
    log_probs = logits.log_softmax(-1)
    return float(-(log_probs.exp() * log_probs).sum(-1).mean())


def scale_for(data: Text, nats: float) -> float:
    """The factor of the logits that gives this mean entropy."""
    logits = data.hidden[:: len(data.hidden) // tiny(128, 8)] @ data.weight.T
    low, high = 0.5, 16.0
    for _ in range(12):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if entropy(middle * logits) > nats else (low, middle)
    return low


def make_rows(data: Text, tokens: int, size: int, nats: float) -> Rows:
    """The first rows, rotated into `size` hidden units, with logits of a mean entropy."""
    draw = torch.Generator().manual_seed(0)
    width = data.weight.shape[1]
    rotation = torch.linalg.qr(torch.randn(size, width, generator=draw))[0].T
    hidden = scale_for(data, nats) * data.hidden[:tokens]
    sampled = (hidden @ data.weight.T).softmax(-1).multinomial(1, generator=draw)[:, 0]
    sequences = tokens // LENGTH
    is_demo = torch.arange(sequences) % 2 == 1
    targets = torch.where(is_demo.repeat_interleave(LENGTH), data.targets[:tokens], sampled)
    return Rows(
        (hidden @ rotation).view(sequences, LENGTH, size),
        data.weight @ rotation,
        targets.view(sequences, LENGTH),
        torch.randn(sequences, generator=draw),
        is_demo,
    )


def times_of(
    steps: Mapping[str, Callable[[], object]], device: torch.device
) -> dict[str, list[float]]:
    """The times of each step in milliseconds, in alternation; on a CPU, its CPU time."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS + 1):
        for name, step in steps.items():
            if device.type == "cuda":
                times[name].append(once(step, device))
                continue
            start = time.process_time()
            step()
            times[name].append(1e3 * (time.process_time() - start))
    return {name: measured[1:] for name, measured in times.items()}  # the first is a warm-up


def count_chunks(step: Callable[[], object]) -> tuple[int, int]:
    """How many chunks a step filters, and how many it computes exactly instead."""
    chosen: list[bool] = []
    select = ColumnFilter.select

    def counted(*arguments: Any) -> Callable[[], Any]:
        finish = select(*arguments)

        def count() -> Any:
            kept = finish()
            chosen.append(kept is not None)
            return kept

        return count

    with mock.patch.object(ColumnFilter, "select", counted):
        step()
    return sum(chosen), len(chosen) - sum(chosen)


def page_table(rows: list[dict[str, Any]]) -> str:
    """The table of research/gradient_filter.md: the median ratios."""
    cells: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        size = str(row["tokens"]), row["shape"].split()[0].removeprefix("H=")
        line = cells.setdefault((*size, f"{row['entropy']:.2f}", f"{row['kept_columns']:.1%}"), [])
        line.append(f"{row['ratio']:.2f}")
    head = "tokens", "H", "entropy, nats", "columns kept", *TARGETS
    body = [[*key, *line] for key, line in cells.items()]
    return markdown_table(head, body)


def measure_time(data: Text, record: Record, device: torch.device) -> None:
    """Time over that of the GEMMs, at each size and entropy."""
    on_gpu = device.type == "cuda"
    for tokens, size in GPU_SIZES if on_gpu else SIZES:
        for nats in ENTROPIES:
            rows = Rows(*(x.to(device) for x in make_rows(data, tokens, size, nats)))
            if on_gpu:
                rows = rows._replace(hidden=rows.hidden.bfloat16(), weight=rows.weight.bfloat16())
            hidden, weight = rows.hidden.flatten(0, 1), rows.weight
            shape = f"H={size} V={len(weight)} {str(weight.dtype).removeprefix('torch.')}"
            logits, d_hidden = weight.new_empty(tokens, len(weight)), torch.empty_like(hidden)

            def two_gemms(x: Any = hidden, w: Any = weight, z: Any = logits, d: Any = d_hidden):
                torch.mm(x, w.T, out=z)
                torch.mm(z, w, out=d)

            steps: dict[str, Callable[[], object]] = {
                "two GEMMs": two_gemms,
                "three GEMMs": gemm_step(rows.hidden, weight),
                "exact": partial(rows.gradients, None),
                "hidden filtered": partial(rows.gradients, HIDDEN_ONLY),
                "both filtered": partial(rows.gradients, BOTH),
                "frozen head, filtered": partial(rows.gradients, HIDDEN_ONLY, frozen=True),
            }
            report = rows.gradients(HIDDEN_ONLY, frozen=True)[0]
            kept, measured = float(report.filter.kept_columns), float(report.entropy.mean())
            filtered, dense = count_chunks(steps["frozen head, filtered"])
            print(
                f"{tokens} tokens, {shape}, {measured:.2f} nats: "
                f"{kept:.1%} of the columns kept, {dense} of {filtered + dense} chunks exact"
            )
            times = times_of(steps, device)
            for name, (gemms, target) in TARGETS.items():
                ratios = [x / y for x, y in zip(times[name], times[gemms], strict=True)]
                ratio, spread = statistics.median(ratios), f"{min(ratios):.2f} to {max(ratios):.2f}"
                limit = f", target {target}" if target and nats <= 1 else ""
                print(f"  {name:24} {ratio:.2f} ({spread}) of the {gemms}{limit}", flush=True)
                record.add(
                    device=device.type,
                    work="filter time",
                    shape=shape,
                    tokens=tokens,
                    case=f"{nats} nats",
                    provider=name,
                    ms=statistics.median(times[name]),
                    ratio=ratio,
                    ratios=ratios,
                    exact_chunks=dense,
                    chunks=filtered + dense,
                    gemms=gemms,
                    entropy=measured,
                    kept_columns=kept,
                )
    print(page_table(record.rows))
    print(
        "CCE's filter: in `python -m pytest bench/bench_gpu_linear.py`, because it needs a GPU; "
        "what CCE runs on a CPU, impl='torch_compile', has no filter"
    )


def bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def rounded_gradients(hidden: Tensor, weight: Tensor, d_logits: Callable[[Tensor], Tensor]) -> Any:
    """Gradients of hidden and weight with every operand and result rounded to bfloat16."""
    hidden, weight = bfloat16(hidden), bfloat16(weight)
    grad = bfloat16(d_logits(bfloat16(hidden @ weight.T)))
    return bfloat16(grad @ weight), bfloat16(grad.T @ hidden)


def measure_errors(data: Text, record: Record) -> None:
    """Relative errors of the gradient of hidden: of its rows, and of their sum over the rows."""
    tokens, size = SIZES[0]
    for nats in ENTROPIES:
        rows = make_rows(data, tokens, size, nats)
        _, (exact, d_weight) = rows.gradients(None)

        def d_logits(logits: Tensor, rows: Rows = rows) -> Tensor:
            leaf = logits.view(*rows.targets.shape, -1).requires_grad_()
            loss = fused_gac_loss(leaf, *rows[2:], mu=0.5, spec=SPEC).loss
            return torch.autograd.grad(loss, leaf)[0].flatten(0, 1)

        plain = GradientFilter(weight=True)
        results = {
            "bfloat16 rounding": rounded_gradients(
                rows.hidden.flatten(0, 1), rows.weight, d_logits
            ),
            "filtered": rows.gradients(plain)[1],
        }
        for name, (hidden, weight) in results.items():
            pairs = {
                "rows": (hidden.view_as(exact), exact),
                "sum": (hidden.view_as(exact).sum((0, 1)), exact.sum((0, 1))),
                "weight": (weight, d_weight),
            }
            errors = {key: float((x - y).norm() / y.norm()) for key, (x, y) in pairs.items()}
            each = (weight - d_weight).norm(dim=1) / d_weight.norm(dim=1).clamp(min=1e-30)
            errors["rows of weight"] = float(each.median())
            print(f"{nats} nats, {name}: " + ", ".join(f"{k} {v:.1e}" for k, v in errors.items()))
            record.add(
                device="cpu",
                work="filter errors",
                shape=f"H={size} V={len(data.weight)} float32",
                tokens=tokens,
                case=f"{nats} nats",
                provider=name,
                **errors,
            )


def measure_training(data: Text, record: Record) -> None:
    """Distance of the weights from the exact run over the distance traveled: SFT with AdamW.

    Trained are the head and a square matrix before it, which receives the gradient of hidden.
    """
    nats = 1.0
    inputs = scale_for(data, nats) * data.hidden
    size = inputs.shape[1]
    draw = torch.Generator().manual_seed(0)

    def ours(settings: GradientFilter | None, hidden: Tensor, weight: Tensor, targets: Tensor):
        leaves = [hidden.requires_grad_(), weight.detach().requires_grad_()]
        keywords: dict[str, Any] = {"spec": SFT, "gradient_filter": settings}
        out = fused_linear_gac_loss(leaves[0][None], leaves[1], targets[None], **keywords)
        return torch.autograd.grad(out.loss, leaves)

    def rounded(hidden: Tensor, weight: Tensor, targets: Tensor):
        def d_logits(logits: Tensor) -> Tensor:
            grad = logits.softmax(-1)
            grad[torch.arange(len(targets)), targets] -= 1
            return grad / len(targets)

        return rounded_gradients(hidden, weight, d_logits)

    def narrow(dtype: torch.dtype, hidden: Tensor, weight: Tensor, targets: Tensor):
        """Instead of a sample: the whole dropped part of dW, with operands rounded to `dtype`."""
        d_hidden, _ = ours(HIDDEN_ONLY, hidden, weight, targets)
        grad = (hidden.detach() @ weight.T).softmax(-1)
        kept = (grad > HIDDEN_ONLY.eps).any(0)
        kept[targets] = True
        grad[torch.arange(len(targets)), targets] -= 1
        dropped = grad.masked_fill(kept, 0)
        scale = dropped.abs().amax(0).clamp(min=1e-30)  # of each column, as float8 needs
        d_weight = (grad - dropped).T @ hidden.detach()
        left, right = (x.to(dtype).float() for x in (dropped / scale, hidden.detach()))
        d_weight += (left.T @ right) * scale[:, None]
        return d_hidden, d_weight / len(targets)

    runs = {
        "exact": partial(ours, None),
        "bfloat16 rounding": rounded,
        "hidden filtered": partial(ours, HIDDEN_ONLY),
        "both filtered": partial(ours, BOTH),
        "rest of dW in bfloat16": partial(narrow, torch.bfloat16),
        "rest of dW in float8": partial(narrow, torch.float8_e4m3fn),
    }
    start = [data.weight, torch.eye(size)]
    weights = {name: [x.clone().requires_grad_() for x in start] for name in runs}
    optimizers = {
        name: torch.optim.AdamW(x, lr=TRAINING_LR, weight_decay=0, fused=True)
        for name, x in weights.items()
    }
    for step in range(1, TRAINING_STEPS + 1):
        chosen = torch.randint(len(inputs), (TRAINING_TOKENS,), generator=draw)
        x, targets = inputs[chosen], data.targets[chosen]
        for name, gradients in runs.items():
            head, matrix = weights[name]
            d_hidden, head.grad = gradients((x @ matrix).detach(), head.detach(), targets)
            matrix.grad = x.T @ d_hidden
            optimizers[name].step()
        if step % (TRAINING_STEPS // 10 or 1) == 0:
            report_distances(weights, start, f"{step} steps at first {nats} nats", record)


def report_distances(
    weights: dict[str, list[Tensor]], start: list[Tensor], case: str, record: Record
) -> None:
    exact = [x.detach() for x in weights["exact"]]
    for name, values in weights.items():
        head, before = (
            float((x.detach() - y).norm() / (y - z).norm())
            for x, y, z in zip(values, exact, start, strict=True)
        )
        print(f"{case}, {name}: head {head:.4f}, before it {before:.4f}", flush=True)
        record.add(
            device="cpu",
            work="filter training",
            shape=f"H={len(exact[1])} V={len(exact[0])} float32",
            tokens=TRAINING_TOKENS,
            case=case,
            provider=name,
            head=head,
            before=before,
        )
    record.save()


PARTS = {"time": measure_time, "errors": measure_errors, "training": measure_training}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.bench_filter", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)}; default: all"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    for name in set(options.parts) - PARTS.keys():
        parser.error(f"part {name!r}: use {', '.join(PARTS)}")
    if options.device == "cuda" and options.parts != ["time"]:
        parser.error("--device cuda: only the part 'time' runs there")
    if options.device == "cpu":
        torch.set_num_threads(1)
    data, device = text(), torch.device(options.device)
    parts = PARTS | {"time": partial(measure_time, device=device)}
    for name in options.parts or PARTS:
        record = Record()
        parts[name](data, record)
        record.save()


if __name__ == "__main__":
    main()
