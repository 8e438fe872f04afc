"""What large batches hide: launches, the statistics and the controller, CUDA graphs."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import pytest
import torch

from gac import ControllerConfig, GuidedController
from gac_kernels import fused_linear_gac_loss

from .batches import HEADS, linear_batch
from .bench_gpu_logits import backward, eager, fused, make_batch
from .linear_losses import SPEC, step
from .record import Record
from .timing import interleave

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def host_us(run: Callable[[], object], rounds: int = 200) -> float:
    """Median microseconds from the call to the end of its work on the device."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times[rounds // 10 :])


@pytest.mark.parametrize("backend", ["triton", "native"])
def test_launch_overhead(backend: str, record: Record) -> None:
    """256 tokens of 32000 words: no slower than eager PyTorch."""
    batch = make_batch(256, 32000, torch.bfloat16, DEVICE)
    runs = {"eager": eager, f"ours, {backend}": functools.partial(fused, backend=backend)}
    times = {name: host_us(lambda loss=loss: backward(loss, batch)) for name, loss in runs.items()}
    for name, microseconds in times.items():
        print(f"{name:20} {microseconds:8.1f} us")
        record.add(
            device="cuda", work="launch", shape="V=32000", tokens=256, provider=name,
            case="loss + gradient", ms=microseconds / 1e3,
        )  # fmt: skip


@pytest.mark.parametrize("backend", ["triton", "native"])
def test_cuda_graph(backend: str, record: Record) -> None:
    """The whole loss and backward in one graph; a replay on other logits gives their loss."""
    batch = make_batch(512, 32000, torch.bfloat16, DEVICE)
    run = functools.partial(fused, backend=backend)
    side = torch.cuda.Stream()
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
    assert replayed[0] == expected[0] and torch.equal(replayed[1], expected[1])
    record.add(
        device="cuda", work="graph", shape="V=32000", tokens=512, provider=f"ours, {backend}",
        case="replay", ms=host_us(graph.replay) / 1e3,
    )  # fmt: skip


@pytest.mark.parametrize("tokens", [2048, 4096, 8192])
def test_statistics_and_controller(tokens: int, record: Record) -> None:
    """Their time as a share of the loss with a 7B head, one update on the host included."""
    batch = linear_batch(tokens, HEADS["Qwen2.5-7B"], torch.bfloat16, DEVICE)

    def loss(moments: bool) -> Callable[..., torch.Tensor]:
        return lambda b: fused_linear_gac_loss(
            b.hidden, b.weight, b.targets, b.advantages, b.is_demo, mu=b.mu, spec=SPEC,
            moments=moments,
        ).loss  # fmt: skip

    steps = {
        "with moments": lambda: step(loss(True), batch),
        "without moments": lambda: step(loss(False), batch),
    }
    times = interleave(steps, DEVICE, seconds=4)
    out = fused_linear_gac_loss(
        batch.hidden, batch.weight, batch.targets, batch.advantages, batch.is_demo, spec=SPEC
    )
    controller = GuidedController(ControllerConfig())
    update = host_us(lambda: controller.update(signals=out.moments.signals(), kl=0.01)) / 1e3
    plain = times["without moments"].best
    extra = times["with moments"].best - plain
    print(f"\n{tokens} tokens: moments {extra:.3f} ms, signals and update {update:.3f} ms, "
          f"{100 * (extra + update) / plain:.2f} % of the loss (target 0.1 %)")  # fmt: skip
    for name, ms in (("loss", plain), ("moments", extra), ("signals and update", update)):
        record.add(
            device="cuda", work="statistics", shape="Qwen2.5-7B", tokens=tokens, provider=name,
            case="", ms=ms, fraction_of_loss=ms / plain,
        )  # fmt: skip
