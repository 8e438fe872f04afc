"""When rows may be packed, for a fake model, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gac.training import policy as packing_check
from gac.training.policy import NEIGHBORS, ROW, supports_packing


class Model(nn.Module):
    """Its log-probs number all positions of all forwards; half-precision values in `low`."""

    def __init__(self, low: int | None = None, logits: bool = True) -> None:
        super().__init__()
        self.norm, self.calls = nn.LayerNorm(1), []
        self.low, self.logits = low, logits

    def forward(self, request: Any, input_ids: Tensor, **inputs: Any) -> Any:
        assert not self.training and not torch.is_grad_enabled()
        number = len(self.calls)
        self.calls.append((input_ids[0].tolist(), inputs.get("cu_seq_lens_q")))
        dtype = torch.bfloat16 if number == self.low else torch.float32
        values, other = torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=torch.float64)

        def logprobs(targets: Tensor) -> tuple[Tensor, None]:
            assert (targets >= 0).sum() >= len(ROW) - 1
            return 100.0 * number + torch.arange(targets.numel()).view(targets.shape), None

        return request(
            SimpleNamespace(
                logits=values if self.logits else None,
                weight=other if self.logits else values,
                logprobs=logprobs,
            )
        )


FINE, SLIGHT, LEAK = 0.9e-4, 0.04, 0.06  # relative to the effect of visible neighbors


@pytest.mark.parametrize(
    ("model", "leaks", "supported"),
    [
        (Model(), (FINE,) * 3, True),
        (Model(logits=False), (FINE,) * 3, True),
        *[(Model(), leaks, False) for leaks in ((SLIGHT, 0, 0), (0, SLIGHT, 0), (0, 0, SLIGHT))],
        *[(Model(low=n), (SLIGHT,) * 3, True) for n in (0, 4)],
        (Model(low=2, logits=False), (SLIGHT,) * 3, True),
        *[(Model(low=1), leaks, False) for leaks in ((LEAK, 0, 0), (0, LEAK, 0), (0, 0, LEAK))],
    ],
)
def test_packing_is_allowed_up_to_rounding(monkeypatch, model, leaks, supported) -> None:
    model.norm.eval()
    model.calls.clear()
    compared: list = []
    distances = iter([2.0, *(2.0 * leak for leak in leaks)])

    def distance(a: Tensor, b: Tensor) -> Tensor:
        compared.append((a.tolist(), b.tolist()))
        return torch.tensor(next(distances))

    monkeypatch.setattr(packing_check, "_distance", distance)
    assert supports_packing(model) is supported
    assert model.training and not model.norm.training
    first, second = (list(neighbor + ROW) for neighbor in NEIGHBORS)
    ids, bounds = zip(*model.calls, strict=True)
    assert list(ids) == [first, second, first, second, list(ROW)]
    assert [b if b is None else b.tolist() for b in bounds] == [[0, 5, 13]] * 2 + [[0, 13]] * 2 + [
        None
    ]
    # only positions that predict tokens of the row from tokens of the row
    a, b, visible_a, visible_b = ([100 * n + t for t in range(5, 12)] for n in range(4))
    alone = [400 + t for t in range(7)]
    assert compared == [(visible_a, visible_b), (a, b), (a, alone), (b, alone)]


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("convolution", [True, False])
def test_autocast_counts_as_lower_precision(monkeypatch, autocast: bool, convolution: bool) -> None:
    model = Model()
    if convolution:
        model.mixer = nn.Conv1d(1, 1, 1)
    distances = iter([1.0, SLIGHT, 0.0, 0.0])
    monkeypatch.setattr(packing_check, "_distance", lambda a, b: torch.tensor(next(distances)))
    with torch.autocast("cpu", enabled=autocast):
        assert supports_packing(model) is (autocast and not convolution)


@pytest.mark.parametrize("low", [None, 3])
def test_a_model_that_sees_no_neighbors_may_pack(monkeypatch, low) -> None:
    monkeypatch.setattr(packing_check, "_distance", lambda a, b: torch.tensor(0.0))
    assert supports_packing(Model(low))


@pytest.mark.parametrize("error", [TypeError, ValueError, NotImplementedError, KeyError])
def test_a_forward_without_row_bounds(error: type[Exception]) -> None:
    class Refuses(Model):
        def forward(self, **inputs: Any) -> Any:
            raise error

    model = Refuses()
    if error is KeyError:
        with pytest.raises(KeyError):
            supports_packing(model)
    else:
        assert not supports_packing(model)
    assert model.training


def test_the_distance_is_the_largest_difference() -> None:
    a, b = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([1.5, 1.0, 3.0])
    assert packing_check._distance(a, b) == 3
