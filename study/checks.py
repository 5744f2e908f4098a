"""Checks over records. Each is given the evidence, and the claim whose conditions decide what of it counts."""

from typing import Literal

from study.claim import Claim, Kind
from study.finding import NOT_TESTED, Finding

Table = dict


def _later(claim: Claim) -> Finding:
    return Finding(None, "not written yet", without=NOT_TESTED, missing="this check is not written yet")


def ran(
    evidence, claim: Claim, *, where: Table, largest: Literal["micro_batch", "model", "parameters"] | None = None,
    over: Table | None = None,
) -> Finding:  # fmt: skip
    """How runs ended; or the largest that is done while a larger one is out of memory."""
    return _later(claim)


def counted(
    evidence, claim: Claim, *, where: Table, collective: str | list[str] = "all",
    per: Literal["parameters", "step"] | None = None, over: Table | None = None,
    unit: Literal["volume", "tensors", "calls"] = "volume",
) -> Finding:  # fmt: skip
    """Bytes that collectives moved in a step: for each byte of weights, or as a ratio to the same cell elsewhere."""
    return _later(claim)


def ratio(
    evidence, claim: Claim, *, quantity: str, of: Table, to: Table, where: Table | None = None, saved: bool = False
) -> Finding:
    """A quantity in some runs over that in others, cell by equal cell."""
    return _later(claim)


def order(
    evidence, claim: Claim, *, quantity: str, arms: list[str], where: Table | None = None, within: float = 0
) -> Finding:
    """Whether arms, from the best to the worst, are in this order."""
    return _later(claim)


def same_loss(
    evidence, claim: Claim, *, margin: float, arms: list[str] | None = None, of: Table | None = None,
    to: Table | None = None, where: Table | None = None, curve: Literal["train", "eval"] = "eval",
) -> Finding:  # fmt: skip
    """Whether losses are equivalent: two one-sided tests over seeds, at 5 %."""
    return _later(claim)


def observed(evidence, claim: Claim, *, field: str, where: Table, over: str | None = None) -> Finding:
    """What the records of some runs have in a field."""
    return _later(claim)


KINDS = {each.__name__: Kind("measured", {"": each}) for each in (ran, counted, ratio, order, same_loss, observed)}
