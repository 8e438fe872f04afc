"""Methods that combine a prompt's rollouts and its demonstration in one loss."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from gac.fields import Count, NonNegative, Number, Positive, Share, setting
from gac.types import Credit, Mix, Observation, Sampling, Stage, State, StepNeeds, Weights
from gac_kernels import DemoWeight, LossSpec

from .base import Loss, Method, Sum
from .solvers import Gram, GramSolver
from .token_view import TokenView


@dataclass(frozen=True)
class LUFFY(Sum, name="luffy", source="arXiv 2504.14945"):
    """Each group has K - 1 rollouts and the prompt's demonstration, whose loss is -A p / (p + c).

    As in the released training script, the baseline is the mean reward of the whole group,
    advantages are not divided by the standard deviation, and nothing is clipped. The sum of all
    token losses is divided by rows times `loss.max_tokens`.
    """

    shape: Positive = setting(0.1, only_with="weight=shaped or weight=trust")
    """c of the shaped probability p / (p + c), the publication's gamma."""
    entropy_coef: Number = 0.001
    """Weight of the entropy bonus on rollouts."""
    weight: DemoWeight = DemoWeight.SHAPED
    """Token weight of the demonstrations; all except shaped ignore the advantage."""

    def loss(self, base: LossSpec) -> Loss:
        spec = replace(
            base,
            demo_weight=self.weight,
            demo_shape=self.shape,
            clip_low=None,
            clip_high=None,
            entropy_coef=self.entropy_coef,
            rollout_reduction="constant",
            demo_reduction="constant",
        )
        return Loss(spec, pooled=True)

    def sampling(self, completions: int) -> Sampling:
        if completions < 2:
            raise ValueError(
                f"rollouts.num_generations={completions!r}: use 2 or more; one is the demonstration"
            )
        group = (Stage(completions - 1),)
        return Sampling("prompt", group, demo_in_group=True, advantages="centered")


@dataclass(frozen=True)
class SRFT(Sum, name="srft", source="arXiv 2506.19767, equations 5 to 13"):
    """Demonstrations: entropy-weighted cross-entropy plus policy gradient; rollouts: signed log p.

    H is the mean token entropy of a response. The loss is 0.5 exp(-H) (-log p) - A p for
    demonstrations, 0.1 exp(H) (-log p) for correct rollouts and log p for incorrect ones. It is
    averaged over the tokens of each term.
    """

    sft_scale: Number = 0.5
    """Factor of exp(-H) in the SFT weight."""
    weight: Literal["one", "phi"] = "one"
    """Token weight of the cross-entropy of demonstrations; phi: p (1 - p), not differentiated."""
    rl_scale: Number = 0.1
    """Factor of exp(H) in the weight of correct rollouts."""
    shape: Positive | None = None
    """c: use -A p / (p + c) as the RL loss of demonstrations, as in a public implementation."""
    correct: Number = 0.5
    """A rollout is correct if its reward is above this."""
    least_logp: Number | None = None
    """Log-probability below which tokens of incorrect rollouts have no gradient; null (published):
    no limit.
    """

    def loss(self, base: LossSpec) -> Loss:
        # SHAPED only makes the demonstrations' advantages available; the loss is `token_loss`
        spec = replace(
            base, demo_weight=DemoWeight.SHAPED, rollout_reduction="token", demo_reduction="token"
        )
        return Loss(spec, token=self.token_loss)

    def sampling(self, completions: int) -> Sampling:
        return Sampling(demos="prompt", demo_in_group=True, advantages="std")

    def credit(
        self, rewards: torch.Tensor, demos: torch.Tensor | None, scale_rewards: str
    ) -> Credit:
        signs = torch.where(rewards > self.correct, 1.0, -1.0)
        signs = torch.where(rewards.isnan(), 0.0, signs).double()
        return super().credit(rewards, demos, scale_rewards)._replace(rollouts=signs)

    def token_loss(self, tokens: TokenView) -> torch.Tensor:
        """[N] loss of each token."""
        batch, logps = tokens.batch, tokens.logps
        entropy = batch.spread(tokens.sequence_mean(tokens.entropy))
        p = logps.exp()
        policy = p if self.shape is None else p / (p + self.shape)
        sft_weight = self.sft_scale * (-entropy).exp()
        if self.weight == "phi":
            sft_weight = sft_weight * (p * (1 - p)).detach()
        demo_loss = -sft_weight * logps - batch.advantages * policy
        correct, incorrect = batch.advantages > 0, batch.advantages < 0
        floored_logps = logps if self.least_logp is None else logps.clamp(min=self.least_logp)
        rollout_loss = torch.where(correct, -self.rl_scale * entropy.exp() * logps, 0)
        rollout_loss = torch.where(incorrect, floored_logps, rollout_loss)
        return torch.where(batch.demo, demo_loss, rollout_loss)


@dataclass(frozen=True)
class DYPO(
    Sum,
    name="dypo",
    source="arXiv 2604.08926, equations 20 to 24",
    cost="reference forward pass on the rollouts",
):
    """SFT if all rollouts fail, nothing if all succeed, else alpha GRPO + (1 - alpha) GAL.

    GAL, the group alignment loss, is the mean of -log sigmoid(beta (h_i - h_j)) over the pairs of a
    successful rollout i and a failed one j of a prompt, where h is the sum over tokens of log p
    minus the reference's log-prob. With rewards other than 0 and 1, rollouts above the mean of
    their group are successful in GAL.

    Each term is the mean over its own prompts, and the terms are added; the publication's mean over
    all prompts also weights them by the shares of unsolved and partly solved prompts. The
    publication gives no value of `sft_coef`. Its several teachers become rows of the dataset with
    the same prompt. Its KL term is not implemented, and a prompt with a dropped rollout is not
    trained by RL.
    """

    alpha: Share = 0.5
    """Share of GRPO in the RL loss, in [0, 1]."""
    beta: Positive = 1.0
    """Factor of the log-ratios in GAL, > 0."""
    sft_coef: Positive = 1.0
    """Factor of the SFT loss, > 0; the publication's gamma."""
    correct: Number = 0.5
    """A rollout succeeds if its reward is above this."""

    def needs(self, step: int) -> StepNeeds:
        return StepNeeds(kl=True)

    def loss(self, base: LossSpec) -> Loss:
        spec = replace(base, demo_reduction="token", rollout_reduction="sequence")
        return Loss(spec, token=self.token_loss, policy=True)

    def sampling(self, completions: int) -> Sampling:
        return Sampling(demos="prompt", groups=True)

    def credit(
        self, rewards: torch.Tensor, demos: torch.Tensor | None, scale_rewards: str
    ) -> Credit:
        successes = (rewards > self.correct).sum(1)
        failures = (rewards <= self.correct).sum(1)  # nan, a dropped rollout, is neither
        mid = ((successes > 0) & (failures > 0)).to(rewards.dtype)
        hard = ((successes == 0) & (failures > 0)).to(rewards.dtype)
        return (
            super()
            .credit(rewards, demos, scale_rewards)
            ._replace(rollout_weight=mid, demo_weight=hard)
        )

    def token_loss(self, tokens: TokenView) -> torch.Tensor:
        """[N] loss of each token; for GAL, the loss of the token's group."""
        batch = tokens.batch
        if batch.ref is None:
            raise ValueError(
                "ref_logps=None: GAL needs the reference's log-probs; unset kl_sample_size"
            )
        assert tokens.units is not None  # every batch of rows has units
        h = batch.per_sequence(torch.where(batch.rollout, tokens.logps - batch.ref, 0))
        sign = batch.per_sequence(batch.advantages).sign()
        units = tokens.units.to(h.device)
        same = units[:, None] == units[None]
        pairs = (same & (sign[:, None] > 0) & (sign[None] < 0)).to(h.dtype)
        losses = -torch.nn.functional.logsigmoid(self.beta * (h[:, None] - h[None]))
        group = same.to(h.dtype)
        gal = group @ (pairs * losses).sum(1) / (group @ pairs.sum(1)).clamp(min=1)
        rl = self.alpha * tokens.policy_loss + (1 - self.alpha) * batch.spread(gal)
        return torch.where(batch.demo, -tokens.logps, rl)


@dataclass(frozen=True)
class SDAR(
    Method,
    name="sdar",
    family="hybrid",
    source="arXiv 2605.15155 and its code",
    cost="forward pass on the rollouts with the demonstration before them",
):
    """GRPO plus coef sigmoid(beta D) D on rollout tokens; D is the teacher's log-prob minus log p.

    The teacher is the policy itself before the update, with privileged information before the
    prompt. The gate sigmoid(beta D) is detached, so the gradient is that of -coef * gate * log p.
    Both losses are means over tokens. In the publication the information is a skill retrieved for
    an agent's task; here it is the prompt with its demonstration, followed by the prompt again.
    Prompts without a demonstration are trained by RL only. The released scripts add a KL term of
    0.001 and a penalty for invalid actions, which are not implemented.
    """

    coef: Number = 0.01
    """Weight of the distillation; 0.01 in the released scripts."""
    beta: NonNegative = 5.0
    """Sharpness of the gate, >= 0; 0: a constant gate of 1/2."""

    def loss(self, base: LossSpec) -> Loss:
        spec = replace(base, rollout_reduction="token")
        return Loss(spec, token=self.token_loss, policy=True, per_token=True)

    def sampling(self, completions: int) -> Sampling:
        return Sampling(demos="prompt", teacher=True)

    def credit(
        self, rewards: torch.Tensor, demos: torch.Tensor | None, scale_rewards: str
    ) -> Credit:
        return (
            super()
            .credit(rewards, demos, scale_rewards)
            ._replace(demo_weight=torch.zeros(len(rewards)))
        )

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix(0.0)

    def token_loss(self, tokens: TokenView) -> torch.Tensor:
        """[N] loss of each token."""
        if tokens.teacher is None:  # a batch without rollouts, so no token has a loss
            return tokens.logps
        gap = torch.where(tokens.teacher.isnan(), 0, tokens.teacher - tokens.logps)
        gate = (self.beta * gap.detach()).sigmoid()
        return tokens.policy_loss + self.coef * gate * gap


@dataclass(frozen=True)
class GTA(GramSolver, name="gta", family="hybrid", source="arXiv 2509.12108"):
    """The weighted sum of the two gradients, or only the RL gradient if their cosine is negative.

    In the publication, the policy first writes a guess, which is trained by SFT, and the rest is
    trained by RL. Free text has no guess; our adaptation trains the last `guess_tokens` tokens of a
    demonstration by SFT.
    """

    sft_coef: NonNegative = 1.0
    """Weight of the SFT gradient."""
    rl_coef: Positive = 1.0
    """Weight of the RL gradient, > 0."""
    guess_tokens: Count | None = None
    """Number of tokens at the end of a demonstration that SFT trains on; null: all."""

    def sampling(self, completions: int) -> Sampling:
        return Sampling(demo_tokens=self.guess_tokens)

    def closed_form(self, gram: Gram) -> Weights:
        return (0.0 if gram.dot < 0 else self.sft_coef), self.rl_coef
