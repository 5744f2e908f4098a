"""The errors of predictions as words and as rows of a table."""

from study.predictor.outside.errors import Accuracy, Missed
from study.predictor.outside.published import Quantity


def lines(groups: dict[str, dict]) -> list[dict]:
    """Return a row for each group and quantity with predictions. Errors are shares of the measured value."""
    return [
        _line(name, quantity, group)
        for name, group in groups.items()
        for quantity in ("memory", "time")
        if group[quantity] is not None
    ]


def _line(name: str, quantity: str, group: dict) -> dict:
    errors = group[quantity]
    simulator = group["simulator"].get(quantity)
    own_error = simulator["median_absolute"] if simulator else group["own_error"].get(quantity)
    return {
        "source": name,
        "quantity": quantity,
        "rows": errors["count"],
        "median": _signed(errors["median_signed"]),
        "off by": percent(errors["median_absolute"]),
        "worst": _signed(errors["worst"]),
        "within 10 %": percent(errors["within_10"]),
        "within 30 %": percent(errors["within_30"]),
        "in interval": percent(errors["inside"]),
        **_of_complete(group[f"{quantity}_complete"]),
        "flat 40 % MFU": percent(errors["others"].get("flat 40 % MFU")),
        "its simulator": percent(own_error),
    }


def _of_complete(errors: dict | None) -> dict:
    names = ("complete rows", "off by (complete)", "within 10 % (complete)", "within 30 % (complete)")
    if errors is None:
        return dict.fromkeys(names)
    counted = [_counted(errors, share) for share in ("within_10", "within_30")]
    return dict(zip(names, (errors["count"], percent(errors["median_absolute"]), *counted), strict=True))


def _counted(errors: dict, share: str) -> str:
    return f"{round(errors[share] * errors['count'])} of {errors['count']}"


def misses(missed: list[Missed]) -> list[dict]:
    """Return predictions that missed, as rows of a table."""
    return [
        {
            "source": miss.source,
            "quantity": miss.quantity,
            "model": miss.model,
            "on": f"{miss.gpus} x {miss.gpu}",
            "arm": miss.arm,
            "complete": "yes" if miss.complete else "no",
            "rows": len(miss.errors),
            "off by": " to ".join(dict.fromkeys((_signed(min(miss.errors)), _signed(max(miss.errors))))),
            "why": miss.why or "not explained",
        }
        for miss in missed
    ]


def unpredicted(groups: dict[str, dict]) -> list[dict]:
    """Return the sources without any predicted row."""
    return [
        {"source": name, "rows": group["rows"]}
        for name, group in groups.items()
        if group["memory"] is None and group["time"] is None
    ]


def accuracy_in_words(accuracies: dict[Quantity, Accuracy | None]) -> str:
    """Return how accurate predictions are, in a sentence."""
    parts = []
    for quantity, accuracy in accuracies.items():
        if accuracy is not None:
            off = f"{quantity} is {percent(accuracy.median_error)} off over {accuracy.rows} rows"
            parts.append(f"{off} of {accuracy.sources} sources ({percent(accuracy.too_low)} of rows over 10% too low)")
    text = f"Compared with what others measured, each source with the same weight: {'; '.join(parts)}"
    time = accuracies["time"]
    if time is not None and time.inside is not None:
        text += f"; the interval of the time holds {percent(time.inside)} of the rows that did not decide it"
    return f"{text} (study outside --against ours)."


def percent(share: float | None) -> str | None:
    if share is None:
        return None
    return f"{share:.1%}" if abs(share) < 0.1 else f"{share:.0%}"


def _signed(share: float) -> str:
    return f"{share:+.1%}" if abs(share) < 0.1 else f"{share:+.0%}"
