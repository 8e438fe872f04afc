"""Draws a seeded, stratified sample of rows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence


def sample(strata: Sequence[str], size: int, seed: int) -> set[int]:
    """Draw the positions of `size` rows without replacement; all if there are fewer.

    Each stratum gets its share of the sample up to rounding, and at least one row if `size` is not
    below the number of strata. A larger sample of the same rows contains a smaller one.

    Args:
        strata: the stratum of each row, e.g. its task; equal values for a simple random sample.
        size: number of rows to draw.
        seed: seed of the draw.
    """
    rng = random.Random(seed)
    counts, drawn = Counter(strata), Counter[str]()
    order = list(range(len(strata)))
    rng.shuffle(order)
    ranked = []
    for tie, row in enumerate(order):
        stratum = strata[row]
        # the k-th of a stratum's n rows comes after the share k / n of the sample
        ranked.append((drawn[stratum] / counts[stratum], tie, row))
        drawn[stratum] += 1
    return {row for *_, row in sorted(ranked)[:size]}
