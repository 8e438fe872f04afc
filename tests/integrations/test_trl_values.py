"""The parts of `GACTrainer` that need no training: masks and units."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl", minversion="1.15")

from gac import Mixer  # noqa: E402 - after the skip
from gac.integrations.trl import GACMixin  # noqa: E402 - after the skip
from gac.methods import METHODS, Constant  # noqa: E402 - after the skip
from gac_kernels.heads.trl import FusedGRPOMixin  # noqa: E402 - after the skip


class Host:
    """A trainer whose loss is that of its inputs."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return inputs["loss"]


class Trainer(GACMixin, Host):
    """Records what is observed, with a demonstration loss of 10 per micro-batch."""

    def __init__(self, controller: Any, training: bool) -> None:
        self.mixer = Mixer(controller, rows=4, batch=2, sketches=True)
        self.model = SimpleNamespace(training=training)
        self.accelerator = SimpleNamespace(sync_gradients=False)
        self.observed: list[Any] = []
        self.units: list[Any] = []
        self._demos = SimpleNamespace(select=lambda rows: [])

    def observe_rollouts(self, mask: Any, advantages: Any, ref: Any) -> None:
        self.observed.append((mask.tolist(), advantages, ref))

    def _demo_loss(self, model: Any) -> torch.Tensor:
        return torch.tensor(10.0)


def batch(**changes: Any) -> dict[str, Any]:
    return {
        "loss": torch.tensor(2.0),
        "completion_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "advantages": "advantages",
        **changes,
    }


def test_masked_tool_tokens_are_not_observed() -> None:
    trainer = Trainer(Constant(mu=0.25), training=True)
    tools = torch.tensor([[1, 0, 1], [1, 1, 0]])
    assert trainer._compute_loss(None, batch(tool_mask=tools)).item() == 0.75 * 2 + 0.25 * 10
    assert trainer._compute_loss(None, batch(ref_per_token_logps="ref")).item() == 4
    assert trainer.observed == [
        ([[1, 0, 0], [1, 1, 0]], "advantages", None),
        ([[1, 1, 0], [1, 1, 1]], "advantages", "ref"),
    ]
    assert trainer._micro_batch == 2
    trainer.model.training = False  # evaluation uses the loss of TRL
    assert trainer._compute_loss(None, batch()).item() == 2
    assert len(trainer.observed) == 2


def test_rollouts_of_one_prompt_are_one_unit(monkeypatch: Any) -> None:
    """However much padding precedes them."""
    trainer = Trainer(METHODS["gac-gated-sketch"](), training=True)
    units: list[Any] = []
    monkeypatch.setattr(trainer.mixer._sketches, "add", lambda *call: units.append(call))
    monkeypatch.setattr(FusedGRPOMixin, "_compute_loss", lambda self, model, inputs: inputs["loss"])
    ids = torch.tensor([[0, 0, 5, 6], [9, 9, 5, 6], [0, 5, 6, 7], [0, 0, 6, 5]])
    prompts = {"prompt_ids": ids, "prompt_mask": torch.tensor([[0, 0, 1, 1]]).repeat(4, 1)}
    prompts["prompt_mask"][2, 1] = 1
    trainer.rollout_out = "out"
    trainer._compute_loss(None, batch(**prompts))
    ((_, rows, out),) = units
    first, second, third, fourth = (row.unit for row in rows)
    assert first == second
    assert len({first, third, fourth}) == 3
    assert min(first, third, fourth) >= 0
    assert max(first, third, fourth) < 2**63
    assert out == "out"
    assert not any(row.is_demo for row in rows)
    trainer.rollout_out = None
    with pytest.raises(ValueError, match="controller=gac-gated-sketch requires the fused loss"):
        trainer._compute_loss(None, batch(**prompts))
