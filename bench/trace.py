"""Time per kernel of one linear loss, from PyTorch's profiler: `python -m bench.trace`.

Prints a table per head, which shows the small kernels between the GEMMs and gaps on the device.
"""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from .batches import HEADS, linear_batch, scaled
from .linear_losses import ours, step
from .settings import DEVICE

STEPS = 3


def main() -> None:
    device = torch.device(DEVICE)
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    for shape in ("Qwen2.5-7B", "Qwen2.5-1.5B"):
        batch = linear_batch(scaled(8192), HEADS[shape], torch.bfloat16, device)
        step(ours, batch)  # compiles
        with profile(activities=activities) as profiler:
            for _ in range(STEPS):
                step(ours, batch)
            if cuda:
                torch.cuda.synchronize()
        events = profiler.key_averages()
        launches = sum(e.count for e in events if "LaunchKernel" in e.key) / STEPS
        print(f"\n{shape}: {launches:.0f} kernel launches per step")
        order = "self_device_time_total" if cuda else "self_cpu_time_total"
        print(events.table(sort_by=order, row_limit=25, max_name_column_width=60))


if __name__ == "__main__":
    main()
