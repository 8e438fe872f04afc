"""Builds the CUDA row kernels with emulated threads, and batches to test them."""

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gac_kernels import reference
from gac_kernels.contract import LossSpec
from gac_kernels.tokens import BatchInputs, Scaling, Tokens, plan, with_factors

SOURCES = Path(__file__).parents[2] / "csrc"


@functools.cache
def library() -> ctypes.CDLL:
    """Load the kernels with emulated instructions; compile them for the CPU when they change."""
    sources = [*SOURCES.glob("*.h"), *SOURCES.glob("cuda/*")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()
    path = SOURCES.parent / "build" / f"emulated-{digest[:16]}.so"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            build(SOURCES / "cuda", Path(folder, path.name)).replace(path)
    return load(path)


def build(sources: Path, path: Path, optimize: str = "-O2") -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    command = [compiler, "-std=c++20", optimize, "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    command += ["-Wno-unknown-pragmas", "-fsanitize=bounds", "-fsanitize-undefined-trap-on-error"]
    command += ["-o", str(path), str(sources / "emulate.cpp")]
    subprocess.run(command, check=True, timeout=300)
    return path


def load(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    loaded.gac_cuda_rows.restype = ctypes.c_char_p
    loaded.gac_cuda_clusters.restype = ctypes.c_int64
    return loaded


def reset(loaded: ctypes.CDLL) -> None:
    """Restore the defaults: scheduler seed 0, two clusters launched, both resident."""
    loaded.gac_emulate_seed(0)
    set_clusters(loaded, launched=2, resident=2)


def set_clusters(loaded: ctypes.CDLL, launched: int, resident: int) -> None:
    loaded.gac_emulate_clusters(ctypes.c_int64(launched), ctypes.c_int64(resident))


def batch(logits: Tensor, spec: LossSpec, on_policy: bool = False) -> Tokens:
    """Two sequences, a rollout and a demonstration; the second token of each has no loss.

    With a correction, each token has a weight too.
    """
    _, rows, vocab = logits.shape
    targets = torch.randint(vocab, (2, rows))
    targets[:, 1] = -100
    stats = reference.row_stats(logits.float(), targets.view(-1), Scaling(spec.temperature))
    logps = stats[0].view(2, rows)
    old, ref = (logps + 0.3 * torch.randn(2, rows) for _ in range(2))
    old, ref = None if on_policy else old, None if spec.kl_coef == 0 else ref
    inputs = BatchInputs(targets, torch.randn(2, rows), torch.tensor([False, True]), 0.4, old, ref)
    if spec.correction != "none":
        engine = logps + 0.5 * torch.randn(2, rows)
        inputs = inputs._replace(weights=torch.rand(2, rows), rollout_logps=engine)
    return with_factors(plan(inputs, spec), inputs, spec)
