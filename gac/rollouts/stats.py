"""Results of a step's sampling: training rows, and columns of metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from gac import collectives
from gac.collectives import world_size
from gac.data import Example
from gac.rows import Row


class SamplingStats(NamedTuple):
    """Amount and duration of this rank's sampling."""

    completions: int = 0
    tokens: int = 0  # sampled, of all completions
    seconds: float = 0.0  # excluding reward computation
    reward_seconds: float = 0.0
    groups: int = 0  # prompts with at least two scored rollouts
    flat_groups: int = 0  # groups whose rewards are all equal, before any resampling
    resampled: int = 0  # prompts that were replaced
    truncated: int = 0  # completions without a stop token
    solved: int = 0  # groups in which every reward is at least 1
    unsolved: int = 0  # groups in which every reward is below 1

    def columns(self) -> dict[str, Any]:
        """Metrics columns over all ranks; times are means per rank. Every rank must call it."""
        all_ranks = SamplingStats._make(collectives.total(self))
        completions, groups = all_ranks.completions, all_ranks.groups
        seconds = all_ranks.seconds / world_size()
        return {
            "sampled_completions": int(completions),
            "sampled_tokens": int(all_ranks.tokens),
            "sampling_seconds": seconds,
            "completions_per_second": completions / seconds if seconds else None,
            "reward_seconds": all_ranks.reward_seconds / world_size(),
            "frac_reward_zero_std": all_ranks.flat_groups / groups if groups else None,
            "frac_solved": all_ranks.solved / groups if groups else None,
            "frac_unsolved": all_ranks.unsolved / groups if groups else None,
            "resampled_prompts": int(all_ranks.resampled),
            "completions/clipped_ratio": all_ranks.truncated / completions if completions else None,
            "completions/mean_length": all_ranks.tokens / completions if completions else None,
        }


@dataclass
class Rollouts:
    """One rank's rollouts for one optimizer step, or for several if they are reused."""

    rows: list[Row]
    """Training rows; `Row.sequence` is the index in this list."""
    rewards: list[float]
    """Rewards of all scored rollouts, including those that are not trained on."""
    step: int
    """The step that sampled them, from 0."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Metrics columns of the sampling, over all ranks."""
    means: collectives.Sums = field(default_factory=dict)
    """Metrics column -> sum and number: the mean reward of each data source, and of each term."""
    old_logps: list[Tensor] = field(default_factory=list)
    """Log-probs of the sampling policy, one tensor of loss tokens per row; empty: on-policy."""
    teacher_logps: list[Tensor] = field(default_factory=list)
    """The teacher's log-probs of each row, [n] or [n, K]; empty without a teacher."""
    teacher_ids: list[Tensor] = field(default_factory=list)
    """The tokens of `teacher_logps` [n, K]; empty: those of the rows."""
    teacher_hidden: list[Tensor] = field(default_factory=list)
    """The teacher's hidden states of each row, [n, H]; empty without a comparison of the whole
    vocabulary."""
    collected: list[Example | None] = field(default_factory=list)
    """For each prompt, its example if the demonstration is to be collected, else None; empty
    without `Sampling.collect`."""
