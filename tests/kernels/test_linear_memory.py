"""Peak memory of the chunked head."""

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gac_kernels import (
    LossSpec,
    fused_linear_divergence,
    fused_linear_gac_loss,
    fused_linear_token_loss,
    linear_token_logprobs,
    projection,
    tokens,
)


class PeakMemory(TorchDispatchMode):
    """Tracks the peak number of bytes of live tensors that were created under this mode."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
        input_storages = {x.untyped_storage()._cdata for x in inputs}
        for x in tree_leaves(out):
            if not torch.is_tensor(x):
                continue
            storage = x.untyped_storage()
            if storage._cdata not in input_storages:
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.storages = {k: v for k, v in self.storages.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
        return out


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen weight", "weight"])
def test_logits_of_one_chunk_live_at_a_time(frozen: bool) -> None:
    """Chunks of 44, 43 and 43 rows share a buffer, freed before the gradients are rounded."""
    hidden = torch.randn(1, 130, 64, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(503, 64, dtype=torch.bfloat16, requires_grad=not frozen)
    batch = torch.randint(503, (1, 130)), torch.ones(1), torch.tensor([False])
    with PeakMemory() as memory:
        fused_linear_gac_loss(hidden, weight, *batch, chunk_bytes=64 * 503 * 4, mu=0.5)
    # the weight in float32, its gradient, and the logits
    lower_bound = 4 * weight.numel() * (1 if frozen else 2) + 44 * 503 * 4
    # slack for per-token vectors and rows of hidden
    assert lower_bound <= memory.peak <= lower_bound + 60_000


def test_a_buffer_is_freed_before_a_larger_one_is_allocated() -> None:
    """A chunk of 43 rows with a gradient comes before one of 128 rows without."""
    hidden = torch.randn(2, 128, 64, requires_grad=True)
    weight = torch.randn(503, 64)
    targets = torch.randint(503, (2, 128))
    targets[0, 43:] = -100
    batch = targets, torch.tensor([1.0, 0.0]), torch.tensor([False, False])
    with PeakMemory() as memory:
        fused_linear_gac_loss(hidden, weight, *batch, chunk_bytes=64 * 503 * 4, mu=0.5)
    chunk_bytes = 64 * 503 * 4
    assert chunk_bytes <= memory.peak - hidden.nbytes <= chunk_bytes + 60_000


class Allocator:
    """Simulates an allocator without room for larger buffers of logits than `limit` bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
        self.limit, self.refused, self.granted = limit, 0, 0
        rows = projection.Buffer.rows

        def allocate(buffer: projection.Buffer, count: int, most: int) -> torch.Tensor:
            size = count * buffer.width * buffer.dtype.itemsize
            if size > self.limit:
                self.refused += 1
                raise torch.OutOfMemoryError(f"no room for {size} bytes")
            self.granted += 1
            return rows(buffer, count, most)

        monkeypatch.setattr(projection.Buffer, "rows", allocate)


V = 503


def calls() -> dict[str, Callable[..., torch.Tensor]]:
    """Every function of a head: a number from hidden and weight, given `chunk_bytes`."""
    g = torch.Generator().manual_seed(0)
    targets, teacher = torch.randint(V, (2, 300), generator=g), torch.randn(V, 4, generator=g)
    advantages, is_demo = torch.tensor([1.0, -1.0]), torch.tensor([False, False])

    def token_loss(logps: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return -logps * entropy

    return {
        "loss": lambda x, w, **k: (
            fused_linear_gac_loss(x, w, targets, advantages, is_demo, mu=0.5, **k).loss
        ),
        "two passes": lambda x, w, **k: (
            fused_linear_gac_loss(
                x,
                w,
                targets,
                advantages,
                old_logps=torch.full((2, 300), -6.0),
                spec=LossSpec(importance_sampling_level="sequence"),
                **k,
            ).loss
        ),
        "log-probs": lambda x, w, **k: linear_token_logprobs(x, w, targets, **k)[0].square().sum(),
        "token loss": lambda x, w, **k: (
            fused_linear_token_loss(x, w, targets, token_loss, **k).loss
        ),
        "divergence": lambda x, w, **k: (
            fused_linear_divergence(x, w, x.detach()[..., :4].contiguous(), teacher, **k).loss
        ),
    }


def run(call: Callable[..., torch.Tensor], **keywords: Any) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 300, 8, generator=g).requires_grad_()
    weight = torch.randn(V, 8, generator=g).requires_grad_()
    out = call(hidden, weight, **keywords)
    return out.detach(), *torch.autograd.grad(out, (hidden, weight))


@pytest.mark.parametrize("name", calls())
def test_a_failed_allocation_is_tried_again_in_smaller_chunks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the results of the chunks that fit: nothing is added twice."""
    call = calls()[name]
    monkeypatch.setitem(projection.CHUNK_BYTES, "cpu", 4 * V * 600 * 4)
    expected = run(call, chunk_bytes=8 * V * 600)
    allocator = Allocator(monkeypatch, limit=4 * V * 320)
    with pytest.warns(RuntimeWarning, match=f"chunk_bytes={8 * V * 600}; pass it"):
        found = run(call)
    assert allocator.refused > 0
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_without_room_for_a_tile_the_allocators_error_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocator = Allocator(monkeypatch, limit=0)
    with (
        pytest.warns(RuntimeWarning, match="trying again"),
        pytest.raises(torch.OutOfMemoryError, match="no room for"),
    ):
        run(calls()["loss"])
    assert allocator.refused < 20
    assert allocator.granted == 0


def test_the_first_attempt_is_freed_before_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of the weight's gradient, above all."""
    alive, heads = [], []
    make = projection.Head.__init__

    def recorded(head: projection.Head, *arguments: Any) -> None:
        alive.append([x() is not None for x in heads])
        heads.append(weakref.ref(head))
        make(head, *arguments)

    monkeypatch.setattr(projection.Head, "__init__", recorded)
    monkeypatch.setitem(projection.CHUNK_BYTES, "cpu", 4 * V * 600 * 4)
    Allocator(monkeypatch, limit=4 * V * 250)
    with pytest.warns(RuntimeWarning, match="trying again"):
        run(calls()["loss"])
    assert alive == [[False] * n for n in range(4)]


def test_ranks_that_share_the_vocabulary_do_not_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would wait for collectives that this rank does not call again."""
    tried = []

    def fails(op: SimpleNamespace) -> None:
        tried.append(op)
        raise torch.OutOfMemoryError("full")

    weight = torch.empty(1000, 8)
    op = SimpleNamespace(weight=weight, rows=weight, vocab_size=1000, chunk_bytes=None)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        projection.in_smaller_chunks(fails)(op)
    assert len(tried) == 1


def test_the_budget_of_a_gpu_follows_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 1000 MiB; 3/4 of what is free beside the sum of the weight's gradient, if less."""
    monkeypatch.setattr(projection, "operand_dtype", lambda device, dtype: dtype)
    monkeypatch.setitem(projection.CHUNK_BYTES, "meta", 1000 << 20)
    gib, vocab, width = 1 << 30, 151936, 1536
    weight = torch.empty(vocab, width, dtype=torch.bfloat16, device="meta")
    sums = 4 * weight.numel()

    def used(free: int | None) -> int:
        head = projection.Projection(weight, None, torch.bfloat16, free=free)
        return 4 * head.block * vocab + 2 * head.chunk * (vocab + 2 * width)

    assert used(None) == used(100 * gib) <= 1000 << 20
    assert 0.85 * gib / 2 < used(sums + gib * 2 // 3) <= gib / 2
    # enough for a tile of rows, whatever is free
    assert used(0) == used(sums) <= projection.smallest_budget(vocab, torch.bfloat16) * 1.05
    free = {"driver": gib, "reserved": 5 * gib, "allocated": 3 * gib}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free["driver"], 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: free["reserved"])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: free["allocated"])
    device = torch.device("cuda")
    assert projection.free_memory(device, enough=gib) == gib
    assert projection.free_memory(device, enough=2 * gib) == 3 * gib


def test_a_capture_is_that_of_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []

    class Entered:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *_: object) -> None:
            entered.append(None)

    def captures() -> bool:
        return entered[-1] == torch.device("cuda", 1)

    monkeypatch.setattr(torch.cuda, "device", Entered)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", captures)
    assert tokens.capturing(torch.device("cuda", 1))
    assert not tokens.capturing(torch.device("cuda", 0))
    assert not tokens.capturing(torch.device("cpu"))
