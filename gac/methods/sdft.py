"""Self-distillation fine-tuning: demonstrations as the context of a teacher."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from gac.fields import Share
from gac.types import Sampling

from .opd import OPD
from .teacher import TeacherConfig


@dataclass(frozen=True)
class SDFT(
    OPD,
    name="sdft",
    source="arXiv 2601.19897 and its code",
    cost="forward pass on the rollouts with the demonstration before them, a copy of the weights",
):
    """The policy imitates a slow copy of itself that sees the demonstration, on its own rollouts.

    The publication prints the reverse KL; its results and its code have the forward KL
    (github.com/idanshen/Self-Distillation, issue 5), over the full vocabulary. Here it is over
    `teacher.top_k` tokens and one bin for all others; null: the full vocabulary. The publication
    puts the demonstration into the prompt by a template; here the teacher reads the prompt, the
    demonstration as its response, and the prompt again. Rollouts of a prompt without a
    demonstration have no loss.
    """

    update_rate: Share = 0.01
    """Share of the policy's weights that the teacher takes over after each step."""
    kl_direction: Literal["forward", "reverse"] = "forward"
    """forward: KL(teacher || policy), as in the released code; reverse: KL(policy || teacher)."""

    def sampling(self, completions: int) -> Sampling:
        return Sampling(demos="prompt", teacher=True, uses_rewards=False)

    def teacher(self, base: TeacherConfig) -> TeacherConfig:
        loss = f"{self.kl_direction}_kl"
        return replace(base, self=True, update_rate=self.update_rate, loss=loss)
