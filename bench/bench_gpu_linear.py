"""Benchmark of the linear loss on a GPU in bfloat16: our loss, its GEMMs alone, and peers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from gac_kernels import linear_token_logprobs, reference

from .batches import HEADS, SMALL, Batch, Head, linear_batch, scaled
from .linear_losses import (
    COMPILED,
    NAMES,
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
from .settings import DEVICE, tiny
from .smoke import unavailable_reason
from .timing import Step, Timing, first_line, gemm_step, interleave, peak_mib, runnable

pytestmark = pytest.mark.gpu
TOKENS = tiny((2048, 8192, 32768), (2048, 8192))
SECONDS = tiny(4, 0)  # per group of providers, over all rounds
LOGP_TARGET = 2e-4
GRADIENT_LIMIT = 2**-7  # relative, where eager PyTorch does not run
EAGER_LIMIT = 60e9  # bytes; eager PyTorch is skipped if it needs more
GEMMS, HALF, FORWARD = "three GEMMs", "ours, half the rows without gradient", "ours, forward only"
CSRC = "ours, rows by csrc"
LOGPS = "log-probs"
GEMM_TARGETS = {"Qwen2.5-1.5B": 1.15}  # our time relative to the GEMMs; others: 1.08
PEER_TARGETS = "1.3 per token, 1.0 scalar"


def check(
    losses: dict[str, tuple[Loss, bool]], head: Head, dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, Any], dict[str, str]]:
    """Compare each provider with float64.

    Returns the relative errors of the providers that run, and the reason for each skipped one.
    """
    small = linear_batch(SMALL, head, dtype, device)
    accuracy, failed = {}, {}
    for name, (loss, scalar) in losses.items():
        try:
            accuracy[name] = errors(loss, cross_entropy_truth if scalar else truth, small)
        except Exception as error:  # a peer may raise anything; its row says why
            failed[name] = first_line(error)
    for name in {"ours", CSRC, "eager"} & accuracy.keys():
        limit = 1.05 * max(accuracy["eager"][1:]) if "eager" in accuracy else GRADIENT_LIMIT
        if not (worst := max(accuracy[name][1:])) <= limit:
            failed[name] = f"gradients are off by {worst:.1e}, more than {limit:.1e}"
    if "ours" in accuracy:
        accuracy[LOGPS] = [logp_error(small)]
        if not (worst := accuracy[LOGPS][0]) <= LOGP_TARGET:
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
    chosen: Mapping[str, Provider] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, float]:
    """Check, time and record one shape; returns each provider's minimum time in milliseconds.

    Ours is timed together with the GEMMs and saved first. Every other provider then alternates with
    ours and is saved before the next one starts, so that a run that is cut short keeps its earlier
    results.

    chosen: the providers, by name; default: all that run without torch.compile. Without "ours",
    ours is timed only for comparison.
    """
    missing: dict[str, str] = {}
    if chosen is None:
        chosen, missing = providers(device, False)
    accuracy, failed = check(
        {n: (p.loss, p.scalar) for n, p in chosen.items()}, head, dtype, device
    )
    batch = linear_batch(tokens, head, dtype, device)
    if tokens * head.vocab * 24 > EAGER_LIMIT:
        failed |= dict.fromkeys({"eager", COMPILED} & chosen.keys(), "would not fit in memory")
    own = chosen.get("ours", Provider(ours)).loss
    steps: dict[str, Step] = {"ours": lambda: step(own, batch)} if "ours" not in failed else {}
    if "ours" in chosen:
        gemms = {GEMMS: gemm_step(batch.hidden, batch.weight)}
        if steps:
            # with mu = 0, no demonstration has a gradient
            steps[HALF] = lambda: step(own, batch._replace(mu=0.0))
            steps[FORWARD] = lambda: forward_only(batch)
        steps = gemms | steps
    common = {"device": device.type, "work": "linear", "shape": shape, "tokens": tokens}
    common["case"] = "all live"

    def save(name: str, timing: Timing, others: Mapping[str, Timing]) -> None:
        batch.hidden.grad = batch.weight.grad = None
        passes = {FORWARD: 2, HALF: 4}.get(name, 6)  # FLOPs per token, hidden unit and column
        work = passes * tokens * head.hidden * head.vocab
        record.add(
            **common,
            provider=name,
            ms=timing.best,
            median_ms=timing.median,
            rounds=timing.rounds,
            tflops=work / timing.best / 1e9,
            fraction_of_gemms=others[GEMMS].best / timing.best if GEMMS in others else None,
            ours_ms=others["ours"].best if "ours" in others else None,  # in the same rounds
            mib=peak_mib(steps[name], device) - gradients_mib(name, batch),
            scalar=name in chosen and chosen[name].scalar,
            errors=accuracy.get(name),
            logp_error=accuracy[LOGPS][0] if name == "ours" else None,
        )
        record.save()

    steps = runnable(steps, failed)
    timings = interleave(steps, device, seconds) if "ours" in chosen else {}
    for name, timing in timings.items():
        save(name, timing, timings)
    for name in [name for name in chosen if name not in ("ours", *failed)]:
        peer = {name: functools.partial(step, chosen[name].loss, batch)}
        if not runnable(peer, failed):
            continue
        steps |= peer
        pair = interleave({n: steps[n] for n in ("ours", name) if n in steps}, device, seconds)
        timings[name] = pair[name]
        save(name, pair[name], pair)
    for name, reason in (missing | failed).items():
        if name in missing or name in chosen:  # ours, timed for comparison, has a row of its own
            record.add(**common, provider=name, not_run=reason)
    record.save()
    return {name: timing.best for name, timing in timings.items()}


def gradients_mib(name: str, batch: Batch) -> float:
    """Size of the gradients that a step returns, which do not count as extra memory."""
    if name in (GEMMS, FORWARD):
        return 0.0
    return (batch.hidden.nbytes + batch.weight.nbytes) / 2**20


def report(title: str, rows: list[dict[str, Any]]) -> None:
    """Print times and ratios, each with the target if there is one."""
    print(f"\n{title}")
    for row in rows:
        if "not_run" in row:
            print(f"{row['provider']:40} not run: {row['not_run']}")
            continue
        line = f"{row['provider']:40} {row['ms']:9.3f} ms"
        if row["ours_ms"]:
            line += f"   time / ours {row['ms'] / row['ours_ms']:5.2f}"
        if row["provider"] == "ours" and row["fraction_of_gemms"]:
            limit = GEMM_TARGETS.get(row["shape"], 1.08)
            line += f"   time / GEMMs {1 / row['fraction_of_gemms']:.3f} (target {limit})"
        print(line)
    print(f"targets: half without gradient 0.72, peers {PEER_TARGETS}")


PEERS = tuple(name for name in NAMES if name not in ("ours", "eager"))


def linear_providers(device: torch.device) -> tuple[dict[str, Provider], dict[str, str]]:
    """All providers except torch.compile, including our CUDA row kernels."""
    found, missing = providers(device, compiled=False)
    if reason := unavailable_reason("native", device.type):
        missing[CSRC] = reason
    else:
        found[CSRC] = Provider(functools.partial(ours, backend="native"))
    return found, missing


def run(shape: str, tokens: int, chosen: Mapping[str, Provider], record: Record) -> None:
    device, title = torch.device(DEVICE), f"{shape}, {scaled(tokens)} tokens, bfloat16"
    compare(record, device, shape, HEADS[shape], scaled(tokens), chosen=chosen)
    report(title, record.rows)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", HEADS)
def test_ours(shape: str, tokens: int, record: Record) -> None:
    found, _ = linear_providers(torch.device(DEVICE))
    run(shape, tokens, {n: found[n] for n in ("ours", CSRC, "eager") if n in found}, record)


@pytest.mark.parametrize("tokens", TOKENS[:2])
@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize("peer", PEERS)
def test_peer(peer: str, shape: str, tokens: int, record: Record) -> None:
    found, missing = linear_providers(torch.device(DEVICE))
    if peer not in found:
        pytest.skip(f"{peer}: {missing[peer]}")
    run(shape, tokens, {peer: found[peer]}, record)


def test_compiled_eager(record: Record) -> None:
    """Benchmark torch.compile in a single case, because compilation takes a minute."""
    found = providers(torch.device(DEVICE), compiled=True)[0]
    run("Qwen2.5-7B", 8192, {COMPILED: found[COMPILED]}, record)
