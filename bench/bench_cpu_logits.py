"""Benchmark of the logits-level loss on the CPU: log-probs, entropy, both losses, the gradient.

Ours, eager PyTorch and torch.compile do the same work and alternate within each round, so that
changes in machine load affect all of them; ratios compare the minima.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gac_kernels import fused_gac_loss
from gac_kernels.backends import cpu

from .record import Record
from .timing import interleave

N, V, SEQUENCES = 1024, 32000, 8
SECONDS = 12  # in total, over all rounds
TARGETS = {"ours": {"eager": 4.0, "compile": 1.5}, "ours, overwrite": {"eager": 10.0}}


def make_batch() -> tuple[Tensor, ...]:
    """Return peaked logits [B, T, V], the targets, the advantages and is_demo."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(SEQUENCES, N // SEQUENCES, V, generator=generator)
    targets = torch.randint(V, logits.shape[:2], generator=generator)
    logits.scatter_add_(-1, targets[..., None], 12 * torch.rand(*targets.shape, 1))
    advantages = torch.randn(SEQUENCES, generator=generator)
    return logits, targets, advantages, torch.arange(SEQUENCES) % 2 == 1


def eager_loss(
    logits: Tensor, targets: Tensor, advantages: Tensor, is_demo: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute loss, logps and entropy in eager PyTorch, as trainers do.

    The loss is the clipped policy term on rollouts and CHORD's phi-weighted term on demonstrations.
    """
    log_probs = logits.log_softmax(-1)
    logps = log_probs.gather(-1, targets[..., None]).squeeze(-1)
    with torch.no_grad():
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    p, ratio = logps.detach().exp(), (logps - logps.detach()).exp()
    a, demo = advantages[:, None], is_demo[:, None]
    rollout = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)
    per_token = torch.where(demo, -p * (1 - p) * logps, rollout)
    return per_token.sum() / N, logps.detach(), entropy  # mu = 1/2 of two means over N / 2 tokens


def step(loss: Callable[..., tuple[Tensor, ...]], leaf: Tensor, *batch: Tensor) -> list[Tensor]:
    """Forward and backward pass; returns loss, logps and entropy."""
    leaf.grad = None
    value, logps, entropy = loss(leaf, *batch)
    value.backward()
    return [value.detach(), logps, entropy]


def test_cpu_logits(benchmark, record: Record, mapped_memory: bool) -> None:
    if reason := cpu.unavailable(torch.device("cpu"), torch.float32):
        pytest.skip(f"native backend: {reason}")
    logits, *batch = make_batch()

    def fused(overwrite: bool) -> Callable[..., tuple[Tensor, ...]]:
        def loss(*inputs: Tensor) -> tuple[Tensor, ...]:
            out = fused_gac_loss(*inputs, mu=0.5, overwrite=overwrite, backend="native")
            return out.loss, out.logps, out.entropy

        return loss

    losses = {
        "eager": eager_loss,
        "compile": torch.compile(eager_loss),
        "ours": fused(False),
        "ours, overwrite": fused(True),
    }
    exact_leaf = logits.double().requires_grad_()
    truth = step(eager_loss, exact_leaf, *batch)
    steps = {}
    for name, loss in losses.items():  # check correctness first; this also compiles
        leaf = logits.clone().requires_grad_()
        for value, expected in zip(step(loss, leaf, *batch), truth, strict=True):
            torch.testing.assert_close(value.double(), expected, rtol=2e-6, atol=5e-5)
        torch.testing.assert_close(leaf.grad.double(), exact_leaf.grad, rtol=1e-4, atol=1e-7)
        steps[name] = lambda loss=loss, leaf=leaf: step(loss, leaf, *batch)
    del truth, exact_leaf

    times = interleave(steps, torch.device("cpu"), SECONDS)
    benchmark.extra_info |= {
        "shape": f"[{N}, {V}] float32",
        "threads": torch.get_num_threads(),
        "capability": cpu.capability(),
        "page faults avoided": mapped_memory,
    }
    print(f"\n[{N}, {V}] float32, {torch.get_num_threads()} threads, {cpu.capability()}")
    for name, timing in times.items():
        ratio = times["eager"].best / timing.best
        print(f"{name:16} {timing.best:8.1f} ms   speedup over eager {ratio:5.2f}")
        benchmark.extra_info[f"{name} ms"] = round(timing.best, 2)
        record.add(
            device="cpu",
            work="logits",
            shape=f"V={V} float32",
            tokens=N,
            provider=name,
            case="loss + gradient",
            ms=timing.best,
            median_ms=timing.median,
            rounds=timing.rounds,
        )
    for name, targets in TARGETS.items():
        for peer, target in targets.items():
            ratio = times[peer].best / times[name].best
            print(f"{peer} / {name}: {ratio:.2f}, target {target}")
            benchmark.extra_info[f"{peer} / {name}"] = {"ratio": ratio, "target": target}
    benchmark.pedantic(steps["ours, overwrite"], rounds=5, warmup_rounds=1)
