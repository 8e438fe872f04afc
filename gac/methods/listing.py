"""The list of methods that `gac methods` prints."""

from __future__ import annotations

import textwrap

from gac_kernels import LossSpec

from . import METHODS
from .base import Method, StepNeeds

DEMOS = {"separate": "demonstrations", "prompt": "demonstrations of the sampled prompts"}
STEPS = 1000  # number of steps whose needs are combined; enough for every method
COMPLETIONS = 8  # rollouts per prompt assumed here


def methods_table() -> str:
    """Table of the methods by family: name, summary, source, needs and extra cost per step."""
    width = max(map(len, METHODS))
    indent = " " * (width + 4)
    lines = []
    for family, members in families().items():
        lines.append(f"{family}:")
        for method in members:
            text = f"{summary(method)} [{method.source}] Needs: {', '.join(needs(method()))}."
            if method.cost != "none":
                text += f" Extra: {method.cost}."
            name = f"  {method.name:{width}}  "
            lines.append(textwrap.fill(text, 100, initial_indent=name, subsequent_indent=indent))
    return "\n".join(lines)


def families() -> dict[str, list[type[Method]]]:
    """Family -> its methods, in the order of `METHODS`."""
    by_family: dict[str, list[type[Method]]] = {}
    for method in METHODS.values():
        by_family.setdefault(method.family, []).append(method)
    return by_family


def summary(method: type[Method]) -> str:
    """The first paragraph of the class docstring."""
    return " ".join(str(method.__doc__).split("\n\n")[0].split())


def needs(method: Method) -> tuple[str, ...]:
    """The inputs that the method requires, derived from its declarations."""
    required = StepNeeds.union(map(method.needs, range(STEPS)))
    sampling, loss = method.sampling(COMPLETIONS), method.loss(LossSpec(max_tokens=1))
    sampled = "rollouts of the reference" if sampling.from_reference else "rollouts"
    declared = {
        sampled: required.rollouts,
        DEMOS[sampling.demos]: required.demos,
        "prefixes": any(stage.has_prefix for stage in sampling.stages),
        "separate gradients": required.parts > 0,
        "teacher": sampling.teacher,
        "reference": required.kl or loss.reference,
        "log-probs": loss.token is not None,
        "losses after the update": required.losses_after,
        "best weights": method.keeps_best,
    }
    return tuple(name for name, needed in declared.items() if needed)
