"""The seconds that slow links add to a step: the bytes that a host's link carries, over its bandwidth for data.

A ring passes each link once in each direction, wherever its ranks are, so a link carries what one rank sends. Nothing
overlaps: models as small as those of this machine's runs send their gradients as one bucket, after the backward pass.

Reduced bytes and gathered bytes have a constant each, for each number of ranks. For two ranks, reducing takes the time
of the data. Gathering took two ranks 1.57 times as long, with any arm, but not four ranks; the reason is unknown. It is
not a wait in each collective: stage 3 makes 43 calls a step, stage 2 makes 3, and both take equally long.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

BITS_PER_MEGABIT = 8e-6  # megabits of a byte


@dataclass(frozen=True)
class SlowLink:
    """Fitted constants of a link: how many times longer bytes take than the data alone at the declared bandwidth."""

    reduced: float
    gathered: float

    def added_s(self, reduced_bytes: float, gathered_bytes: float, mbit: float) -> float:
        return self.reduced * data_s(reduced_bytes, mbit) + self.gathered * data_s(gathered_bytes, mbit)


def data_s(wire_bytes: float, mbit: float) -> float:
    """Seconds of the data alone at the declared bandwidth."""
    return wire_bytes * BITS_PER_MEGABIT / mbit


def fit(cells: Iterable[tuple[float, float, float, float]]) -> SlowLink | None:
    """Least squares of relative errors, over cells of (bytes reduced, bytes gathered, Mbit/s, seconds added).

    None if the cells do not determine both constants.
    """
    parts = np.array([(data_s(reduced, mbit), data_s(gathered, mbit), s) for reduced, gathered, mbit, s in cells])
    shares = parts[:, :2] / parts[:, 2:]
    constants, _, rank, _ = np.linalg.lstsq(shares, np.ones(len(parts)), rcond=None)
    return SlowLink(*map(float, constants)) if rank == 2 else None
