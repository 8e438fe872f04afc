"""Launches of the row kernels: which arguments, how many programs, which tile."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import LossSpec
from ..tokens import Tokens, TokenTerms
from .triton_rows import grads_kernel, loss_kernel, scale_kernel, stats_kernel


class Tiling(NamedTuple):
    """How a program covers its row: tiles of `lanes` x `width` words, `stages` in flight."""

    lanes: int
    width: int
    warps: int
    stages: int


def tiling(vocab: int, dtype: torch.dtype) -> Tiling:
    """The tile for rows of `vocab` words.

    A lane's words fill one 16-byte load and a thread has two lanes: with four, some compilers run
    out of the 64 registers that let two programs of 16 warps share a multiprocessor. The stages of
    large rows hold 80 KiB, so that only two programs fit (on sm_80 and sm_90): enough in flight to
    cover the latency of HBM, and few enough open rows that the gradient's second read finds
    part of its row in the L2 cache. Small rows take fewer warps, or most lanes would idle.
    Rows of odd length start anywhere and are loaded word by word, which takes more registers.
    A table and no autotuning: another tile adds in another order, and tuning runs would
    overwrite logits that share their storage with the gradient.
    """
    width = 16 // dtype.itemsize
    if vocab % 16 and vocab >= 8192:
        return Tiling(256, width, 8, 3)
    if vocab >= 65536:
        return Tiling(1024, width, 16, 6)
    if vocab >= 8192:
        return Tiling(512, width, 8, 4)
    return Tiling(128, width, 4, 3)


class Launch(NamedTuple):
    """A kernel with everything it is launched with."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    warps: int

    def run(self, device: torch.device) -> None:
        """Start it on the current stream of `device`; returns at once."""
        if not self.programs:
            return
        with torch.cuda.device(device if device.type == "cuda" else -1):
            self.kernel[(self.programs,)](
                **self.arguments, num_warps=self.warps, enable_fp_fusion=True
            )


def stats_launch(
    logits: Tensor, targets: Tensor, temperature: float, results: Tensor
) -> Launch:  # fmt: skip
    """results float32 [3, N] = logp, entropy, logsumexp."""
    tile = tiling(logits.shape[-1], logits.dtype)
    arguments = {
        "logits": logits,
        **_dense(targets=targets),
        "results": results,
        "N": targets.numel(),
        **_geometry(logits),
        "k": _bits(temperature),
        "L": tile.lanes,
        "R": tile.width,
        "STAGES": tile.stages,
    }
    return Launch(stats_kernel, targets.numel(), arguments, tile.warps)


def grads_launch(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    d_logps: Tensor,
    d_entropy: Tensor,
    temperature: float,
    out: Tensor,
) -> Launch:
    """out [B, T, V] = the gradient of the logits."""
    tile = tiling(logits.shape[-1], logits.dtype)
    arguments = {
        "logits": logits,
        "out": out,
        **_dense(targets=targets, lse=lse, entropy=entropy, d_logps=d_logps, d_entropy=d_entropy),
        **_geometry(logits),
        "out_stride_b": out.stride(0),
        "out_stride_t": out.stride(1),
        "k": _bits(temperature),
        "inverse_temperature": 1 / temperature,
        "FORWARD": _narrower_alias(logits, out),
        "BLOCK": tile.lanes * tile.width,
        "STAGES": tile.stages,
    }
    return Launch(grads_kernel, targets.numel(), arguments, tile.warps)


def loss_launch(
    logits: Tensor, tokens: Tokens, spec: LossSpec, out: Tensor | None, terms: Tensor
) -> Launch:
    """terms float32 [5, N] in the order of TokenTerms, and `out` = gradient of the logits."""
    tile = tiling(logits.shape[-1], logits.dtype)
    arguments = {
        "logits": logits,
        "out": out,
        **_dense(
            targets=tokens.targets,
            demo=tokens.demo,
            advantages=tokens.advantages,
            old=tokens.old,
            ref=tokens.ref,
            scale=tokens.scale,
        ),
        "terms": terms,
        "N": tokens.targets.numel(),
        **_geometry(logits),
        "out_stride_b": 0 if out is None else out.stride(0),
        "out_stride_t": 0 if out is None else out.stride(1),
        "k": _bits(spec.temperature),
        "inverse_temperature": 1 / spec.temperature,
        "low": -math.inf if spec.clip_low is None else 1 - spec.clip_low,
        "high": math.inf if spec.clip_high is None else 1 + spec.clip_high,
        "dual_clip": spec.dual_clip or 0.0,
        "kl_coef": float(spec.kl_coef),
        "entropy_coef": float(spec.entropy_coef),
        "demo_shape": float(spec.demo_shape),
        "HAS_DUAL": spec.dual_clip is not None,
        "HAS_ENTROPY": spec.entropy_coef != 0,
        "KL": spec.kl_estimator,
        "DEMO": spec.demo_weight.value,
        "FORWARD": out is not None and _narrower_alias(logits, out),
        "L": tile.lanes,
        "R": tile.width,
        "STAGES": tile.stages,
    }
    return Launch(loss_kernel, tokens.targets.numel(), arguments, tile.warps)


def scale_launch(tensor: Tensor, factor: Tensor, programs: int) -> Launch:
    """tensor *= factor, for [B, T, V] or anything contiguous."""
    rows = tensor.view(1, 1, -1) if tensor.is_contiguous() else tensor
    arguments = {
        "tensor": rows,
        "factor": factor,
        "rows": rows.shape[0] * rows.shape[1],
        **_geometry(rows),
        "BLOCK": 4096,
    }
    return Launch(scale_kernel, programs if tensor.numel() else 0, arguments, 8)


def row_stats(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    results = torch.empty(3, targets.numel(), dtype=torch.float32, device=logits.device)
    stats_launch(logits, targets, temperature, results).run(logits.device)
    return results[0], results[1], results[2]


def row_grads(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    d_logps: Tensor,
    d_entropy: Tensor,
    temperature: float,
    out: Tensor,
) -> None:
    grads_launch(
        logits, targets, lse, entropy, d_logps, d_entropy, temperature, out
    ).run(logits.device)  # fmt: skip


def row_loss(logits: Tensor, tokens: Tokens, spec: LossSpec, out: Tensor | None) -> TokenTerms:
    terms = torch.empty(5, tokens.targets.numel(), dtype=torch.float32, device=logits.device)
    loss_launch(logits, tokens, spec, out, terms).run(logits.device)
    return TokenTerms(terms[0], terms[1], terms[2], terms[3], terms[4])


def scale_(tensor: Tensor, factor: Tensor) -> None:
    if not tensor.is_contiguous() and (tensor.dim() != 3 or tensor.stride(-1) != 1):
        tensor.mul_(factor)
        return
    programs = 4
    if tensor.is_cuda:
        properties = torch.cuda.get_device_properties(tensor.device)
        programs = 8 * properties.multi_processor_count
    scale_launch(tensor, factor, programs).run(tensor.device)


def _geometry(rows: Tensor) -> dict[str, int]:
    """Of [B, T, V]; T is at least 1, since the kernels divide by it."""
    return {
        "T": max(rows.shape[1], 1),
        "V": rows.shape[2],
        "stride_b": rows.stride(0),
        "stride_t": rows.stride(1),
    }


def _dense(**vectors: Tensor | None) -> dict[str, Tensor | None]:
    """The [N] vectors without gaps: a packed batch may come as a strided slice."""
    return {name: None if x is None else x.contiguous() for name, x in vectors.items()}


def _bits(temperature: float) -> float:
    """The factor that makes exponents of 2 of logits."""
    return math.log2(math.e) / temperature


def _narrower_alias(logits: Tensor, out: Tensor) -> bool:
    """Whether `out` is of another type in the logits' own storage."""
    same = logits.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
    return same and logits.dtype != out.dtype
