"""Explanatory text of the page: how to read it, its symbols and the definitions of its numbers."""

from .statistics import LARGE_CHANGE
from .table import Context

HOW_TO_READ = (
    "Each color, line style and marker stands for one experiment throughout the page. "
    "Runs that differ only in their seed form one experiment: the line is their mean, and the band "
    "spans the lowest to the highest seed, over the steps that all of them have completed.",
    "In the panels (a) to (d) and (f) to (h) the bold line is smoothed (exponential average over a "
    "twelfth of the longest run); the faint trace behind a single run shows the recorded values. "
    "Their vertical axes cover the middle 98% of the recorded values, so isolated spikes may be "
    "cut off. μ and the held-out accuracies are not smoothed.",
    "Start with the table and the held-out accuracy: they show which experiment is better. The "
    "training panels show how training progressed; the mixing panels show what the controller "
    "measured and did. A gap smaller than the ± next to the numbers is not evidence.",
)

SYMBOLS = (
    ("μ", "mixing weight: the loss is (1 − μ) × policy-gradient term + μ × demonstration term"),
    ("μ*", "the weight that minimizes the estimated error of the mixed gradient"),
    ("prior", "the schedule, fixed before the run, that μ is pulled towards"),
    ("α", "how strongly μ* favors the demonstrations; adjusted to keep the KL near its target"),
    ("σₛ²", "variance of the demonstration signal (SFT: supervised fine-tuning)"),
    ("σᵣ²", "variance of the reward signal (RL: reinforcement learning)"),
    ("Δg̃²", "disagreement: how differently the two signals weigh the same tokens, 2 (1 − ρ)"),
    ("KL", "distance of the policy from the reference model, in nats per token"),
    ("entropy", "spread of the next-token distribution, in nats per token"),
)


def definitions(context: Context) -> list[tuple[str, str]]:
    """Definitions of the table columns, as (name, definition) pairs."""
    window, target = context.window, context.kl_target
    entries = [
        ("start accuracy", "held-out accuracy of the model before the first optimizer step"),
        (
            "final, best accuracy",
            "held-out accuracy at the last evaluation, and the highest after the start (selected "
            "in hindsight, so slightly optimistic)",
        ),
        (
            "KL area",
            "area under the KL curve over optimizer steps (trapezoid rule): small when the "
            "policy stays near its reference; unit: nats per token × steps",
        ),
    ]
    if target is not None:
        entries.append(
            ("KL area above target", f"the part of that area above the target of {target:g}")
        )
    return [
        *entries,
        (
            "large μ changes",
            f"fraction of consecutive controller intervals ({window} steps each) over which μ "
            f"changed by more than {LARGE_CHANGE:g}. Measured over intervals because a cap on the "
            "change per step (0.01 by default) rules out larger single steps. A steep prior also "
            "counts, so this measures movement, not only instability",
        ),
        ("length variance", "population variance, over steps, of the mean response length"),
        (
            "tokens, minutes",
            "sums over all optimizer steps; minutes are wall-clock time spent in steps, excluding "
            "evaluation and loading",
        ),
        ("±", "sample standard deviation over seeds; absent for a single seed"),
    ]
