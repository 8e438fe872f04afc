"""Float32 logits of bfloat16 operands: the errors of their log-probabilities."""

import torch

from bench.head_precision import FLOAT, HALF, OURS, errors


def test_float32_logits_are_as_accurate_as_their_operands() -> None:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 96, generator=g).bfloat16()
    weight = (torch.randn(500, 96, generator=g) / 2).bfloat16()
    found = errors(hidden, weight, torch.randint(500, (64,), generator=g))
    assert found[OURS]["largest error"] < 1e-5
    assert found[OURS]["largest error"] < 3 * found[FLOAT]["largest error"]
    assert found[OURS]["another likeliest token"] == 0
    assert found[HALF]["largest error"] > 100 * found[OURS]["largest error"]
