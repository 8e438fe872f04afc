"""The keys of `parallel`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gac.fields import Checked, Count, Positive, one_of, setting


@dataclass(frozen=True)
class ParallelConfig(Checked):
    """How several processes divide the work; ignored with a single process."""

    mode: Annotated[str, one_of("ddp", "fsdp")] = "ddp"
    """ddp: every rank holds the model; fsdp: weights, gradients and moments are sharded (FSDP2)."""
    replicas: Count = setting(1, only_with="mode=fsdp")
    """fsdp: copies of the sharded model (HSDP), e.g. the number of nodes; 1 = one shard group."""
    gather_for_rollouts: bool = setting(True, only_with="mode=fsdp")
    """fsdp: keep the full weights gathered on every rank during sampling; false: gather layer by
    layer.
    """
    defer_reduce: bool = setting(False, only_with="mode=fsdp")
    """fsdp: reduce gradients only after the last micro-batch: less communication, but memory for
    one full gradient.
    """
    allow_world_size_change: bool = False
    """Allow resuming from a checkpoint written by a different number of processes."""
    timeout: Positive = 1800.0
    """Timeout of a collective in seconds; the job fails if a rank does not join in time."""
