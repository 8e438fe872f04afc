"""The keys of `teacher`: a model that scores every token of the rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gac.errors import require
from gac.fields import Checked, Count, NonNegative, Share, expand_paths, one_of, setting

TOP_K = ("forward_kl", "reverse_kl")
SAMPLED = ("k2", "k3")  # not k1: as a loss, its gradient is that of log p, which is 0 on average


@dataclass(frozen=True)
class TeacherConfig(Checked):
    """A teacher: a model that scores the policy's own rollouts, token by token."""

    path: str | None = None
    """A folder with a transformers model, or the name of one on the Hub, with the tokenizer of the
    policy."""
    self: bool = False
    """The teacher is the policy itself, which there has seen the prompt's demonstration
    (`data.demo_field`) before the prompt."""
    update_rate: Share = setting(1.0, only_with="self")
    """Share of the policy's weights that the teacher takes over after each step. 1: the teacher has
    the policy's current weights; less: a moving average of them; 0: the initial weights."""
    loss: Annotated[str, one_of(*TOP_K, *SAMPLED)] = "reverse_kl"
    """Divergence of policy and teacher. reverse_kl: KL(policy || teacher); forward_kl: KL(teacher
    || policy); both over the teacher's `top_k` tokens and one bin for all others. k2 and k3:
    estimators of the reverse KL from the sampled token (joschu.net/blog/kl-approx.html)."""
    top_k: Count | None = setting(32, only_with="loss=forward_kl or loss=reverse_kl")
    """Number of the teacher's most probable tokens; null: the whole vocabulary, in a pass of its
    own over the head, with the teacher's hidden states in memory."""
    coef: NonNegative = 1.0
    """Weight of the teacher's loss, which is added to the method's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expand_paths(self, "path")
        require(self.path != "", "path", self.path, "a folder or the name of a model, or null")
        if self.path and self.self:
            raise ValueError(
                f"self=true: path={self.path!r} is another teacher: remove one of the two keys"
            )

    @property
    def active(self) -> bool:
        """Whether there is a teacher."""
        return self.self or self.path is not None

    @property
    def candidates(self) -> int | None:
        """Number of tokens that the teacher scores at each position; None: one, or all."""
        return self.top_k if self.loss in TOP_K else None

    @property
    def whole(self) -> bool:
        """Whether the whole vocabulary is compared."""
        return self.loss in TOP_K and self.top_k is None
