"""The parts of `GACTrainer` that need no training: masks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl", minversion="1.15")

from gac import Mixer  # noqa: E402 - after the skip
from gac.integrations.trl import GACMixin  # noqa: E402 - after the skip
from gac.methods import Constant  # noqa: E402 - after the skip


class Host:
    """A trainer whose loss is that of its inputs."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return inputs["loss"]


class Trainer(GACMixin, Host):
    """Records what is observed, with a demonstration loss of 10 per micro-batch."""

    def __init__(self, controller: Any, training: bool) -> None:
        self.mixer = Mixer(controller, rows=4, batch=2)
        self.model = SimpleNamespace(training=training)
        self.accelerator = SimpleNamespace(sync_gradients=False)
        self.observed: list[Any] = []
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
