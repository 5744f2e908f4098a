"""The errors of predictions as rows of a table, from the kept summary."""


def lines(groups: dict[str, dict]) -> list[dict]:
    """A row for each group and quantity with predictions. Errors are shares of the measured value, in per cent."""
    return [
        _line(name, quantity, group)
        for name, group in groups.items()
        for quantity in ("memory", "time")
        if group[quantity] is not None
    ]


def _line(name: str, quantity: str, group: dict) -> dict:
    errors, complete, simulator = group[quantity], group[f"{quantity}_complete"], group["simulator"].get(quantity)
    order = group["order"] if quantity == "time" else None
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
        "in interval (mean of sources)": percent(group["inside_of_sources"]) if quantity == "time" else None,
        "complete rows": complete and complete["count"],
        "off by (complete)": complete and percent(complete["median_absolute"]),
        "within 10 % (complete)": complete and _counted(complete, "within_10"),
        "within 30 % (complete)": complete and _counted(complete, "within_30"),
        "Kendall's tau": order and round(order["of_step_times"], 2),
        "of tokens/s": order and round(order["of_tokens_per_s"], 2),
        "flat 40 % MFU": percent(errors["others"].get("flat 40 % MFU")),
        "earlier middle": percent(errors["others"].get("earlier middle")),
        "its simulator": percent(simulator["median_absolute"] if simulator else group["own_error"].get(quantity)),
    }


def _counted(errors: dict, share: str) -> str:
    return f"{round(errors[share] * errors['count'])} of {errors['count']}"


def misses(missed: list[dict]) -> list[dict]:
    """Predictions that missed, as rows of a table."""
    return [
        {
            "source": miss["source"],
            "quantity": miss["quantity"],
            "model": miss["model"],
            "on": f"{miss['GPUs']} x {miss['GPU']}",
            "arm": miss["arm"],
            "complete": "yes" if miss["complete"] else "no",
            "rows": miss["rows"],
            "off by": " to ".join(dict.fromkeys((_signed(miss["from"]), _signed(miss["to"])))),
            "why": miss["why"] or "not explained",
        }
        for miss in missed
    ]


def unpredicted(groups: dict[str, dict]) -> list[dict]:
    """The sources without any predicted row."""
    return [
        {"source": name, "rows": group["rows"]}
        for name, group in groups.items()
        if group["memory"] is None and group["time"] is None
    ]


def percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}" if abs(share) < 0.1 else f"{share:.0%}"


def _signed(share: float) -> str:
    return f"{share:+.1%}" if abs(share) < 0.1 else f"{share:+.0%}"
