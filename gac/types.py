"""Data types that methods, the controller and the trainers share.

Notation: Q prompts, K rollouts per prompt.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch

from gac_kernels.contract import Signals, TokenMoments

State = dict[str, Any]  # plain JSON types
Weights = tuple[float, float]  # of the demonstration and the rollout gradient


# ---- the mix of a step, and what it needs


class TermPair(NamedTuple):
    """One value per loss term, e.g. a loss, a weight or a divisor."""

    demo: float
    """Value of the demonstration term (SFT)."""
    rollout: float
    """Value of the rollout term (RL)."""


class Mix(NamedTuple):
    """Weights of one step: loss = scale * ((1 - mu) * rollout_loss + mu * demo_loss).

    A teacher's loss is added with a weight of its own.
    """

    mu: float
    scale: float = 1.0
    final: bool = False
    """End the run after this step, even if steps remain."""
    teacher: float | None = None
    """Weight of the teacher's loss, >= 0; None: `teacher.coef`."""

    @classmethod
    def weights(cls, demo: float, rollout: float) -> Mix:
        """Build a Mix from the weight of each term; their sum must not be 0."""
        return cls(demo / (demo + rollout), demo + rollout)

    @property
    def pair(self) -> TermPair:
        """The weight of each term."""
        return TermPair(self.scale * self.mu, self.scale * (1 - self.mu))


class StepNeeds(NamedTuple):
    """The inputs and measurements that a method requires in one step."""

    rollouts: bool = True
    """Rollouts are sampled from the policy."""
    demos: bool = True
    """Demonstrations are read."""
    kl: bool = False
    """The KL to the frozen initial policy is measured."""
    signals: bool = False
    """The controller's signals are measured; see `Observation.evidence`."""
    parts: int = 0
    """0: one gradient of the mixed loss. n: n separate gradients of each of the two terms."""
    bias: bool = False
    """With `parts`: also measure both gradients without phi and without clipping."""
    average: float = 0.0
    """With `parts`: rate of the moving averages that replace the gradients; 0: no averaging."""
    losses_after: bool = False
    """The losses of the batch are measured again after the update."""
    trim: float = 0.1
    """Fraction of the demonstrations trimmed at each end for the logged sigma_s^2."""
    sources: bool = False
    """The source of each demonstration is known, if the data name sources."""
    rewards: bool = False
    """The rewards are measured: `Observation.reward_mean` and `reward_variance`. gac's own trainer
    always measures them."""
    kl_optional: bool = False
    """With `kl`: the method also works where another trainer does not measure the KL."""
    kl_trigger: bool = False
    """With `kl`: the method only compares an average of the KL with a target, so an estimate from
    part of the rollouts suffices."""
    teacher: bool = False
    """A teacher scores the rollouts."""

    @classmethod
    def union(cls, needs: Iterable[StepNeeds]) -> StepNeeds:
        """Combine several requirements (at least one)."""
        return functools.reduce(lambda a, b: cls._make(map(max, a, b)), needs)


# ---- what a step measured


class KLEstimate(NamedTuple):
    """The KL to the reference policy, estimated from some of a step's rollouts."""

    mean: float
    """Mean k3 estimate per token, nats."""
    standard_error: float
    """Standard error of `mean` over rollouts, nats; nan for fewer than two."""


class Corrections(NamedTuple):
    """Terms that equations 4 and 5 add to equation 3; d = g_s* - g_r* and Delta = b_s - b_r."""

    covariance: float = 0.0
    """c = tr Cov of the two noises."""
    bias_gap_sq: float = 0.0
    """`|Delta|^2`."""
    bias_gap_dot_d: float = 0.0
    """<Delta, d>."""
    rl_bias_dot_d: float = 0.0
    """<b_r, d>."""
    rl_bias_dot_gap: float = 0.0
    """<b_r, Delta>."""


class Evidence(NamedTuple):
    """Measurements of a refresh step, summed over micro-batches and ranks."""

    step: int
    """Number of optimizer steps done so far."""
    moments: TokenMoments | None = None
    """Statistics of the step's tokens."""
    gram: torch.Tensor | None = None
    """[M_s + M_r, M_s + M_r] inner products of micro-batch gradients, SFT first; float64."""
    sft_count: int = 0
    """M_s, the number of SFT micro-batches in `gram`."""
    bias_gram: torch.Tensor | None = None
    """[4, 4] inner products as in `bias_moments`."""


@dataclass(frozen=True)
class Observation:
    """Measurements available when the weights of the next step are chosen; None: not measured.

    All values are from the previous step, over all ranks; a skipped step sets only `step`.
    """

    step: int
    """Number of optimizer steps done so far."""
    signals: Signals | None = None
    """The controller's three signals, from a caller that measures them itself; the trainer and
    `Mixer` pass `evidence` instead.
    """
    kl: float | None = None
    """Mean KL to the reference policy per rollout token, nats, by the k3 estimator."""
    entropy: float | None = None
    """Mean entropy per rollout token, nats."""
    reward_mean: float | None = None
    """Mean reward of the rollouts."""
    reward_variance: float | None = None
    """Population variance of the rewards over the batch."""
    rollout_loss: float | None = None
    """Rollout loss after reduction over tokens, before weighting by 1 - mu."""
    demo_loss: float | None = None
    """Demonstration loss after reduction over tokens, before weighting by mu."""
    corrections: Corrections | None = None
    """Covariance and biases of the two gradients, with `signals`."""
    evidence: Evidence | None = None
    """Input of the signal source, if `StepNeeds.signals` is set."""
    losses_before: TermPair | None = None
    """The reduced losses before the update."""
    losses_after: TermPair | None = None
    """The losses of the same batch after the update, if `StepNeeds.losses_after` is set."""
    demo_losses: tuple[float, ...] | None = None
    """Mean negative log-likelihood per token of each demonstration of the step, where finite."""
    lr: float | None = None
    """Learning rate of the step."""
    losses_by_source: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The `demo_losses` of each source; empty if the data name no sources."""


# ---- rollouts and their credit


@dataclass(frozen=True)
class Rollout:
    """One rollout: what the policy read and wrote for one prompt, over all its turns."""

    prompt_ids: Sequence[int]
    """Token ids of the prompt."""
    completion_ids: Sequence[int]
    """Token ids after the prompt: the policy's tokens, and those of its environment or tools."""
    loss_mask: Sequence[int]
    """1 for each of `completion_ids` that the policy wrote, 0 for tokens that it only read, such as
    tool results: they have no loss and no part in the statistics."""
    logps: Sequence[float] | None = None
    """Log-probs of `completion_ids` in the engine that sampled them, nats; None: unknown. Used by
    `rollouts.correction`. Values where `loss_mask` is 0 are ignored."""
    reward: float | None = None
    """The reward; None: the configured reward scores the decoded `completion_ids`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Added to `Example.extra` for the configured reward, e.g. the state of the environment."""


class Stage(NamedTuple):
    """Rollouts per prompt that are sampled together; later stages can depend on their rewards."""

    size: int
    """Rollouts per prompt."""
    prefix: float = 0.0
    """Fraction, in [0, 1], of the prompt's demonstration that is given as a prefix to continue."""
    below: float = math.inf
    """The prefix is given only while the mean reward of the earlier stages is below this."""
    trained: int = 0
    """Number of rollouts, from the end of the stage, whose prefix is trained on as a
    demonstration."""
    length: Callable[[int, int, random.Random], int] | None = None
    """Used instead of `prefix`: length(step, tokens, rng) returns the number of prefix tokens for a
    demonstration of `tokens` tokens. The stage's rollouts of one prompt share the prefix."""


@dataclass(frozen=True)
class Sampling:
    """How prompts and demonstrations become training rows, in every step of a run."""

    demos: Literal["separate", "prompt"] = "separate"
    """"separate": a batch from the demonstration set in every step that uses demonstrations.
    "prompt": the demonstrations of the sampled prompts themselves."""
    stages: tuple[Stage, ...] = ()
    """How the K rollouts of a prompt are sampled; empty: all in one stage."""
    from_reference: bool = False
    """Sample the rollouts from the frozen initial policy."""
    pairs: bool = False
    """Keep only each prompt's best and worst rollout, with advantages 1 and -1."""
    groups: bool = False
    """Keep all rollouts of a prompt in one micro-batch; a prompt with a dropped rollout has no
    group.
    """
    demo_in_group: bool = False
    """Demonstrations are scored and share the baseline of their prompt's rollouts."""
    teacher: bool = False
    """The teacher of the rollouts sees their prompt's demonstration; see `Row.context`."""
    uses_rewards: bool = True
    """The loss depends on the rewards. If not, they are only measured, and one rollout per prompt
    is enough."""
    collect: int = 0
    """With demos="prompt": collect the demonstrations that `Method.credit` selects, over several
    steps, and train on this many in one step once there are enough; 0: train on them at once."""
    advantages: str | None = None
    """Normalization of the rewards, see `group_advantages`; None: `rollouts.scale_rewards`."""
    demo_tokens: int | None = None
    """Tokens at the end of a demonstration that have a loss; None: all."""
    limit_demos: int | None = None
    """Use only this many demonstrations, from the start of the set; None: all."""
    epochs: int | None = None
    """End the run after this many passes over the demonstrations; None: no such limit."""

    @property
    def has_prefix(self) -> bool:
        """Whether rollouts may continue a prefix of a demonstration."""
        return any(stage.prefix > 0 or stage.length is not None for stage in self.stages)

    def unit(self, completions: int) -> int:
        """Number of rollouts that must share a micro-batch; `completions`: rollouts per prompt."""
        return completions if self.groups else 1 + self.pairs


class Credit(NamedTuple):
    """Advantages and loss weights for the rollouts and demonstrations of Q prompts."""

    rollouts: torch.Tensor
    """[Q, K] advantages."""
    demos: torch.Tensor
    """[Q] advantages of the prompts' own demonstrations."""
    rollout_weight: torch.Tensor
    """[Q] loss weights of each prompt's rollouts, used if it has a demonstration; 0 drops them."""
    demo_weight: torch.Tensor
    """[Q] loss weights of each prompt's demonstration; 0 drops it."""


# ---- the model


class Head(Protocol):
    """What a method's token loss may read of a model's last layer."""

    @property
    def hidden(self) -> torch.Tensor | None:
        """[B, T, H] last hidden states; None if only the logits are known."""

    @property
    def weight(self) -> torch.Tensor | None:
        """[V, H]; None if only the logits are known."""

    @property
    def bias(self) -> torch.Tensor | None:
        """[V]."""

    @property
    def logits(self) -> torch.Tensor | None:
        """[B, T, V], for a model whose head is not linear."""

    def scaled(self, outputs: torch.Tensor) -> torch.Tensor:
        """Logits from the outputs of the linear layer."""
