"""Benchmark of the linear loss on a GPU in bfloat16: ours, its three GEMMs, and installed peers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from gac_kernels import linear_token_logprobs, reference

from .batches import HEADS, Batch, Head, linear_batch
from .linear_losses import (
    Loss,
    Provider,
    cross_entropy_truth,
    errors,
    ours,
    providers,
    step,
    truth,
)
from .record import Record
from .smoke import unavailable_reason
from .timing import Step, first_line, gemm_step, interleave, peak_mib, runnable

pytestmark = pytest.mark.gpu
TOKENS = (2048, 8192, 32768)
SECONDS = 5  # per case, over all rounds
LOGP_TARGET = 2e-4
GRADIENT_LIMIT = 2**-7  # relative, where eager PyTorch does not run
EAGER_LIMIT = 60e9  # bytes; eager PyTorch is skipped if it needs more
GEMMS, HALF, FORWARD = "three GEMMs", "ours, half the rows without gradient", "ours, forward only"
CSRC = "ours, rows by csrc"
TARGETS = {  # our time relative to the others
    GEMMS: ("at most", 1.08),
    "per token": ("at most", 1 / 1.3),
    "scalar": ("at most", 1.0),
}


def check(losses: dict[str, tuple[Loss, bool]], small: Batch) -> tuple[dict[str, Any], dict]:
    """Relative errors against float64 of the providers that run, and why others are not timed."""
    accuracy, failed = {}, {}
    for name, (loss, scalar) in losses.items():
        try:
            accuracy[name] = errors(loss, cross_entropy_truth if scalar else truth, small)
        except Exception as error:
            failed[name] = first_line(error)
    for name in {"ours", CSRC, "eager"} & accuracy.keys():
        limit = 1.05 * max(accuracy["eager"][1:]) if "eager" in accuracy else GRADIENT_LIMIT
        if not (worst := max(accuracy[name][1:])) <= limit:
            failed[name] = f"gradients are off by {worst:.1e}, more than {limit:.1e}"
    if "ours" in accuracy and not (worst := logp_error(small)) <= LOGP_TARGET:
        failed["ours"] = f"log-probs are off by {worst:.1e}, more than {LOGP_TARGET:.0e}"
    for name, reason in failed.items():
        print(f"{name} is skipped: {reason}")
    return accuracy, failed


def logp_error(batch: Batch) -> float:
    """Largest error of our log-probs against float64 on the same inputs."""
    with torch.no_grad():
        logps, _ = linear_token_logprobs(batch.hidden, batch.weight, batch.targets)
        exact, _ = reference.linear_token_logprobs(
            batch.hidden.double(), batch.weight.double(), batch.targets
        )
    return (logps - exact).abs().max().item()


def forward_only(batch: Batch) -> None:
    with torch.no_grad():
        ours(batch)


def compare(
    record: Record,
    device: torch.device,
    shape: str,
    head: Head,
    tokens: int,
    seconds: float = SECONDS,
    compiled: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, float]:
    """Check, time and record one shape; returns each provider's minimum time in milliseconds."""
    runnable_peers, missing = providers(device, compiled)
    if reason := unavailable_reason("native", device.type):
        missing[CSRC] = reason
    else:
        runnable_peers[CSRC] = Provider(functools.partial(ours, backend="native"))
    small = linear_batch(512, head, dtype, device)
    accuracy, failed = check({n: (p.loss, p.scalar) for n, p in runnable_peers.items()}, small)
    logp = logp_error(small) if "ours" not in failed else None
    del small

    batch = linear_batch(tokens, head, dtype, device)
    if tokens * head.vocab * 24 > EAGER_LIMIT:
        failed |= dict.fromkeys(["eager", "torch.compile"], "would not fit in memory")
    steps: dict[str, Step] = {GEMMS: gemm_step(batch.hidden, batch.weight)}
    steps |= {
        name: lambda loss=p.loss: step(loss, batch)
        for name, p in runnable_peers.items()
        if name not in failed
    }
    if "ours" in steps:
        # with mu = 0, no demonstration has a gradient
        steps[HALF] = lambda: step(ours, batch._replace(mu=0.0))
        steps[FORWARD] = lambda: forward_only(batch)
    timings = interleave(runnable(steps, failed), device, seconds)
    flops = 6 * tokens * head.hidden * head.vocab
    common = {"device": device.type, "work": "linear", "shape": shape, "tokens": tokens}
    common["case"] = "all live"
    for name, timing in timings.items():
        batch.hidden.grad = batch.weight.grad = None
        record.add(
            **common,
            provider=name,
            ms=timing.best,
            median_ms=timing.median,
            rounds=timing.rounds,
            tflops=(1 / 3 if name == FORWARD else 1) * flops / timing.best / 1e9,
            fraction_of_gemms=timings[GEMMS].best / timing.best if GEMMS in timings else None,
            mib=peak_mib(steps[name], device) - gradients_mib(name, batch),
            scalar=name in runnable_peers and runnable_peers[name].scalar,
            errors=accuracy.get(name),
            logp_error=logp if name == "ours" else None,
        )
    for name, reason in (missing | failed).items():
        record.add(**common, provider=name, not_run=reason)
    return {name: timing.best for name, timing in timings.items()}


def gradients_mib(name: str, batch: Batch) -> float:
    """Size of the gradients that a step returns, which do not count as extra memory."""
    if name in (GEMMS, FORWARD):
        return 0.0
    return (batch.hidden.nbytes + batch.weight.nbytes) / 2**20


def report(title: str, best: dict[str, float], scalar: set[str]) -> None:
    print(f"\n{title}")
    if not {"ours", GEMMS, HALF} <= best.keys():
        print(f"nothing to compare; these ran: {', '.join(best)}")
        return
    ours_ms = best["ours"]
    for name, ms in best.items():
        print(f"{name:40} {ms:9.3f} ms   time / ours {ms / ours_ms:5.2f}")
    print(
        f"ours / GEMMs {ours_ms / best[GEMMS]:.3f} (target 1.08), half without gradient / all "
        f"{best[HALF] / ours_ms:.3f} (target 0.72)"
    )
    for name in best.keys() - {GEMMS, HALF, CSRC, FORWARD, "ours", "eager"}:
        kind = "scalar" if name in scalar else "per token"
        print(f"ours / {name}: {ours_ms / best[name]:.3f} (target {TARGETS[kind][1]:.2f})")


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", HEADS)
def test_linear(shape: str, tokens: int, record: Record) -> None:
    device = torch.device("cuda")
    compiled = shape == "Qwen2.5-7B" and tokens == 8192  # only one case: compiling takes a minute
    best = compare(record, device, shape, HEADS[shape], tokens, compiled=compiled)
    scalar = {name for name, p in providers(device, False)[0].items() if p.scalar}
    report(f"{shape}, {tokens} tokens, bfloat16", best, scalar)
