"""What the page says in words: how to read it, the symbols, the definitions of its numbers."""

from .statistics import LARGE_CHANGE
from .table import Context

HOW_TO_READ = (
    "Every colour, line style and marker is one experiment and stays the same on the whole page. "
    "Runs that differ only by their seed are one experiment: the line is their mean, the band "
    "reaches from the lowest to the highest seed, over the steps that all of them have reached.",
    "In the panels (a) to (d) and (f) to (h) the bold line is smoothed (exponential average over a "
    "twelfth of the longest run); the faint trace behind a single run is what each step recorded. "
    "Their vertical axes show the middle 98 % of the recorded values, so a lone spike may leave "
    "the picture. μ and the held-out accuracies are drawn as they are.",
    "Start with the table and the held-out accuracy: they say which experiment is better. The "
    "training panels say how it got there; the mixing panels say what the controller saw and did. "
    "A gap smaller than the ± beside the numbers is not evidence.",
)

SYMBOLS = (
    ("μ", "mixing weight: the loss is (1 − μ) × policy-gradient term + μ × demonstration term"),
    ("μ*", "the weight that would minimise the error of the mixed gradient, by the noise measured"),
    ("prior", "the schedule that μ is drawn towards, fixed before the run"),
    ("α", "how far μ* trusts the demonstrations; raised or lowered to keep the KL near its target"),
    ("σₛ²", "variance of the demonstration signal (SFT: supervised fine-tuning)"),
    ("σᵣ²", "variance of the reward signal (RL: reinforcement learning)"),
    ("Δg̃²", "disagreement: how differently the two signals weigh the same tokens, 2 (1 − ρ)"),
    ("KL", "distance of the policy from the reference model, in nats per token"),
    ("entropy", "spread of the next-token distribution, in nats per token"),
)


def definitions(context: Context) -> list[tuple[str, str]]:
    """(name of the table's column, what exactly it is)."""
    window, target = context.window, context.kl_target
    entries = [
        ("start accuracy", "held-out accuracy of the model before the first optimiser step"),
        ("final, best accuracy", "held-out accuracy at the last evaluation, and the highest of all "
         "after the start (chosen with hindsight, so a little too good)"),
        ("KL area", "area under the KL curve over optimiser steps (trapezoid rule): small when the "
         "policy stays near its reference; unit: nats per token × steps"),
    ]  # fmt: skip
    if target is not None:
        entries.append(
            ("KL area above target", f"the part of that area above the target of {target:g}")
        )
    return [
        *entries,
        ("large μ changes", f"share of controller intervals ({window} steps each, one after the "
         f"other) over which μ changed by more than {LARGE_CHANGE:g}. Intervals, because a cap on "
         "the change per step, such as the default 0.01, makes larger single steps impossible; a "
         "steep prior counts too, so this measures movement, not only unrest"),
        ("length variance", "population variance, over steps, of the mean response length"),
        ("tokens, minutes", "sums over all optimiser steps; minutes are wall time in the steps, "
         "without evaluation and loading"),
        ("±", "sample standard deviation over seeds; absent for a single seed"),
    ]  # fmt: skip
