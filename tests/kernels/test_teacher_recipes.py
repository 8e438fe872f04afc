"""The teacher's recipes of docs/loss.md, against loops over tokens and autograd on all logits."""

import math
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from gac_kernels import LossSpec, fused_linear_gac_loss
from tests.project.test_docs import DOCS, blocks

B, T, H, V = 3, 5, 8, 37
Rows = list[list[float]]


def rlsd(gaps: Rows, advantages: list[float]) -> Rows:
    """A token's advantage."""
    return [
        [a * min(max(math.exp(math.copysign(1, a) * g), 0.8), 1.2) for g in row]
        for row, a in zip(gaps, advantages, strict=True)
    ]


def iw_opd(gaps: Rows, advantages: list[float]) -> Rows:
    def weight(row: list[float], t: int) -> float:
        return 1 + 0.5 * (1 - sum(map(abs, row[:t])) / sum(map(abs, row)))

    return [[g * weight(row, t) for t, g in enumerate(row)] for row in gaps]


def top_d(gaps: Rows, advantages: list[float]) -> Rows:
    def credit(row: list[float]) -> list[float]:
        later = [row[t + 1 :] for t in range(len(row))]
        return [r + (sum(x) / len(x) if x else 0) for r, x in zip(row, later, strict=True)]

    rows = [credit([math.log(0.5 * math.exp(g) + 0.5) for g in row]) for row in gaps]
    values = list(chain.from_iterable(rows))
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1))
    return [[(x - mean) / deviation for x in row] for row in rows]


def documented(name: str, advantages: Tensor, gap: Tensor, live: Tensor) -> dict[str, Tensor]:
    """The arguments of the loss with a function of docs/loss.md."""
    (text,) = [b.text for b in blocks(DOCS / "loss.md", "python") if "def rlsd" in b.text]
    functions: dict[str, Any] = {}
    exec(text, functions)
    match name:
        case "rlsd":
            per_token = advantages[:, None].expand(B, T)
            return {"advantages": advantages, "weights": functions[name](per_token, gap)}
        case "iw_opd":
            return {"advantages": gap, "weights": functions[name](gap, live)}
        case _:
            return {"advantages": functions[name](gap, live)}


@pytest.mark.parametrize("function", [rlsd, iw_opd, top_d])
def test_equals_autograd(function: Any) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = leaves = [
        torch.randn(*s, generator=g, dtype=torch.float64).requires_grad_()
        for s in ((B, T, H), (V, H))
    ]
    targets, advantages = torch.randint(V, (B, T), generator=g), torch.tensor([1.0, -0.5, 2.0])
    targets[0, 3:] = targets[1, 0] = -100
    live, log_p = targets != -100, (hidden @ weight.T).log_softmax(-1)
    logps = log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    teacher = logps.detach() + torch.randn(B, T, generator=g)
    gap = torch.where(live, teacher - logps.detach(), 0)
    rows = [x[ok].tolist() for x, ok in zip(gap, live, strict=True)]
    expected = [torch.tensor(row).double() for row in function(rows, advantages.tolist())]
    parts = zip(logps, live, expected, strict=True)
    truth = -sum((x[ok] * a).sum() for x, ok, a in parts) / live.sum()
    spec = LossSpec(policy_loss="reinforce", rollout_reduction="token")
    given = documented(function.__name__, advantages, gap, live)
    out = fused_linear_gac_loss(hidden, weight, targets, **given, spec=spec)
    torch.testing.assert_close(out.loss, truth, rtol=1e-6, atol=1e-8)
    ours, theirs = (torch.autograd.grad(y, leaves, retain_graph=True) for y in (out.loss, truth))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
