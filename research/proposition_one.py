"""When does the potential of the paper's Proposition 1 fall? `python -m research.proposition_one`.

The proposition: with eta <= 1 / (2 L), lambda <= rho / (rho + 1) and a cap c on the change of mu,

    E[V_t+1 - V_t] <= -zeta E|grad L|^2 + O(c^2),   V = |theta - theta*|^2 + rho (mu - alpha)^2,

with zeta = min(1 / (2 L), rho / (rho + 1)). Each case here is a pair of smooth losses for which
every step is computed exactly, noise included. For a sequence of caps, it reports the least
constant C with E[V_t+1 - V_t] <= -zeta E|grad L|^2 + C c^2 on all steps: the proposition holds
only if C stays bounded as c falls. `repaired` is a bound that does hold for convex losses. Writes
the table of research/proposition_one.md.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gac.evaluation.table import markdown_table

PAGE = Path(__file__).with_name("proposition_one.md")
MARK = "<!-- below: python -m research.proposition_one -->\n"
CAPS = (0.02, 0.01, 0.005, 0.0025)
STEPS = 500
RHO, BLEND = 1.0, 0.5  # rho, and lambda = rho / (rho + 1)
Gradient = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Case:
    """Two losses, their noise, and where mu goes."""

    name: str
    assumption: str
    """What this case has, or lacks."""
    smoothness: float = 1.0
    """L."""
    rate: float = 1.0
    """eta as a multiple of 1 / (2 L), in (0, 1]."""
    sft: tuple[float, ...] = (0.0, 0.0)
    """Minimizer of the SFT loss; that of the RL loss is the origin."""
    noise: float = 0.0
    """Variance of the mixed gradient, E|eps|^2."""
    bias: float = 0.0
    """Norm of a constant bias of the gradient, as of clipping."""
    mu_star: float = 0.7
    """The mu that the controller moves to."""
    alpha: float = 0.7
    mu: float = 0.2
    """mu at the start."""
    start: tuple[float, ...] = (1.0, 0.5)
    """theta at the start, relative to theta*."""
    wave: bool = False
    """Both losses are L (1 - cos x), smooth but not convex, instead of L x^2 / 2."""

    def gradient(self, theta: np.ndarray, mu: float) -> np.ndarray:
        """The gradient of the mixed loss, without noise and bias."""
        slope: Gradient = np.sin if self.wave else lambda x: x
        sft = slope(theta - np.array(self.sft))
        return self.smoothness * (mu * sft + (1 - mu) * slope(theta))

    @property
    def optimum(self) -> np.ndarray:
        """theta*: the minimizer at mu = alpha."""
        return self.alpha * np.array(self.sft)


CASES = (
    Case("ideal", "both losses have one minimum, no noise, mu* = alpha, eta = 1 / (2 L), L = 1"),
    Case("small eta", "the same with eta = 1 / (20 L)", rate=0.1),
    Case("large L", "the same with L = 4 and eta = 1 / (2 L)", smoothness=4.0),
    Case("noise", "gradients have noise of variance 0.1", noise=0.1),
    Case("bias", "gradients have a bias of norm 0.1, as from clipping", bias=0.1),
    Case(
        "other optimum",
        "mu* = 0.3, alpha = mu = 0.7: the controller converges to mu*",
        mu_star=0.3,
        mu=0.7,
    ),
    Case("two minima", "the minima of the two losses differ", sft=(2.0, 0.0), start=(0.0, 0.0)),
    Case("not convex", "1 - cos, started beyond its maximum", wave=True, start=(4.0, 0.0)),
)


@dataclass(frozen=True)
class Course:
    """Values along a path, one per step."""

    changes: np.ndarray
    """E[V_t+1 - V_t | theta_t]."""
    squares: np.ndarray
    """`|grad L|^2` of the mixed loss."""
    potential: np.ndarray
    """V_t."""
    repaired: np.ndarray
    """The bound of `repaired`."""


def follow(case: Case, cap: float, steps: int = STEPS, seed: int = 0) -> Course:
    """Train with plain gradient descent; each change of V is its expectation over the noise."""
    rng, eta = np.random.default_rng(seed), case.rate / (2 * case.smoothness)
    theta, mu = case.optimum + np.array(case.start), case.mu
    bias = np.zeros(len(theta))
    bias[0] = case.bias
    changes, squares, potential, bounds = [], [], [], []
    for _ in range(steps):
        gradient = case.gradient(theta, mu)
        mean = theta - eta * (gradient + bias)
        change = float(np.clip(BLEND * (case.mu_star - mu), -cap, cap))
        before = _square(theta - case.optimum) + RHO * (mu - case.alpha) ** 2
        after = _square(mean - case.optimum) + eta**2 * case.noise
        after += RHO * (mu + change - case.alpha) ** 2
        changes.append(after - before)
        squares.append(_square(gradient))
        potential.append(before)
        bounds.append(repaired(case, theta, mu, change))
        spread = math.sqrt(case.noise / len(theta))
        theta, mu = mean - eta * spread * rng.standard_normal(len(theta)), mu + change
    return Course(*map(np.array, (changes, squares, potential, bounds)))


def repaired(case: Case, theta: np.ndarray, mu: float, change: float) -> float:
    """A bound of E[V_t+1 - V_t] for convex losses: the proposition's, with the terms that it lacks.

    With d = theta - theta*, g the gradient of the mixture at mu, and g* that at alpha::

        - 2 eta / L |g*|^2 + eta^2 |g + b|^2        descent, by co-coercivity
        + eta^2 sigma^2                             noise
        + 2 eta |d| |b|                             bias
        + 2 eta |d| |mu - alpha| |g_s - g_r|        the losses have other minima
        + 2 rho (mu - alpha) delta + rho delta^2    delta = mu_t+1 - mu_t, at most c
    """
    eta, away = case.rate / (2 * case.smoothness), _norm(theta - case.optimum)
    gradient, target = case.gradient(theta, mu), case.gradient(theta, case.alpha)
    difference = case.gradient(theta, 1.0) - case.gradient(theta, 0.0)
    bias = np.zeros(len(theta))
    bias[0] = case.bias
    descent = eta**2 * _square(gradient + bias) - 2 * eta / case.smoothness * _square(target)
    others = case.bias + abs(mu - case.alpha) * _norm(difference)
    controller = 2 * RHO * (mu - case.alpha) * change + RHO * change**2
    return descent + eta**2 * case.noise + 2 * eta * away * others + controller


def constant(case: Case, cap: float) -> float:
    """The least C >= 0 for which the proposition's inequality holds on every step."""
    path = follow(case, cap)
    zeta = min(1 / (2 * case.smoothness), RHO / (RHO + 1))
    return max(float((path.changes + zeta * path.squares).max()) / cap**2, 0.0)


def holds(constants: Sequence[float]) -> bool:
    """Whether C is bounded: it does not double while the cap falls to an eighth."""
    return constants[-1] <= 2 * constants[0] + 1e-9


def table() -> str:
    """One line per case."""
    rows = []
    for case in CASES:
        constants = [constant(case, cap) for cap in CAPS]
        path = follow(case, CAPS[1])
        running = path.potential > 1e-12
        rows.append(
            [
                case.name,
                case.assumption,
                *(f"{c:.3g}" for c in constants),
                "yes" if holds(constants) else "**no**",
                f"{100 * np.mean(path.changes[running] < 0):.0f}%",
                f"{path.potential[0]:.2f}",
                f"{path.potential[-200:].mean():.2f}",
                "yes" if np.all(path.changes <= path.repaired + 1e-12) else "**no**",
            ]
        )
    head = ["case", "what it has", *(f"C, cap {cap:g}" for cap in CAPS), "C is bounded"]
    head += ["steps on which V falls", "V at first", "at the end", "repaired bound holds"]
    return markdown_table(head, rows) + "\n"


def _norm(x: np.ndarray) -> float:
    return math.sqrt(_square(x))


def _square(x: np.ndarray) -> float:
    return float(x @ x)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m research.proposition_one", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is out of date")
    before, _, after = PAGE.read_text().partition(MARK)
    text = f"{before}{MARK}\n{table()}"
    if parser.parse_args(argv).check:
        return int(after != text.removeprefix(before + MARK))
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
