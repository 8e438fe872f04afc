"""The library of the native CPU backend: instruction sets, operators, and why it is unavailable."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode

from gac_kernels import LossSpec, backends, token_logprobs
from gac_kernels.backends import cpu
from gac_kernels.inputs import BatchInputs

from .native_cases import CPU

PROGRAM = """
import torch
from gac_kernels import fused_gac_loss, token_logprobs
from gac_kernels.backends import cpu
print(cpu.unavailable(torch.device("cpu"), torch.float32) or cpu.capability())
tiny = torch.tensor([1e-40])
assert (tiny * 0.5).item() > 0, "loading the library turned flush-to-zero on"
generator = torch.Generator().manual_seed(0)
logits = 4 * torch.randn(2, 3, 5003, generator=generator)
logits[0, :, 100:3000] = -torch.inf
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    rows = logits.to(dtype).clone().requires_grad_()
    targets = torch.tensor([[0, 5, 3001], [7, -100, 5002]])
    result = fused_gac_loss(rows, targets, torch.ones(2), torch.tensor([False, True]),
                            backend="native")
    result.loss.backward()
    assert (rows.grad[0, :, 100:3000] == 0).all()
    truth = rows.detach().double().requires_grad_()
    expected = fused_gac_loss(truth, targets, torch.ones(2), torch.tensor([False, True]),
                              backend="reference")
    expected.loss.backward()
    assert (result.logps - expected.logps).abs().max() < 2e-6
    assert (result.entropy - expected.entropy).abs().max() < 2e-6
    bound = torch.finfo(dtype).eps * truth.grad.abs() + (1e-7 if dtype == torch.float16 else 1e-8)
    assert ((rows.grad - truth.grad).abs() <= bound).all()
values = torch.arange(-2**15, 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
values = values[values.isfinite()]
rows = torch.stack([values, torch.zeros_like(values)], 1)[None]
logps, _ = token_logprobs(rows, torch.zeros(1, len(values), dtype=torch.int64), backend="native")
truth = torch.nn.functional.logsigmoid(values.double())
assert ((logps[0] - truth).abs() <= 1e-6 + 1e-7 * truth.abs()).all()
"""


def run_with_capability(name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"GAC_CPU_CAPABILITY": name, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("name", ("default", "avx2", "avx512"))
def test_each_instruction_set(name: str) -> None:
    supported = torch.backends.cpu.get_cpu_capability().lower()
    order = ("default", "avx2", "avx512")
    if supported not in order or order.index(name) > order.index(supported):
        pytest.skip(f"this processor supports only {supported}")
    result = run_with_capability(name)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [name]


def test_unknown_instruction_set_is_rejected() -> None:
    result = run_with_capability("sse9")
    assert result.returncode != 0
    assert re.search("GAC_CPU_CAPABILITY=sse9: .*default.*avx2.*avx512", result.stderr)


def test_unavailable_says_why() -> None:
    assert "float64" in cpu.unavailable(CPU, torch.float64)
    assert "not on meta" in cpu.unavailable(torch.device("meta"), torch.float32)
    with pytest.raises(RuntimeError, match="backend='native' cannot run here: .*float64"):
        token_logprobs(torch.zeros(1, 1, 4).double(), torch.zeros(1, 1).long(), backend="native")


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_fake_tensors_are_rejected() -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match="hold no data"):
        cpu.row_stats(torch.zeros(1, 3, 4), torch.zeros(3).long(), 1.0)


@pytest.mark.parametrize(
    ("ends", "message"), (([0, 2, 1], "decreases"), ([0, 2, 4], "must .* end at N"))
)
def test_invalid_offsets_are_not_followed(ends: list[int], message: str) -> None:
    is_demo = torch.tensor([False, True])
    inputs = BatchInputs(torch.zeros(3).long(), torch.zeros(2), is_demo)
    with pytest.raises(RuntimeError, match=message):
        cpu.plan(inputs._replace(cu_seqlens=torch.tensor(ends)), LossSpec())


def test_columns_of_another_layout_are_converted() -> None:
    logits, targets = torch.randn(1, 6, 9), torch.arange(6)
    expected = cpu.row_stats(logits, targets, 1.0)
    strided = torch.stack([targets, targets], 1).int()[:, 0]
    assert all(map(torch.equal, cpu.row_stats(logits, strided, 1.0), expected))


def test_missing_or_invalid_library_is_reported(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cpu, "library", cpu.library.__wrapped__)
    reason = cpu.library_error.__wrapped__
    built = cpu.LIBRARY
    monkeypatch.setattr(cpu, "LIBRARY", tmp_path / "_native.so")
    assert re.search("not built.* GAC_EXT=1", reason())
    cpu.LIBRARY.write_bytes(b"not a library")
    assert re.search("failed to load.* rebuild", reason())
    other = tmp_path / "cpu" / "native.h"
    other.parent.mkdir()
    other.write_text("// other sources")
    monkeypatch.setattr(cpu, "LIBRARY", built)
    monkeypatch.setattr(cpu.build_cuda, "SOURCES", tmp_path)
    assert re.search("failed to load.* rebuild.*other sources", reason())


def test_fallback_is_reported_once(monkeypatch) -> None:
    backends._warn_of_fallback.cache_clear()
    monkeypatch.setattr(cpu, "library_error", lambda: "the extension is not built")
    with pytest.warns(RuntimeWarning, match="native.*not built.*reference"):
        assert backends.choose("auto", CPU, torch.float32) is backends.load("reference", CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backends.choose("auto", CPU, torch.float32)
    assert backends.choose("auto", CPU, torch.float64) is backends.load("reference", CPU)
