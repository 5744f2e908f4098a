"""What slow links add to a step: the bytes that a host's link carries, at what remains of its bandwidth for data.

A ring passes each link once in each direction, wherever its ranks are, so a link carries what one rank sends. Nothing
overlaps: models as small as those of this machine's runs send their gradients as one bucket, after the backward pass.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

BITS_PER_MEGABIT = 8e-6  # megabits of a byte


@dataclass(frozen=True)
class SlowLink:
    """Constants of a link, fitted: how long it takes for data alone, and what each collective waits besides."""

    overhead: float  # seconds over those of the data at the declared bandwidth: headers, and pauses between collectives
    call_s: float

    def added_s(self, wire_bytes: float, calls: float, mbit: float) -> float:
        return self.overhead * data_s(wire_bytes, mbit) + self.call_s * calls


def data_s(wire_bytes: float, mbit: float) -> float:
    """Seconds of the data alone at the declared bandwidth."""
    return wire_bytes * BITS_PER_MEGABIT / mbit


def fit(cells: Iterable[tuple[float, float, float, float]]) -> SlowLink:
    """Least squares of relative errors, over cells of (bytes, collectives, Mbit/s, seconds added).

    A collective cannot take less than nothing: where it would, only the overhead is fitted.
    """
    parts = np.array([(data_s(wire_bytes, mbit), calls, added_s) for wire_bytes, calls, mbit, added_s in cells])
    shares = parts[:, :2] / parts[:, 2:]
    overhead, call_s = np.linalg.lstsq(shares, np.ones(len(parts)), rcond=None)[0]
    if call_s < 0:
        (overhead,), call_s = np.linalg.lstsq(shares[:, :1], np.ones(len(parts)), rcond=None)[0], 0.0
    return SlowLink(float(overhead), float(call_s))
