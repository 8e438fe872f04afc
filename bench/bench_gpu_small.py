"""Benchmark of costs that large batches hide: launches, statistics, controller, CUDA graphs."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import pytest
import torch

from gac import ControllerConfig, GuidedController
from gac_kernels import backends, fused_linear_gac_loss
from gac_kernels.tokens import BatchInputs, TokenTerms

from . import settings
from .batches import HEADS, Batch, linear_batch, scaled
from .bench_gpu_logits import backward, eager, fused, make_batch
from .linear_losses import SPEC, ours, step
from .record import Record
from .settings import tiny
from .smoke import unavailable_reason
from .timing import Step, interleave

pytestmark = pytest.mark.gpu
DEVICE = torch.device(settings.DEVICE)
REPEATS = tiny(50, 1)
VOCAB = tiny(32000, 50)
BACKENDS = "triton", "native"


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def needs_graphs() -> None:
    if DEVICE.type != "cuda":
        pytest.skip("needs CUDA graphs")


def host_us(run: Callable[[], object], rounds: int = tiny(200, 10)) -> float:
    """Median time from the call to the end of its work on the device, in microseconds."""
    times = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times[rounds // 10 :])


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if reason := unavailable_reason(request.param, DEVICE.type):
        pytest.skip(f"{request.param} backend: {reason}")
    return request.param


def test_launch_overhead(record: Record) -> None:
    """Time one loss of 256 tokens, V = 32000, in turn. Target: no slower than eager PyTorch."""
    batch = make_batch(scaled(256), VOCAB, torch.bfloat16, DEVICE)
    losses = {"eager": eager} | {
        f"ours, {backend}": functools.partial(fused, backend=backend)
        for backend in BACKENDS
        if not unavailable_reason(backend, DEVICE.type)
    }
    samples: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(10):
        for name, loss in losses.items():
            samples[name].append(host_us(lambda loss=loss: backward(loss, batch), tiny(20, 1)))
    times = {name: statistics.median(values) for name, values in samples.items()}
    for name, microseconds in times.items():
        print(f"{name:20} {microseconds:8.1f} us")
        record.add(
            device=DEVICE.type,
            work="launch",
            shape=f"V={VOCAB}",
            tokens=256,
            provider=name,
            case="loss + gradient",
            ms=microseconds / 1e3,
        )


def test_cuda_graph(backend: str, record: Record) -> None:
    """Capture loss and backward pass in one graph; check and time its replay on other logits."""
    needs_graphs()
    batch = make_batch(512, VOCAB, torch.bfloat16, DEVICE)
    run = functools.partial(fused, backend=backend)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            backward(run, batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    batch.hidden.grad = None
    with torch.cuda.graph(graph):
        loss = run(batch)
        loss.backward()
    captured = batch.hidden.grad
    with torch.no_grad():
        batch.hidden.mul_(0.5)
    graph.replay()
    replayed = loss.item(), captured.clone()
    expected = backward(run, batch).item(), batch.hidden.grad
    assert replayed[0] == expected[0]
    assert torch.equal(replayed[1], expected[1])
    record.add(
        device=DEVICE.type,
        work="graph",
        shape=f"V={VOCAB}",
        tokens=512,
        provider=f"ours, {backend}",
        case="replay",
        ms=host_us(graph.replay) / 1e3,
    )


def reductions(batch: Batch) -> Callable[[], object]:
    """A graph of REPEATS reductions over all tokens; a single one is too short to time."""
    triton = backends.load("triton", DEVICE)
    inputs = BatchInputs(batch.targets, batch.advantages, batch.is_demo, batch.mu)
    tokens = triton.plan(inputs, SPEC)
    terms = TokenTerms(*(-torch.rand(batch.tokens, device=DEVICE) for _ in TokenTerms._fields))
    triton.reduce(tokens, terms, True)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            triton.reduce(tokens, terms, True)

    def replay() -> object:
        graph.replay()
        return tokens, terms  # keeps them alive: the graph reads them by address

    return replay


@pytest.mark.parametrize("tokens", [2048, 4096, 8192])
def test_statistics_and_controller(tokens: int, record: Record) -> None:
    """Time the statistics and the controller per step, relative to the time of a 7B head's loss.

    Signals are read once every `update_every` steps; the other updates do not read them.
    """
    needs_graphs()
    batch = linear_batch(tokens, HEADS["Qwen2.5-7B"], torch.bfloat16, DEVICE)
    steps: dict[str, Step] = {"loss": lambda: step(ours, batch)}
    steps["reduce"] = reductions(batch)
    times = {name: timing.best for name, timing in interleave(steps, DEVICE, seconds=4).items()}
    extra = times["reduce"] / REPEATS  # the kernels that sum the loss compute the statistics too

    out = fused_linear_gac_loss(
        batch.hidden,
        batch.weight,
        batch.targets,
        batch.advantages,
        batch.is_demo,
        mu=batch.mu,
        spec=SPEC,
    )
    config = ControllerConfig()
    controller = GuidedController(config)
    refresh = host_us(lambda: controller.update(signals=out.moments.signals(), kl=0.01)) / 1e3
    plain = host_us(lambda: controller.update(kl=0.01)) / 1e3
    update = (refresh + (config.update_every - 1) * plain) / config.update_every
    print(
        f"\n{tokens} tokens: sums and moments {extra:.4f} ms, controller {update:.4f} ms per step "
        f"(refresh {refresh:.4f}), {100 * (extra + update) / times['loss']:.2f}% of the loss "
        f"(target 0.1%)"
    )
    for name, ms in (
        ("loss", times["loss"]),
        ("sums and moments", extra),
        ("controller", update),
        ("signals and update", refresh),
    ):
        record.add(
            device=DEVICE.type,
            work="statistics",
            shape="Qwen2.5-7B",
            tokens=tokens,
            provider=name,
            case="",
            ms=ms,
            fraction_of_loss=ms / times["loss"],
        )
