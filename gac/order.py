"""The order in which rows are visited: epochs shuffled from a seed, resumable at any position."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from typing import Any


class Order:
    """Infinite epochs over `n` rows; each epoch's permutation depends only on seed and epoch.

    The permutation comes from `random.Random` with a string seed, which is stable across machines
    and Python versions, so every rank computes the same order and only the position is saved.

    Args:
        n: number of rows, at least 1.
        seed: any integer.

    Raises:
        ValueError: `n < 1`.
    """

    def __init__(self, n: int, seed: int) -> None:
        if n < 1:
            raise ValueError(f"the dataset is empty (n={n}): at least one row is needed")
        self.n, self.seed = n, seed
        self.position = 0
        """Number of rows taken so far, over all epochs."""
        self._permutation = self._permute(0)

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self.position // self.n

    def take(self, k: int, step: int = 0) -> list[int]:
        """The next `k` row indices, continuing into the next epoch if this one ends.

        step: the optimizer step that uses the rows, for subclasses that depend on it.
        """
        if k < 0:
            raise ValueError(f"k must not be negative, got {k}")
        taken: list[int] = []
        while len(taken) < k:
            start = self.position % self.n
            chunk = self._permutation[start : start + k - len(taken)]
            taken += chunk
            self.position += len(chunk)
            if self.position % self.n == 0:
                self._permutation = self._permute(self.epoch)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """State for `load_state_dict`, in plain JSON types."""
        return {
            "n": self.n,
            "seed": self.seed,
            "position": self.position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position from `state`.

        Raises:
            ValueError: the state belongs to another order (rows or seed differ).
        """
        for name, key in (("number of rows", "n"), ("seed", "seed")):
            if state[key] != getattr(self, key):
                raise ValueError(
                    f"the {name} is {getattr(self, key)}, but the checkpoint was saved with "
                    f"{state[key]}: resume with the same data and seed, or use another `out`"
                )
        self.position = int(state["position"])
        self._permutation = self._permute(self.epoch)

    def _permute(self, epoch: int) -> array[int]:
        rows = array("q", range(self.n))  # eight bytes per row, a fifth of a list
        random.Random(f"{self.seed}/{epoch}").shuffle(rows)
        return rows


class MixedOrder:
    """Infinite epochs over several sources, visited in fixed proportions.

    Row indices continue from one source to the next. Each row comes from the source that is
    furthest below its share.

    Args:
        sizes: number of rows of each source.
        weights: the sources' relative shares, > 0.
        seed: seed of the order within each source.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.shares = [weight / sum(weights) for weight in weights]
        self.orders = [Order(size, seed + i) for i, size in enumerate(sizes)]

    def take(self, k: int, step: int = 0) -> list[int]:
        """The next `k` row indices, whatever the step."""
        return [self._next() for _ in range(k)]

    def _next(self) -> int:
        taken = [order.position for order in self.orders]
        behind = [share * (sum(taken) + 1) - n for share, n in zip(self.shares, taken, strict=True)]
        source = behind.index(max(behind))
        return self.starts[source] + self.orders[source].take(1)[0]

    def state_dict(self) -> dict[str, Any]:
        """State for `load_state_dict`, in plain JSON types."""
        return {"sources": [order.state_dict() for order in self.orders]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the positions from `state`. Raises ValueError if it belongs to other sources."""
        states = state.get("sources", ())
        if len(states) != len(self.orders):
            raise ValueError(
                f"this run has {len(self.orders)} sources, but the saved order has {len(states)}: "
                "resume with the same sources, or start a new run"
            )
        for order, saved in zip(self.orders, states, strict=True):
            order.load_state_dict(saved)
