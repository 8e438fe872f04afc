"""Data that change during a run: an order of rows for `data.order`."""

from collections.abc import Sequence

from gac.data import Example
from gac.order import Order


class Phases(Order):
    """Data that change during a run: rows with `from_step: n` replace all others in step n.

    The sets of rows have equal sizes, and one position runs through all of them.
    """

    def __init__(self, examples: Sequence[Example], seed: int) -> None:
        self.sets: dict[int, list[int]] = {}  # first step -> rows
        for i, example in enumerate(examples):
            self.sets.setdefault(example.extra.get("from_step", 0), []).append(i)
        sizes = set(map(len, self.sets.values()))
        if len(sizes) > 1 or 0 not in self.sets:
            raise ValueError(f"from_step: sets of sizes {sizes} from steps {sorted(self.sets)}")
        super().__init__(sizes.pop(), seed)

    def take(self, k: int, step: int = 0) -> list[int]:
        own = self.sets[max(start for start in self.sets if start <= step)]
        return [own[i] for i in super().take(k)]
