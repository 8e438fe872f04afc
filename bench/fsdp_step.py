"""One step of the linear loss under FSDP2, in one process: `python -m bench.fsdp_step`.

The weight of the head is a DTensor outside the forward pass; the loss and the gradients must equal
those of the same module without FSDP2.
"""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from .batches import HEADS, SMALL, Batch, linear_batch
from .linear_losses import ours
from .settings import DEVICE


class LossHead(nn.Module):
    """A projection and an output layer; returns the loss."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        size = weight.shape[1]
        self.projection = nn.Parameter(torch.eye(size, device=weight.device, dtype=weight.dtype))
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, hidden: Tensor, batch: Batch) -> Tensor:
        return ours(batch._replace(hidden=hidden @ self.projection, weight=self.weight))


def gradients(module: LossHead, batch: Batch) -> list[Tensor]:
    loss = module(batch.hidden.detach(), batch)
    loss.backward()
    grads = [p.grad for p in module.parameters()]
    full = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
    return [loss.detach(), *full]


def main() -> None:
    device = torch.device(DEVICE)
    batch = linear_batch(SMALL, HEADS["Qwen2.5-1.5B"], torch.bfloat16, device)
    expected = gradients(LossHead(batch.weight), batch)
    with tempfile.NamedTemporaryFile() as file:
        backend = "nccl" if DEVICE == "cuda" else "gloo"
        init_process_group(backend, init_method=f"file://{file.name}", rank=0, world_size=1)
        try:
            module = LossHead(batch.weight)
            fully_shard(module, mesh=init_device_mesh(DEVICE, (1,)))
            for value, same in zip(gradients(module, batch), expected, strict=True):
                torch.testing.assert_close(value, same, rtol=0, atol=0)
        finally:
            destroy_process_group()
    print(f"loss {expected[0].item():.6f}: the loss and both gradients are bitwise equal")


if __name__ == "__main__":
    main()
