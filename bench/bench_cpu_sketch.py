"""CPU time that the head sketch adds to the linear loss, measured in alternating runs."""

from __future__ import annotations

import statistics
import time

import torch

from gac.evaluation.estimates import bootstrap_interval
from gac_kernels import HeadSketch, fused_linear_gac_loss

from .batches import Batch, Head, linear_batch
from .linear_losses import SPEC
from .record import Record

N, HEAD = 1024, Head(512, 32000)
ROUNDS = 12
TARGET = 0.02


def seconds(batch: Batch, sketch: HeadSketch | None) -> float:
    """CPU time of one forward and backward pass."""
    batch.hidden.grad = batch.weight.grad = None
    start = time.process_time()
    fused_linear_gac_loss(
        batch.hidden,
        batch.weight,
        batch.targets,
        batch.advantages,
        batch.is_demo,
        mu=batch.mu,
        spec=SPEC,
        sketch=sketch,
    ).loss.backward()
    return time.process_time() - start


def test_cpu_sketch(benchmark, record: Record) -> None:
    batch = linear_batch(N, HEAD, torch.float32, torch.device("cpu"))
    for sketch in (None, HeadSketch()):
        seconds(batch, sketch)  # to warm up
    overheads = []
    for round_number in range(ROUNDS):
        order = (None, HeadSketch()) if round_number % 2 else (HeadSketch(), None)
        seconds_of = {sketch: seconds(batch, sketch) for sketch in order}
        overheads.append(seconds_of[HeadSketch()] / seconds_of[None] - 1)
    overhead, (low, high) = statistics.mean(overheads), bootstrap_interval(overheads)
    print(f"\nthe head sketch adds {overhead:.2%} [{low:.2%}, {high:.2%}], target {TARGET:.0%}")
    record.add(
        device="cpu",
        work="sketch",
        shape=f"H={HEAD.hidden} V={HEAD.vocab} float32",
        tokens=N,
        case="all live",
        provider="ours",
        share=overhead,
        share_ci95=[low, high],
        rounds=ROUNDS,
    )
    benchmark.extra_info |= {"share": overhead, "ci95": [low, high]}
    benchmark.pedantic(lambda: seconds(batch, HeadSketch()), rounds=1)
