"""What `fuse` would launch on a GPU, and that the host waits for none of it."""

import pytest
import torch

pytest.importorskip("transformers")

from gac_kernels.heads.transformers import fuse
from tests.device_trace import trace
from tests.heads.test_transformers import make


@pytest.mark.parametrize("items", [None, torch.tensor(9)], ids=["mean", "num_items_in_batch"])
def test_the_loss_of_a_model(items: torch.Tensor | None) -> None:
    model = make("llama")
    ids = torch.randint(10, (2, 6), generator=torch.Generator().manual_seed(0))
    with fuse(model), trace() as found:
        model(input_ids=ids, labels=ids, num_items_in_batch=items).loss.backward()
    adapter = found.within("gac_kernels/heads/")
    assert [event.name for event in adapter.launches] == ["constant_pad_nd"]
    assert not adapter.waits, adapter.summary()
    ours = found.within("gac_kernels/")
    assert len(ours.launches) <= 12, ours.summary()
    assert not ours.waits, ours.summary()
