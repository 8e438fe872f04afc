"""The interface of a method: frozen hyperparameters, explicit state, and hooks of the trainer.

`needs` says what a step requires, `sampling` how rows are sampled, `loss` what is minimized, and
`mix` how the two terms are weighted. Only `mix` has no default. The trainer does not depend on any
particular method. It keeps the state that the method returns, in plain JSON types, and saves it in
checkpoints. Notation: N tokens, Q prompts, K rollouts per prompt.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch

from gac.fields import Checked, check_effects
from gac.types import Credit, Mix, Observation, Sampling, State, StepNeeds, Weights
from gac_kernels import DemoWeight, LossSpec

from .advantages import group_credit
from .teacher import TeacherConfig
from .token_view import TokenView

OURS = "our variants"  # family of the methods that no publication describes


class Loss(NamedTuple):
    """The loss that a method minimizes."""

    spec: LossSpec
    """The fused loss; with `token`, its reductions and statistics."""
    token: Callable[[TokenView], torch.Tensor] | None = None
    """[N] loss of each token, differentiable through `TokenView.logps`; replaces the fused loss. KL
    penalty, entropy bonus and correction of `spec` are added to it."""
    policy: bool = False
    """`token` uses `TokenView.policy_loss`, and so the clip and the ratio of `spec`."""
    pooled: bool = False
    """Both terms are divided by a common count over all rows."""
    reference: bool = False
    """`token` uses the LM head of the frozen initial policy."""
    per_token: bool = False
    """`token` is a function of each token's own log-prob, entropy and inputs, without sums over
    sequences. The gradient then takes 6 instead of 8 N H V FLOPs."""


@dataclass(frozen=True)
class Method(Checked):
    """Base class of the methods that combine SFT and RL.

    Fields of a subclass are its hyperparameters and become configuration keys, with the ranges of
    their annotations, such as `gac.config.Share`. State is a mapping
    of plain JSON types that is passed in and returned, so that checkpoints can save it.
    """

    name: ClassVar[str] = ""
    """Name in lists and logs, and in the configuration if the method is in a table of methods."""
    family: ClassVar[str] = "installed"
    """Group in lists of methods."""
    source: ClassVar[str] = "not published"
    """Where the formula is published."""
    cost: ClassVar[str] = "none"
    """Cost per step in addition to one forward pass over all rows and one backward pass over the
    rows that are trained on."""
    keeps_best: ClassVar[bool] = False
    """Whether the run ends with the weights of its best evaluation."""

    def __init_subclass__(
        cls,
        name: str | None = None,
        family: str | None = None,
        source: str | None = None,
        cost: str | None = None,
        keeps_best: bool | None = None,
    ) -> None:
        """Set the attributes above, as in `class Mine(Method, source="arXiv 2402.03300")`."""
        default = vars(cls).get("name", cls.__qualname__)
        given = {"name": name or default, "family": family, "source": source, "cost": cost}
        for key, value in {**given, "keeps_best": keeps_best}.items():
            if value is not None:
                setattr(cls, key, value)

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not valid, or that has no effect."""
        super().__post_init__()
        check_effects(self)

    def needs(self, step: int) -> StepNeeds:
        """The inputs and measurements that step `step`, counted from 0, requires."""
        return StepNeeds()

    def sampling(self, completions: int) -> Sampling:
        """How prompts and demonstrations become rows, with `completions` rollouts per prompt."""
        return Sampling()

    def loss(self, base: LossSpec) -> Loss:
        """The loss that the method minimizes; `base` is the `loss` section of the configuration."""
        return Loss(base)

    def teacher(self, base: TeacherConfig) -> TeacherConfig:
        """The teacher of the run; `base` is the `teacher` section of the configuration."""
        return base

    def credit(
        self, rewards: torch.Tensor, demos: torch.Tensor | None, scale_rewards: str
    ) -> Credit:
        """Advantages and row weights from rewards.

        Args:
            rewards: [Q, K] rewards of K rollouts for each of the step's Q prompts, on all ranks.
            demos: [Q] rewards of the demonstrations if they are in their prompt's group, else None.
            scale_rewards: as in `rollouts.scale_rewards`.
        """
        return group_credit(rewards, demos, scale_rewards)

    def for_run(self, steps: int) -> Self:
        """This method with its schedules fitted to a run of `steps` steps; a trainer calls it."""
        return self

    def run_warning(self, steps: int) -> str | None:
        """Why a schedule that was set explicitly does not fit a run of `steps` steps, or None."""
        return None

    def init(self) -> State:
        """Return the state before the first step."""
        return {}

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        """Choose the weights of the next step. Subclasses must implement this method.

        It is called once before the first step, with `Observation(0)`, and after every step.

        Args:
            state: the state so far.
            last: measurements from the previous step.

        Returns:
            The new state, and the weights.
        """
        raise NotImplementedError

    def log_message(self, before: State, after: State) -> str | None:
        """Log message for a state change made by `mix`, or None."""
        return None

    def solve(self, state: State, gram: torch.Tensor, mix: Mix) -> tuple[State, Weights | None]:
        """Change the weights once both gradients are known; called if `StepNeeds.parts` is set.

        Args:
            state: the state so far.
            gram: float64 [2 n, 2 n] inner products of the n parts of each term, demonstrations
                first; the gradient of a term is the mean of its parts.
            mix: the weights that `mix` chose.

        Returns:
            The new state, and the weight of each term; None skips the update.
        """
        return state, mix.pair

    def report(self, state: State) -> dict[str, float | None]:
        """Extra columns for `metrics.jsonl`, such as mu_star, prior and alpha.

        state: the state with which the step ran, so the columns explain the step's own mu.
        """
        return {}


@dataclass(frozen=True)
class Sum(Method, family="hybrid"):
    """Base class of the methods that add the two terms, the SFT loss times `sft_coef` if given."""

    def mix(self, state: State, last: Observation) -> tuple[State, Mix]:
        return state, Mix.weights(getattr(self, "sft_coef", 1.0), 1.0)


@dataclass(frozen=True)
class TokenWeighted(Method):
    """Base class of the methods that choose only the token weight of the fused loss."""

    weight: DemoWeight = DemoWeight.ONE
    """Token weight of the demonstrations: one, p, phi, shaped or trust."""

    def loss(self, base: LossSpec) -> Loss:
        return Loss(replace(base, demo_weight=self.weight))


M = TypeVar("M", bound=Method)
_PRESETS: dict[str, type[Method]] = {}  # by name, for pickle


def preset(base: type[M], name: str, doc: str, **changes: Any) -> type[M]:
    """Create a frozen subclass of `base` called `name`.

    `changes` override its defaults or class attributes.

    Raises:
        TypeError: `base` has no such field or class attribute.
    """
    hints = typing.get_type_hints(base, include_extras=True)
    attributes: dict[str, Any] = {"name": name, "__doc__": doc, "__module__": base.__module__}
    defaults = []
    for key, value in changes.items():
        if key not in hints:
            raise TypeError(f"{key}={value!r}: {base.__name__} has no such field or attribute")
        if typing.get_origin(hints[key]) is not typing.ClassVar:
            defaults.append((key, hints[key], field(default=value)))
        else:
            attributes[key] = value
    attributes["__reduce__"] = _reduce_preset  # pickle could not find the class in its module
    title = "".join(part.capitalize() for part in name.split("-"))
    cls = make_dataclass(title, defaults, bases=(base,), namespace=attributes, frozen=True)
    _PRESETS[name] = cls
    return typing.cast(type[M], cls)


def _reduce_preset(method: Method) -> tuple[Any, ...]:
    """`__reduce__` of a preset: its name and field values."""
    values = {f.name: getattr(method, f.name) for f in fields(method)}
    return _restore, (type(method).name, values)


def _restore(name: str, values: dict[str, Any]) -> Method:
    return _PRESETS[name](**values)
