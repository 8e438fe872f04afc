"""Benchmark inputs: sizes of known LM heads, and logits as peaked as those of trained models."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .settings import tiny


class Head(NamedTuple):
    """Hidden size and vocabulary of a model's output layer."""

    hidden: int
    vocab: int


HEADS = {
    "Qwen2.5-7B": tiny(Head(3584, 152064), Head(24, 304)),
    "Qwen2.5-1.5B": tiny(Head(1536, 151936), Head(16, 296)),
    "Llama-3": tiny(Head(4096, 128256), Head(32, 256)),
}
LENGTH = tiny(256, 1)  # tokens per sequence
SMALL = 2 * LENGTH  # tokens of a batch that is compared with float64


def scaled(tokens: int) -> int:
    """Return `tokens`; in a dry run, 2 if `tokens` is below 8192, otherwise 4."""
    return tiny(tokens, SMALL if tokens < 8192 else 2 * SMALL)


class Batch(NamedTuple):
    """B sequences of T = 256 tokens, half rollouts and half demonstrations."""

    hidden: Tensor  # [B, T, H], a leaf
    weight: Tensor  # [V, H], a leaf
    targets: Tensor  # [B, T]
    advantages: Tensor  # [B]
    is_demo: Tensor  # [B]
    mu: float

    @property
    def tokens(self) -> int:
        return self.targets.numel()


def linear_batch(
    tokens: int, head: Head, dtype: torch.dtype, device: torch.device, mu: float = 0.5
) -> Batch:
    """A batch whose logits have standard deviation 2; each target's logit is raised by 0 to 20.

    The target's probability thus ranges from a guess to near certainty. Nearly uniform logits would
    be unfair to kernels that skip small probabilities.
    """
    g = torch.Generator(device).manual_seed(0)
    weight = torch.empty(head.vocab, head.hidden, device=device, dtype=dtype)
    for rows in weight.split(16384):  # in slices, to avoid a float32 copy of the whole weight
        rows.copy_(torch.randn(rows.shape, device=device, generator=g) / head.hidden**0.5)
    shape = (tokens // LENGTH, LENGTH)
    targets = torch.randint(head.vocab, shape, device=device, generator=g)
    hidden = 2 * torch.randn(*shape, head.hidden, device=device, generator=g)
    boost = 20 * torch.rand(*shape, 1, device=device, generator=g)
    hidden += boost * weight[targets].float()
    return Batch(
        hidden.to(dtype).requires_grad_(),
        weight.requires_grad_(),
        targets,
        torch.randn(shape[0], device=device, generator=g),
        torch.arange(shape[0], device=device) % 2 == 1,
        mu,
    )


def peaked_logits(tokens: int, vocab: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Logits [B, T, V] with a random peak per row, as in `linear_batch`."""
    g = torch.Generator(device).manual_seed(1)
    logits = torch.empty(tokens // LENGTH, LENGTH, vocab, dtype=dtype, device=device)
    for row in logits:
        row.copy_(2 * torch.randn(row.shape, device=device, generator=g))
    peaks = torch.randint(vocab, (*logits.shape[:2], 1), device=device, generator=g)
    height = 20 * torch.rand(peaks.shape, device=device, generator=g)
    return logits.scatter_(2, peaks, height.to(dtype))
