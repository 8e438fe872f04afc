"""Smoke test of a backend in its own process: `python -m bench.smoke BACKEND DEVICE`.

A kernel that hangs or writes out of bounds would otherwise stop all other benchmarks.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import torch

from gac_kernels import backends, fused_gac_loss, fused_linear_gac_loss

from .settings import skip, tiny

# a row over four blocks of a cluster, a row in one block, and unaligned rows
LOGITS = tiny(
    ((152064, torch.bfloat16), (32000, torch.bfloat16), (50257, torch.float32)),
    ((304, torch.bfloat16), (257, torch.float32)),
)


@functools.cache
def unavailable_reason(backend: str, device: str, seconds: float = 180) -> str | None:
    """Why `backend` does not work on `device`, or None if it does."""
    if reason := backends.unavailable(backend, torch.device(device), torch.float32):
        return reason
    command = [sys.executable, "-m", "bench.smoke", backend, device]
    root = Path(__file__).parents[1]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=root)
    except subprocess.TimeoutExpired:
        return f"a small loss did not finish within {seconds:g} s"
    if result.returncode:
        reason = (
            result.stderr.strip() or result.stdout.strip() or f"exit code {result.returncode}"
        ).splitlines()[-1]
        return f"a small loss fails: {reason}"
    return None


def main(backend: str, device: str) -> None:
    if reason := backends.unavailable(backend, torch.device(device), torch.float32):
        raise skip(reason)
    rows = 300 if device == "cuda" else 3  # on a GPU, several rows per block
    for vocab, dtype in LOGITS:
        logits = torch.randn(2, rows, vocab, device=device).to(dtype)
        batch = (
            torch.randint(vocab, (2, rows), device=device),
            torch.ones(2, device=device),
            torch.tensor([False, True], device=device),
        )
        compare(lambda x, on, b=batch: fused_gac_loss(x, *b, mu=0.5, backend=on), logits, backend)
        weight = torch.randn(vocab, 64, device=device).to(dtype) / 8
        hidden = torch.randn(2, rows, 64, device=device).to(dtype)
        compare(
            lambda x, on, w=weight, b=batch: fused_linear_gac_loss(x, w, *b, mu=0.5, backend=on),
            hidden,
            backend,
        )


def compare(call, leaf: torch.Tensor, backend: str) -> None:
    """Compare log-probs and gradient with the reference backend."""
    results = []
    for name in (backend, "reference"):
        x = leaf.detach().clone().requires_grad_()
        out = call(x, name)
        (grad,) = torch.autograd.grad(out.loss, x)
        results.append((out.logps, grad))
    (logps, grad), (true_logps, true_grad) = results
    torch.testing.assert_close(logps, true_logps, rtol=0, atol=1e-3)
    relative_error = ((grad - true_grad).float().norm() / true_grad.float().norm()).item()
    assert relative_error < 0.02, f"gradient off by {relative_error:.1e}"


if __name__ == "__main__":
    main(*sys.argv[1:])
