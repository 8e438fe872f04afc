"""Peak memory of the chunked head."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gac_kernels import fused_linear_gac_loss


class Live(TorchDispatchMode):
    """Tracks the peak number of bytes held by tensors created under this mode."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)
        }
        for x in tree_leaves(out):
            if torch.is_tensor(x) and (storage := x.untyped_storage())._cdata not in given:
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.storages = {k: v for k, v in self.storages.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
        return out


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen weight", "weight"])
def test_logits_of_one_chunk_live_at_a_time(frozen: bool) -> None:
    """Chunks of 44, 43 and 43 rows share a buffer, which is freed before the gradients are rounded."""
    hidden = torch.randn(1, 130, 64, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(503, 64, dtype=torch.bfloat16, requires_grad=not frozen)
    batch = torch.randint(503, (1, 130)), torch.ones(1), torch.tensor([False])
    with Live() as live:
        fused_linear_gac_loss(hidden, weight, *batch, chunk_bytes=64 * 503 * 4)
    operands = 4 * weight.numel() * (1 if frozen else 2)  # the weight in float32, its gradient
    least = operands + 44 * 503 * 4
    assert least <= live.peak <= least + 60_000  # slack for per-token vectors and rows of hidden


def test_longer_chunks_of_dead_rows_replace_the_buffer() -> None:
    """43 rows with a gradient, then 128 without: the smaller buffer is freed before the larger one
    is allocated.
    """
    hidden = torch.randn(2, 128, 64, requires_grad=True)
    weight = torch.randn(503, 64)
    targets = torch.randint(503, (2, 128))
    targets[0, 43:] = -100
    batch = targets, torch.tensor([1.0, 0.0]), torch.tensor([False, False])
    with Live() as live:
        fused_linear_gac_loss(hidden, weight, *batch, chunk_bytes=64 * 503 * 4)
    gradient = hidden.nbytes
    assert 64 * 503 * 4 <= live.peak - gradient <= 64 * 503 * 4 + 60_000
