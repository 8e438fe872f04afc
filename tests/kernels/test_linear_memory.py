"""Peak memory of the chunked head."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gac_kernels import fused_linear_gac_loss


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
