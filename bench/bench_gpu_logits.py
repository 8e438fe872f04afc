"""Benchmark of the logits-level loss on a GPU: ours and peers, relative to the copy bandwidth."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Container
from unittest import mock

import pytest
import torch
from torch import Tensor

from gac_kernels import fused_gac_loss, reference, token_logprobs
from gac_kernels.backends import cuda

from .batches import HEADS, LENGTH, SMALL, Batch, peaked_logits, scaled
from .linear_losses import SPEC, mixed_loss
from .record import Record
from .row_case import row_case
from .settings import DEVICE, tiny
from .smoke import unavailable_reason
from .timing import Step, copy_bandwidth, first_line, interleave, peak_mib, runnable

pytestmark = pytest.mark.gpu
TOKENS = (2048, 8192)
BACKENDS = {"ours, Triton": "triton", "ours, csrc": "native"}
SECONDS = tiny(3, 0)
TRL = "TRL log-softmax and entropy"
# (blocks, tiles) to compare; with nine tiles per block, three blocks fit on a multiprocessor
SPLITS = ((2, 28), (4, 14), (4, 28), (8, 7), (8, 9), (8, 14), (8, 28))
SPLIT_CASES = {  # dtypes of logits and gradient, rows: as in a trainer, and as in the chunked head
    "bfloat16": ((torch.bfloat16, torch.bfloat16), 8192),
    "float32 to bfloat16": ((torch.float32, torch.bfloat16), 1408),
}


def make_batch(tokens: int, vocab: int, dtype: torch.dtype, device: torch.device) -> Batch:
    """A batch with the logits [B, T, V], a leaf tensor, as `hidden`, and an empty `weight`."""
    logits = peaked_logits(tokens, vocab, dtype, device)
    g = torch.Generator(device).manual_seed(2)
    targets = torch.randint(vocab, logits.shape[:2], device=device, generator=g)
    # half of the targets are the most likely token
    targets = torch.where(targets % 2 == 0, logits.argmax(-1), targets)
    sequences = tokens // LENGTH
    return Batch(
        logits.requires_grad_(),
        torch.empty(0, device=device),
        targets,
        torch.randn(sequences, device=device, generator=g),
        torch.arange(sequences, device=device) % 2 == 1,
        0.5,
    )


def fused(batch: Batch, backend: str, overwrite: bool = False) -> Tensor:
    return fused_gac_loss(
        batch.hidden,
        batch.targets,
        batch.advantages,
        batch.is_demo,
        mu=batch.mu,
        spec=SPEC,
        overwrite=overwrite,
        backend=backend,
    ).loss


def eager(batch: Batch) -> Tensor:
    log_probs = batch.hidden.float().log_softmax(-1)
    with torch.no_grad():
        (log_probs.exp() * log_probs).sum(-1).neg()
    return mixed_loss(log_probs.gather(-1, batch.targets[..., None]).squeeze(-1), batch)


def trl(batch: Batch) -> Tensor:
    module = importlib.import_module("trl.kernels.logprob_entropy")
    logps, _ = module.selective_log_softmax_and_entropy(batch.hidden, batch.targets)
    return mixed_loss(logps, batch)


def backward(loss: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
    batch.hidden.grad = None
    value = loss(batch)
    value.backward()
    return value.detach()


def losses(device: torch.device) -> tuple[dict[str, Callable[[Batch], Tensor]], dict[str, str]]:
    """The losses that run on `device`, ours first, and why the others do not run."""
    runnable_losses: dict[str, Callable[[Batch], Tensor]] = {}
    missing = {}
    for title, name in BACKENDS.items():
        if reason := unavailable_reason(name, device.type):
            missing[title] = reason
            continue
        runnable_losses[title] = functools.partial(fused, backend=name)
        runnable_losses[f"{title}, overwrite"] = functools.partial(
            fused, backend=name, overwrite=True
        )
    runnable_losses["eager"] = eager
    try:
        importlib.import_module("trl.kernels.logprob_entropy")
    except (ImportError, RuntimeError) as error:
        missing[TRL] = str(error)
    else:
        runnable_losses[TRL] = trl
    return runnable_losses, missing


def find_error(loss: Callable[[Batch], Tensor], batch: Batch) -> str | None:
    """How the loss or the gradient differs from float64, or None if both are accurate."""
    exact = batch._replace(hidden=batch.hidden.detach().double().requires_grad_())
    expected = reference.fused_gac_loss(
        exact.hidden, exact.targets, exact.advantages, exact.is_demo, mu=exact.mu, spec=SPEC
    ).loss
    expected.backward()
    ours = batch._replace(hidden=batch.hidden.detach().clone().requires_grad_())
    try:
        value = backward(loss, ours)
    except Exception as error:  # a peer may raise anything; its row says why
        return first_line(error)
    if not abs(value.item() - expected.item()) <= 1e-4 * abs(expected.item()):
        return f"the loss is {value.item()}, not {expected.item()}"
    grad, exact_grad = ours.hidden.grad.double(), exact.hidden.grad
    relative_error = (grad - exact_grad).norm() / exact_grad.norm()
    return None if relative_error <= 2**-8 else f"the gradient is off by {relative_error:.1e}"


def compare(
    record: Record,
    device: torch.device,
    shape: str,
    tokens: int,
    vocab: int,
    bandwidth: float,
    seconds: float = SECONDS,
    dtype: torch.dtype = torch.bfloat16,
    chosen: Container[str] | None = None,
) -> dict[str, float]:
    """Check, time and record losses; returns minimum times in milliseconds.

    Each group of providers (a copy with both of our backends, then each other loss) is saved before
    the next one starts, so that a run that is cut short keeps its earlier results.

    bandwidth: of a copy, in GB/s. chosen: names of losses; default: all.
    """
    found, missing = losses(device)
    found = {name: loss for name, loss in found.items() if chosen is None or name in chosen}
    small = make_batch(SMALL, vocab, dtype, device)
    for name in list(found):
        if reason := find_error(found[name], small):
            del found[name]
            missing[name] = reason
            print(f"{name} is skipped: {reason}")
    batch = make_batch(tokens, vocab, dtype, device)
    # to restore overwritten logits, outside the timed region
    source = batch.hidden.detach().clone()
    destination = torch.empty_like(source)
    steps: dict[str, Step] = {
        name: functools.partial(backward, loss, batch) for name, loss in found.items()
    }
    for title, backend in BACKENDS.items():
        if title in found:
            steps[f"{title}, forward only"] = functools.partial(forward_only, batch, backend)
    groups: dict[str, dict[str, Step]] = {"copy": {"copy": lambda: destination.copy_(source)}}
    for name, step in steps.items():
        own = next((title for title in BACKENDS if name.startswith(title)), name)
        groups.setdefault(own, {})[name] = step
    for title in BACKENDS:
        groups["copy"] |= groups.pop(title, {})

    def restore(_: str) -> None:
        # for every provider: the next one must not get a gradient as its logits
        batch.hidden.data.copy_(source)

    common = {"device": device.type, "work": "logits", "shape": shape, "tokens": tokens}
    best = {}
    for group in groups.values():
        group = runnable(group, missing)
        timings = interleave(group, device, seconds, prepare=restore) if group else {}
        for name, timing in timings.items():
            best[name] = timing.best
            passes = 1 if "forward" in name else 2
            used = passes * source.nbytes / timing.best / 1e6  # GB/s if every byte moves once
            restore(name)
            batch.hidden.grad = None  # it would count as memory in use before the step
            record.add(
                **common,
                provider=name,
                case="forward" if passes == 1 else "loss + gradient",
                ms=timing.best,
                median_ms=timing.median,
                rounds=timing.rounds,
                gbs=used,
                fraction_of_copy=used / bandwidth,
                mib=peak_mib(group[name], device),
            )
        record.save()
    for name, reason in missing.items():
        if chosen is None or name in chosen:
            record.add(**common, provider=name, case="loss + gradient", not_run=reason)
    record.save()
    return best


def forward_only(batch: Batch, backend: str) -> None:
    with torch.no_grad():
        token_logprobs(batch.hidden, batch.targets, backend=backend)


def run(shape: str, tokens: int, record: Record, chosen: Container[str]) -> None:
    device = torch.device(DEVICE)
    bandwidth = copy_bandwidth(device)
    vocab, tokens = HEADS[shape].vocab, scaled(tokens)
    best = compare(record, device, shape, tokens, vocab, bandwidth, chosen=chosen)
    bound = 2 * tokens * vocab / bandwidth / 1e6  # ms for one pass over the logits in bfloat16
    print(f"\n{shape}, {tokens} tokens; a copy runs at {bandwidth:.0f} GB/s")
    for name, ms in best.items():
        print(f"{name:32} {ms:8.3f} ms   {ms / bound:5.2f} passes at copy bandwidth")
    print("targets: Triton 3 / 0.85 = 3.53 passes, csrc 2 / 0.85 = 2.35, forward 1 / 0.9 = 1.11")


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", HEADS)
def test_ours(shape: str, tokens: int, record: Record) -> None:
    run(
        shape,
        tokens,
        record,
        [*(f"{b}{o}" for b in BACKENDS for o in ("", ", overwrite")), "eager"],
    )


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", list(HEADS)[:2])
def test_peer(shape: str, tokens: int, record: Record) -> None:
    """Benchmarks TRL, the only peer that computes log-probs of given logits."""
    run(shape, tokens, record, [TRL])


@pytest.mark.parametrize("case", SPLIT_CASES)
def test_row_splits(case: str, record: Record) -> None:
    """Compare the splits that `cuda.split` chooses from: blocks per row, tiles per block."""
    shape = "Qwen2.5-7B"
    device = torch.device(DEVICE)
    if reason := cuda.unavailable(device, torch.float32) or unavailable_reason("native", DEVICE):
        pytest.skip(reason)
    dtypes, rows = SPLIT_CASES[case]
    run = row_case(cuda, rows, HEADS[shape].vocab, *dtypes, device)
    failed: dict[str, str] = {}
    steps = runnable(splits(run, HEADS[shape].vocab, dtypes[0]), failed)
    nbytes = rows * HEADS[shape].vocab * sum(t.itemsize for t in dtypes)
    common = {"device": DEVICE, "work": "splits", "shape": shape, "tokens": rows, "case": case}
    for name, timing in interleave(steps, device, SECONDS).items():
        bandwidth_used = nbytes / timing.best / 1e6
        print(f"{name:24} {timing.best:8.3f} ms {bandwidth_used:6.0f} GB/s")
        record.add(
            **common,
            provider=name,
            ms=timing.best,
            median_ms=timing.median,
            rounds=timing.rounds,
            gbs=bandwidth_used,
        )
    record.save()
    for name, reason in failed.items():
        record.add(**common, provider=name, not_run=reason)


def splits(run: Step, vocab: int, dtype: torch.dtype) -> dict[str, Step]:
    """Functions that call `run` with a fixed split, by name; only those that fit `vocab` logits."""

    def with_split(split: cuda.Split) -> None:
        with mock.patch.object(cuda, "split", lambda *_, **__: split):
            run()

    return {
        f"{blocks} blocks x {tiles} tiles": functools.partial(with_split, cuda.Split(blocks, tiles))
        for blocks, tiles in SPLITS
        if vocab * dtype.itemsize / blocks + 16 <= tiles * 8192
    }
