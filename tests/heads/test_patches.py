"""Replaced attributes of other libraries, and the head of verl against stand-ins."""

import importlib
import sys
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


def test_the_head_of_verl(monkeypatch: Any) -> None:
    calls: list[Any] = []
    fused = type("FusedLinearForPPO", (), {"forward": None})
    contents = {
        "verl.utils.experimental.torch_functional": {"FusedLinearForPPO": fused},
        "verl.utils.kernel.linear_cross_entropy": {
            "linear_cross_entropy": lambda *args: calls.append(args) or "own"
        },
    }
    with modules(contents, "gac_kernels.heads.verl") as adapter:
        kernel: Any = sys.modules["verl.utils.kernel.linear_cross_entropy"]
        own = kernel.linear_cross_entropy
        draw = torch.Generator().manual_seed(0)
        hidden, weight = torch.randn(2, 3, 4, generator=draw), torch.randn(5, 4, generator=draw)
        labels = torch.tensor([[0, 1, 2], [4, 3, 2]], dtype=torch.int32)
        rows = (hidden @ weight.T / 0.7).log_softmax(-1)
        logps = rows.gather(-1, labels.long()[..., None])[..., 0]
        entropy = -(rows.exp() * rows).sum(-1)
        patch = adapter.apply_fused_head()
        again = adapter.apply_fused_head()
        replaced = kernel.linear_cross_entropy
        torch.testing.assert_close(
            fused().forward(hidden, weight.double(), labels, temperature=0.7), (logps, entropy)
        )
        torch.testing.assert_close(
            replaced(hidden, weight, labels, 0.7), (logps.flatten(), entropy.flatten())
        )
        plain = (hidden @ weight.T).log_softmax(-1).gather(-1, labels.long()[..., None])[..., 0]
        torch.testing.assert_close(fused().forward(hidden, weight, labels)[0], plain)
        torch.testing.assert_close(replaced(hidden, weight, labels)[0], plain.flatten())
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group)
        assert replaced(hidden, weight, labels, 0.7, "none", 1)[0].shape == (6,)
        assert not calls
        assert replaced(hidden, weight, labels, 0.7, "none", 2) == "own"
        assert replaced(hidden, weight, labels, 0.7, "mean") == "own"
        assert [call[3:] for call in calls] == [(0.7, "none", 2), (0.7, "mean", None)]
        assert [*map(id, calls[0][:3])] == [*map(id, (hidden, weight, labels))]
        for handle in (again, patch):
            handle.undo()
            assert kernel.linear_cross_entropy is own
            assert fused.forward is None
        monkeypatch.delitem(sys.modules, "gac_kernels.heads.verl_fused", raising=False)
        imported = importlib.import_module("gac_kernels.heads.verl_fused")
        assert sys.modules.pop(imported.__name__)
        assert kernel.linear_cross_entropy is not own
        imported.PATCH.undo()
        assert kernel.linear_cross_entropy is own
        with pytest.raises(ImportError, match="does not support the installed json: "):
            supported("json", "a_missing_name")
        sys.modules[kernel.__name__] = None
        with pytest.raises(
            ImportError, match="apply_fused_head does not support the installed verl: "
        ):
            adapter.apply_fused_head()
