"""The list of methods that `gac methods` prints."""

from __future__ import annotations

import textwrap

from gac_kernels import LossSpec

from . import METHODS
from .base import Method, Needs

DEMOS = {"apart": "demonstrations", "prompt": "demonstrations of the sampled prompts"}
STEPS = 1000  # number of steps to inspect; by then every method has needed everything it ever needs
COMPLETIONS = 8  # rollouts per prompt assumed here


def methods_table() -> str:
    """Table of the methods by family: name, summary, source, requirements and extra cost per step."""
    width = max(map(len, METHODS))
    lines = []
    for family, members in families().items():
        lines.append(f"{family}:")
        for method in members:
            words = f"{summary(method)} [{method.source}] Needs: {', '.join(needs(method()))}."
            if method.cost != "none":
                words += f" Extra: {method.cost}."
            indent = " " * (width + 4)
            lines.append(
                textwrap.fill(
                    words,
                    100,
                    initial_indent=f"  {method.name:{width}}  ",
                    subsequent_indent=indent,
                )
            )
    return "\n".join(lines)


def families() -> dict[str, list[type[Method]]]:
    """Family -> its methods, in the order of `METHODS`."""
    found: dict[str, list[type[Method]]] = {}
    for method in METHODS.values():
        found.setdefault(method.family, []).append(method)
    return found


def summary(method: type[Method]) -> str:
    """The first paragraph of the class docstring."""
    return " ".join((method.__doc__ or "").split("\n\n")[0].split())


def needs(method: Method) -> tuple[str, ...]:
    """What the trainer must provide, derived from the method's declarations."""
    found = Needs.union(map(method.needs, range(STEPS)))
    sampling, loss = method.sampling(COMPLETIONS), method.loss(LossSpec(max_tokens=1))
    sampled = "rollouts of the reference" if sampling.from_reference else "rollouts"
    declared = {
        sampled: found.rollouts,
        DEMOS[sampling.demos]: found.demos,
        "prefixes": any(stage.prefix for stage in sampling.stages),
        "separate gradients": found.parts > 0,
        "reference": found.kl or loss.reference,
        "log-probs": loss.token is not None,
        "losses after the update": found.losses_after,
        "best weights": method.keeps_best,
    }
    return tuple(name for name, needed in declared.items() if needed)
