"""The library of the native CPU backend: instruction sets, operators, and why it is unavailable."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys

import pytest
import torch

from gac_kernels import token_logprobs
from gac_kernels.backends import cpu

from .native_cases import CPU, batch

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


def operator_samples() -> dict[str, tuple]:
    data = batch(33, rows=2, length=3)
    logits, targets = data["logits"], data["targets"].flatten()
    demo, ones = torch.tensor([False] * 3 + [True] * 3), torch.ones(6)
    old, out = -ones, torch.empty_like(logits)
    numbers = (0.8, 1.2, math.inf, 0.1, 2, 0.01, 2, 0.1, 1.0)
    is_demo = torch.tensor([False, True])
    plan_inputs = (targets.view(2, 3), torch.ones(2), is_demo, 0.5)
    weights = (False, 0, 1, 1.0)
    tokens = torch.ops.gac_native.plan(*plan_inputs, None, None, None, *weights, None, None)
    live, demo_tokens, advantages, _, _, weight, _, _, offsets, lengths = tokens
    token_inputs = (live, demo_tokens, advantages, weight, offsets, lengths)
    reduce_inputs = (*token_inputs, is_demo, 0.5, True, *[old] * 5)
    row_inputs = (logits, targets, demo, ones, old, old, ones, *numbers)
    on_policy = (logits.bfloat16(), targets, demo, ones, None, None, ones, *numbers)
    sketch = (torch.ones(logits.shape[-1]), torch.zeros(len(ones), 8))
    return {
        "plan": (*plan_inputs, old.view(2, 3), old.view(2, 3), None, *weights, 2.0, 3.0),
        "plan without options": (*plan_inputs, None, None, None, *weights, None, None),
        "reduce": (*reduce_inputs, True),
        "reduce without moments": (*reduce_inputs, False),
        "row_stats": (logits, targets, 0.7),
        "row_grads": (logits, targets, ones, ones, 0.7, out),
        "row_loss": (*row_inputs, out, None, None),
        "row_loss with a sketch": (*row_inputs, out, *sketch),
        "row_loss without options": (*on_policy, None, None, None),
    }


@pytest.mark.parametrize("name", operator_samples())
def test_operators_pass_opcheck(name: str) -> None:
    operator = getattr(torch.ops.gac_native, name.split()[0]).default
    torch.library.opcheck(operator, operator_samples()[name])


def test_operators_reject_invalid_inputs() -> None:
    row_stats = torch.ops.gac_native.row_stats
    with pytest.raises(ValueError, match="logits has strides .*must be contiguous"):
        row_stats(torch.zeros(1, 4, 3).transpose(1, 2), torch.zeros(3).long(), 1.0)
    with pytest.raises(ValueError, match=r"targets has shape \[2\]: expected \[3\]"):
        row_stats(torch.zeros(1, 3, 4), torch.zeros(2).long(), 1.0)
    with pytest.raises(TypeError, match="targets has dtype Int: expected Long"):
        row_stats(torch.zeros(1, 3, 4), torch.zeros(3).int(), 1.0)
    is_demo, rest = torch.tensor([False, True]), (False, 0, 1, 1.0, None, None)
    for ends, message in (([0, 2, 1], "decreases .*2"), ([0, 2, 4], "must .* end at N = 3")):
        with pytest.raises(ValueError, match=message):
            inputs = torch.zeros(3).long(), torch.zeros(2), is_demo, 0.5, None, None
            torch.ops.gac_native.plan(*inputs, torch.tensor(ends), *rest)


def test_missing_or_invalid_library_is_reported(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cpu, "LIBRARY", tmp_path / "_native.so")
    assert re.search("not built.* GAC_EXT=1", cpu._load.__wrapped__())
    cpu.LIBRARY.write_bytes(b"not a library")
    assert re.search("failed to load.* rebuild", cpu._load.__wrapped__())
