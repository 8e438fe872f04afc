"""Replaced attributes of other libraries, and the head of verl against stand-ins."""

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gac_kernels.heads.patch import Patch, supported
from tests.integrations.stand_ins import modules


def test_patches_can_be_nested_and_undone_in_any_order() -> None:
    class Owner:
        a, b = 1, 2

    first = Patch((Owner, "a", 10), (Owner, "b", 20))
    second = Patch((Owner, "a", 10))
    assert (Owner.a, Owner.b) == (10, 20)
    second.undo()
    assert (Owner.a, Owner.b) == (1, 20)
    Owner.b = 30  # replaced by someone else: left alone
    with pytest.raises(KeyError), first:
        raise KeyError
    assert (Owner.a, Owner.b) == (1, 30)


class VerlHead:
    """Stand-ins for the two heads of verl, ours in their place, and the result in plain PyTorch."""

    def __init__(self, adapter: Any, fused: type, calls: list[Any]) -> None:
        self.adapter, self.fused, self.calls = adapter, fused, calls
        self.kernel: Any = sys.modules["verl.utils.kernel.linear_cross_entropy"]
        self.own = self.kernel.linear_cross_entropy
        draw = torch.Generator().manual_seed(0)
        hidden, weight = torch.randn(2, 3, 4, generator=draw), torch.randn(5, 4, generator=draw)
        labels = torch.tensor([[0, 1, 2], [4, 3, 2]], dtype=torch.int32)
        self.inputs = hidden, weight, labels

    def expected(self, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropy."""
        hidden, weight, labels = self.inputs
        rows = (hidden @ weight.T / temperature).log_softmax(-1)
        logps = rows.gather(-1, labels.long()[..., None])[..., 0]
        return logps, -(rows.exp() * rows).sum(-1)


@pytest.fixture
def verl_head() -> Iterator[VerlHead]:
    calls: list[Any] = []
    fused = type("FusedLinearForPPO", (), {"forward": None})
    contents = {
        "verl.utils.experimental.torch_functional": {"FusedLinearForPPO": fused},
        "verl.utils.kernel.linear_cross_entropy": {
            "linear_cross_entropy": lambda *args: calls.append(args) or "own"
        },
    }
    with modules(contents, "gac_kernels.heads.verl") as adapter:
        yield VerlHead(adapter, fused, calls)


def test_the_heads_of_verl_equal_plain_torch(verl_head: VerlHead) -> None:
    hidden, weight, labels = verl_head.inputs
    with verl_head.adapter.apply_fused_head():
        forward, kernel = verl_head.fused().forward, verl_head.kernel.linear_cross_entropy
        logps, entropy = verl_head.expected(0.7)
        result = forward(hidden, weight.double(), labels, temperature=0.7)
        torch.testing.assert_close(result, (logps, entropy))
        result = kernel(hidden, weight, labels, 0.7)
        torch.testing.assert_close(result, (logps.flatten(), entropy.flatten()))
        logps, _ = verl_head.expected(1.0)
        torch.testing.assert_close(forward(hidden, weight, labels)[0], logps)
        torch.testing.assert_close(kernel(hidden, weight, labels)[0], logps.flatten())


def test_other_calls_of_verls_kernel_reach_verl(verl_head: VerlHead, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group)
    inputs, calls = verl_head.inputs, verl_head.calls
    with verl_head.adapter.apply_fused_head():
        kernel = verl_head.kernel.linear_cross_entropy
        assert kernel(*inputs, 0.7, "none", 1)[0].shape == (6,)
        assert not calls
        assert kernel(*inputs, 0.7, "none", 2) == "own"
        assert kernel(*inputs, 0.7, "mean") == "own"
        assert [call[3:] for call in calls] == [(0.7, "none", 2), (0.7, "mean", None)]
        assert all(x is y for x, y in zip(calls[0], inputs, strict=False))


def test_the_heads_of_verl_can_be_replaced_twice_and_undone(verl_head: VerlHead) -> None:
    patch = verl_head.adapter.apply_fused_head()
    again = verl_head.adapter.apply_fused_head()
    for handle in (again, patch):
        handle.undo()
        assert verl_head.kernel.linear_cross_entropy is verl_head.own
        assert verl_head.fused.forward is None


def test_importing_verl_fused_replaces_the_heads(verl_head: VerlHead, monkeypatch: Any) -> None:
    monkeypatch.delitem(sys.modules, "gac_kernels.heads.verl_fused", raising=False)
    imported = importlib.import_module("gac_kernels.heads.verl_fused")
    assert sys.modules.pop(imported.__name__)
    assert verl_head.kernel.linear_cross_entropy is not verl_head.own
    imported.PATCH.undo()
    assert verl_head.kernel.linear_cross_entropy is verl_head.own


def test_a_missing_name_is_an_error_that_names_the_package(verl_head: VerlHead) -> None:
    with pytest.raises(ImportError, match="does not support the installed json: "):
        supported("json", "a_missing_name")
    sys.modules[verl_head.kernel.__name__] = None
    message = "apply_fused_head does not support the installed verl: "
    with pytest.raises(ImportError, match=message):
        verl_head.adapter.apply_fused_head()
