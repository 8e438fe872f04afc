"""The teacher of a run: scores rollouts, and follows the policy if it is a copy of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gac import collectives
from gac.errors import ConfigError
from gac.methods.teacher import TeacherConfig
from gac.models.causal_lm import load_tokenizer
from gac.models.config import teacher_model
from gac.models.head import Head
from gac.models.precision import patched_model
from gac.models.source import check_vocabulary
from gac.parallel import sharding
from gac.parallel.sharding import reshard
from gac.rows import Row
from gac.train_config import TrainConfig, plan_of, teacher_of
from gac_kernels.contract import IGNORE

from .gradients import Forward
from .policy import load_frozen
from .probes import local
from .startup import check_positions, vocabulary_size


def check_teacher_model(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, longest: int
) -> None:
    """Raise ConfigError unless the run's teacher has the policy's tokens, and enough of them.

    longest: tokens of the longest possible row.
    """
    teacher, model = teacher_of(config), config.model
    if not teacher.active:
        return
    if teacher.path is not None:
        model = teacher_model(config.model, teacher.path)
        own = load_tokenizer(model)
        check_vocabulary(teacher.path, own.get_vocab(), tokenizer.get_vocab())
        keys = "rollouts.max_completion_length or data.max_prompt_tokens"
        check_positions(model, longest, keys)
    sizes = vocabulary_size(model), vocabulary_size(config.model)
    size = min(sizes)
    if teacher.whole and sizes[0] < sizes[1]:
        raise ConfigError(
            f"teacher.top_k=null: the vocabulary of teacher.path={teacher.path!r} has {sizes[0]} "
            f"tokens, that of the policy {sizes[1]}: use a number"
        )
    if (teacher.candidates or 0) > size:
        source = "teacher.self=true" if teacher.path is None else f"teacher.path={teacher.path!r}"
        raise ConfigError(
            f"teacher.top_k={teacher.top_k}: the vocabulary of {source} has {size} tokens: use a "
            "smaller number, or null for all of them"
        )


def load_teacher(config: TrainConfig, accelerator: Accelerator) -> nn.Module | None:
    """The teacher's own model, frozen; None if the teacher is the policy, or there is none."""
    path = teacher_of(config).path
    if path is None:
        return None
    return load_frozen(config, teacher_model(config.model, path), accelerator)


@dataclass(frozen=True)
class Scores:
    """The teacher's log-probs of the loss tokens of each row, on the CPU."""

    logps: list[Tensor] = field(default_factory=list)
    """float32: [n] of the tokens themselves, or [n, K] of `ids`; nan in a row without a teacher."""
    ids: list[Tensor] = field(default_factory=list)
    """int32 [n, K]: the teacher's most probable tokens, -100 in a row without a teacher; empty for
    the tokens themselves."""
    hidden: list[Tensor] = field(default_factory=list)
    """[n, H]: the teacher's hidden states, nan in a row without a teacher, in place of both."""

    def means(self) -> collectives.Sums:
        """Metrics column -> sum and number: the mass of the tokens that are not in `ids`."""
        if not self.ids:
            return {}
        tails = torch.cat([1 - x.double().exp().sum(-1) for x in self.logps] or [torch.zeros(0)])
        known = tails[tails.isfinite()]
        return {"teacher_tail": (known.clamp(min=0).sum().item(), len(known))}


class Teacher:
    """Scores rollouts with a model of its own, or with the policy that sees demonstrations.

    Args:
        config: the run's teacher.
        forward: the policy, and how forward passes group rows.
        model: the teacher's own model; None: the policy is the teacher.
        sees_demos: whether it sees `Row.context`; a row without one then has no teacher.
    """

    def __init__(
        self, config: TeacherConfig, forward: Forward, model: nn.Module | None, sees_demos: bool
    ) -> None:
        self.config, self.forward, self.sees_demos = config, forward, sees_demos
        self.model = forward.model if model is None else model
        self.average: dict[str, Tensor] = {}
        """Weights of a teacher that follows the policy slowly, by name; {}: it has no others."""
        self.head: tuple[Any, ...] = ()
        """Weight, bias, scale and softcap of the head of the last `Scores.hidden`."""
        if model is None and config.update_rate < 1:
            self.average = {name: p.detach().clone() for name, p in forward.trainable()}

    def score(self, rows: Sequence[Row]) -> Scores:
        """Score this rank's `rows`. Every rank must call it."""
        seen = list(rows)
        if self.sees_demos:
            seen = [
                row._replace(
                    ids=row.context + row.ids,
                    start=row.start + len(row.context),
                    switch=-1,
                    context=(),
                )
                for row in rows
            ]
        candidates = self.config.candidates
        with self._with_average():
            if self.config.whole:
                hidden, head = self.forward.hidden_states(seen, self.model)
                scores = Scores(hidden=hidden)
                self._keep(head)
            elif candidates is None:
                scores = Scores(self.forward.row_logprobs(seen, self.model))
            else:
                tops = self.forward.top_logprobs(seen, self.model, candidates)
                scores = Scores([x for x, _ in tops], [ids for _, ids in tops])
        for i, row in enumerate(rows) if self.sees_demos else ():
            if not row.context:
                for values in (scores.logps, scores.hidden):
                    if values:
                        values[i].fill_(math.nan)
                if scores.ids:
                    scores.ids[i].fill_(IGNORE)
        return scores

    def _keep(self, head: Head | None) -> None:
        """Keep the head of the hidden states: a copy, unless its weights stay what they are."""
        if head is None:
            return
        assert head.weight is not None
        changes = self.model is self.forward.model or bool(sharding.units(self.model))
        weight, bias = (
            x.detach().clone() if changes and x is not None else x for x in (head.weight, head.bias)
        )
        self.head = weight, bias, *head.scaling
        reshard(self.model)

    def follow(self) -> None:
        """Take over a share of the policy's weights, after an update."""
        for name, p in self.forward.trainable() if self.average else ():
            local(self.average[name]).lerp_(local(p.detach()), self.config.update_rate)

    @contextlib.contextmanager
    def _with_average(self) -> Iterator[None]:
        """Exchange the policy's weights with the average inside the block."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        if not self.average:
            return
        reshard(self.model)  # gathered weights would be stale
        for name, p in self.forward.trainable():
            own, other = local(p.detach()), local(self.average[name])
            kept = own.clone()
            own.copy_(other)
            other.copy_(kept)


def make_teacher(config: TrainConfig, forward: Forward, model: nn.Module | None) -> Teacher | None:
    """The run's teacher, or None. model: from `load_teacher`."""
    teacher, sees_demos = teacher_of(config), plan_of(config).teacher
    if not teacher.active and not sees_demos:
        return None
    if not teacher.active:  # the method has its own loss of the sampled tokens
        teacher = TeacherConfig(self=True, loss="k2")
    plain = [patched_model(x).plain_head for x in (forward.model, model) if x is not None]
    if teacher.whole and not all(plain):
        raise ConfigError(
            "teacher.top_k=null: the head of a model is not a linear layer: use a number"
        )
    return Teacher(teacher, forward, model, sees_demos and model is None)
