"""Estimates a training step's memory and communication per rank: `python -m tools.scaling`.

The formulas count what FSDP2 and AdamW must store and send; tests compare them with the byte counts
of real runs on CPU processes. Activations are excluded because they depend on the micro-batch, not
on the number of ranks. Notation: P parameters, S ranks of a shard group, R replicas, m
micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gac.evaluation.table import markdown_table

MASTER, COMPUTE = 4, 2  # bytes of a float32 shard and of a bfloat16 operand


@dataclass(frozen=True)
class Shape:
    """A decoder of the Llama or Qwen2 family."""

    vocabulary: int
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    tied: bool = False
    """Whether embedding and head share one matrix."""
    biased: bool = True
    """Whether query, key and value have a bias (as in Qwen2)."""

    @property
    def kv_width(self) -> int:
        """Width of the keys and of the values."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def layer(self) -> int:
        """Number of parameters of one layer."""
        h, kv = self.hidden, self.kv_width
        attention = 2 * h * h + 2 * h * kv + self.biased * (h + 2 * kv)
        return attention + 3 * h * self.intermediate + 2 * h

    @property
    def root(self) -> int:
        """Number of parameters of embedding, final norm and head, which form FSDP's root unit."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden + self.hidden

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.root + self.layers * self.layer


MODELS = {  # the published configurations of Qwen2.5
    "1.5B": Shape(151936, 1536, 28, 8960, 12, 2, tied=True),
    "7B": Shape(152064, 3584, 28, 18944, 28, 4),
    "14B": Shape(152064, 5120, 48, 13824, 40, 8),
    "72B": Shape(152064, 8192, 80, 29568, 64, 8),
}


def state_bytes(shape: Shape, shards: int, reference: bool = True) -> float:
    """Bytes that a rank always holds: float32 weights, AdamW's moments and the reference model."""
    return MASTER * shape.total / shards * (3 + reference)


def backward_peak_bytes(shape: Shape, shards: int, reference: bool = True) -> float:
    """Peak bytes in the backward pass: states, sharded gradients and temporarily unsharded tensors.

    The unsharded tensors are the root and two layers in bfloat16 (one in use, one being
    prefetched), the root's gradient in bfloat16, and the head's float32 gradient while the fused
    loss accumulates it.
    """
    head = shape.vocabulary * shape.hidden
    unsharded = COMPUTE * (2 * shape.root + 2 * shape.layer) + MASTER * head
    return state_bytes(shape, shards, reference) + MASTER * shape.total / shards + unsharded


def rollout_peak_bytes(shape: Shape, shards: int, tokens: int, reference: bool = True) -> float:
    """Peak bytes of a sampling rank: states, all weights and a KV cache of `tokens` tokens."""
    cache = 2 * shape.layers * shape.kv_width * COMPUTE * tokens
    return state_bytes(shape, shards, reference) + COMPUTE * shape.total + cache


def gathered_elements(shape: Shape, micro_batches: int) -> int:
    """Elements that a rank all-gathers to compute gradients.

    The root is gathered once per micro-batch, each layer once for its forward and once for its
    backward.
    """
    return micro_batches * (shape.root + 2 * shape.layers * shape.layer)


def reduced_elements(shape: Shape, micro_batches: int, deferred: bool = False) -> int:
    """Elements that a rank reduce-scatters."""
    return (1 if deferred else micro_batches) * shape.total


def bytes_sent(
    shape: Shape, shards: int, replicas: int, micro_batches: int, reference: bool = True
) -> float:
    """Bytes that a rank sends per optimizer step: ring collectives send (S - 1) / S of the tensor.

    Covers gradients, one gathered reference forward per micro-batch, one gather for the rollouts
    and, with replicas, an all-reduce of the float32 gradient shards.
    """
    ring = (shards - 1) / shards
    forward_only = (1 + micro_batches * reference) * shape.total
    inside = COMPUTE * (gathered_elements(shape, micro_batches) + forward_only)
    inside += MASTER * reduced_elements(shape, micro_batches)
    across = 2 * (replicas - 1) / replicas * MASTER * shape.total / shards
    return ring * inside + across


def controller_bytes(demonstrations: int) -> int:
    """Bytes that a rank sends for the signals of a step (`TokenMoments`).

    13 sums and one number for each of its demonstrations, in float64.
    """
    return 8 * (13 + demonstrations)


def table(ranks: Sequence[int] = (8, 32, 128), micro_batches: int = 4, node: int = 8) -> str:
    """Markdown table of gigabytes per rank; more than 64 ranks form replicas of 64 (HSDP)."""
    head = ["model", "states", "backward", "rollouts", "sent per step"]
    lines = []
    for name, shape in MODELS.items():
        columns = []
        for count in ranks:
            shards = min(count, 8 * node)
            replicas = count // shards
            sizes = (
                state_bytes(shape, shards),
                backward_peak_bytes(shape, shards),
                rollout_peak_bytes(shape, shards, 32 * 2048),
                bytes_sent(shape, shards, replicas, micro_batches),
            )
            columns.append([f"{float(f'{size / 1e9:.3g}'):g}" for size in sizes])
        lines.append([name, *map(" / ".join, zip(*columns, strict=True))])
    return markdown_table(head, lines)


if __name__ == "__main__":
    print(table())
