"""The list of methods that `gac methods` prints."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from gac.types import StepNeeds
from gac_kernels import LossSpec

from . import all_methods
from .base import Method

DEMOS = {"separate": "demonstrations", "prompt": "demonstrations of the sampled prompts"}
STEPS = 1000  # number of steps whose needs are combined; enough for every method
COMPLETIONS = 8  # rollouts per prompt assumed here


def methods_table() -> str:
    """Table of the methods by family: name, summary, source, needs and extra cost per step."""
    methods = all_methods()
    width = max(map(len, methods))
    indent = " " * (width + 4)
    lines = []
    for family, members in families(methods).items():
        lines.append(f"{family}:")
        for name, method in members.items():
            text = (
                f"{summary(method)} [{method.source}] Needs: {', '.join(describe_needs(method()))}."
            )
            if method.cost != "none":
                text += f" Extra: {method.cost}."
            first = f"  {name:{width}}  "
            lines.append(textwrap.fill(text, 100, initial_indent=first, subsequent_indent=indent))
    return "\n".join(lines)


def families(methods: Mapping[str, type[Method]]) -> dict[str, dict[str, type[Method]]]:
    """Family -> name -> method: the published methods, then our variants and installed ones."""
    by_family: dict[str, dict[str, type[Method]]] = {}
    for name, method in methods.items():
        by_family.setdefault(method.family, {})[name] = method
    return by_family


def summary(method: type[Method]) -> str:
    """The first paragraph of the class docstring."""
    return " ".join(str(method.__doc__).split("\n\n")[0].split())


def describe_needs(method: Method) -> tuple[str, ...]:
    """The inputs that the method requires, derived from its declarations."""
    required = StepNeeds.union(map(method.needs, range(STEPS)))
    sampling, loss = method.sampling(COMPLETIONS), method.loss(LossSpec(max_tokens=1))
    sampled = "rollouts of the reference" if sampling.from_reference else "rollouts"
    declared = {
        sampled: required.rollouts,
        DEMOS[sampling.demos]: required.demos or sampling.teacher,
        "prefixes": sampling.has_prefix,
        "separate gradients": required.parts > 0,
        "teacher": sampling.teacher or required.teacher,
        "reference": required.kl or loss.reference,
        "log-probs": loss.token is not None,
        "losses after the update": required.losses_after,
        "best weights": method.keeps_best,
    }
    return tuple(name for name, needed in declared.items() if needed)
