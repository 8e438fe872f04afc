"""Float32 logits of bfloat16 operands: the errors of their log-probabilities."""

import torch

from bench.head_precision import errors


def test_float32_logits_are_as_accurate_as_their_operands() -> None:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 96, generator=g).bfloat16()
    weight = (torch.randn(500, 96, generator=g) / 2).bfloat16()
    found = errors(hidden, weight, torch.randint(500, (64,), generator=g))
    assert found["float32"]["largest error"] < 1e-5
    assert found["float32"]["another likeliest token"] == 0
    assert found["bfloat16"]["largest error"] > 100 * found["float32"]["largest error"]
