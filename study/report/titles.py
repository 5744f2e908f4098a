"""What a figure shows, as its title: rows in, a short sentence out. Every number in it comes from the rows."""

from study.records import stats
from study.records.groups import by
from study.report.style import ordered
from study.text.numbers import nats, size


def losses(rows: list[dict]) -> str:
    compared = [row for row in rows if row["difference"] is not None]
    if not compared:
        return "Losses that nothing here can be held against"
    worst = max(compared, key=lambda row: row["difference"])
    if worst["difference"] == 0:
        return f"Every arm has the losses of {worst['against']}, to the last bit"
    return f"No arm is further than {nats(worst['difference'])} from {worst['against']}"


def memory(rows: list[dict]) -> str:
    """Of what was measured; where nothing was, of what is predicted."""
    of_source = by(rows, "source")
    source = next((name for (name,) in of_source if name.startswith("measured")), next(iter(of_source))[0])
    held = {line: sum(row["bytes"] for row in mine) for (line,), mine in by(of_source[source,], "line").items()}
    least, most = min(held, key=held.get), max(held, key=held.get)
    tail = "" if source.startswith("measured") else f" ({source})"
    if held[least] == held[most]:
        return f"A rank of {least} holds {size(held[least])}{tail}"
    return f"{least} holds least, {size(held[least])}; {most} most, {size(held[most])}{tail}"


def traffic(rows: list[dict]) -> str:
    counted = [row for row in rows if row["source"] == "counted"]
    times = {line: sum(row["times"] for row in mine) for (line,), mine in by(counted, "line").items()}
    if not times:
        return "Nothing was counted"
    least, most = min(times, key=times.get), max(times, key=times.get)
    if times[most] < 1.005 * times[least]:
        return f"Every arm sends {times[most]:.2g} times what an all-reduce does"
    other = "as much" if abs(times[least] - 1) < 0.005 else f"{times[least]:.2g} times"
    return f"{most} sends {times[most]:.2g} times what an all-reduce does, {least} {other}"


def peaks(rows: list[dict]) -> str:
    ranks = max(row["ranks"] for row in rows)
    held = {row["arm"]: row["bytes"] for row in rows if row["ranks"] == ranks and row["source"] == "predicted"}
    if len(held) < 2:
        return "What a rank holds as ranks are added"
    least, most = min(held, key=held.get), max(held, key=held.get)
    return f"On {ranks} ranks {least} would hold {size(held[least])}, {most} {size(held[most])}"


def capacity(rows: list[dict]) -> str:
    survived = [row for row in rows if row["size"]]
    if not survived:
        return "Nothing that was tried survives the cap"
    best = max(survived, key=lambda row: row["size"])
    alike = ordered(row["arm"] for row in survived if row["size"] == best["size"])
    unit = "" if best["what"] == "model" else " rows per pass"
    verb = "goes" if len(alike) == 1 else "go"
    return f"{' and '.join(alike)} {verb} furthest: {best['largest']}{unit}"


def ladder(rows: list[dict]) -> str:
    ups = [row for row in rows if row["what"] == "speed-up"]
    if not ups:
        return "Seconds of a step as the model grows"
    faster = [row["model"] for row in ups if row["median"] > 0]
    if not faster:
        return f"{ups[0]['arm']} is slower for every model that was tried"
    return f"{ups[0]['arm']} is faster for {len(faster)} of {len(ups)} models"


def network(rows: list[dict]) -> str:
    slowest = min((row["Mbit/s"] for row in rows if row["Mbit/s"]), default=None)
    seconds = {row["arm"]: row["median"] for row in rows if row["Mbit/s"] == slowest}
    if slowest is None or len(seconds) < 2:
        return "Seconds of a step"
    fast, slow = min(seconds, key=seconds.get), max(seconds, key=seconds.get)
    return f"At {slowest:g} Mbit/s {slow} takes {seconds[slow] / seconds[fast]:.2g} times as long as {fast}"


def batches(rows: list[dict]) -> str:
    parts = []
    for arm in ordered(row["arm"] for row in rows):
        speeds = [row["median"] for row in rows if row["arm"] == arm]
        parts.append(f"{arm} {min(speeds):.0%} to {max(speeds):.0%}")
    return f"Of DDP's speed: {', '.join(parts)}"


def frontier(rows: list[dict]) -> str:
    fast, small = min(rows, key=lambda row: row["median"]), min(rows, key=lambda row: row["peak bytes"])
    if small["peak bytes"] == fast["peak bytes"]:
        return f"{fast['line']} is the fastest and holds least"
    slower = small["median"] / fast["median"]
    return f"{small['line']} holds least and takes {slower:.2g} times as long as {fast['line']}"


def machines(rows: list[dict]) -> str:
    ratios = [row["vs A"] for row in rows]
    return f"A step takes {min(ratios):.2g} to {max(ratios):.2g} times as long as in environment A"


def scores(rows: list[dict]) -> str:
    medians = {
        name: stats.median([abs(row["error"]) for row in mine]) for (name,), mine in by(rows, "predictor").items()
    }
    best = min(medians, key=medians.get)
    return f"{best}: {medians[best]:.2%} off in the median; the others up to {max(medians.values()):.0%}"


def outside(rows: list[dict]) -> str:
    errors = [abs(row["error"]) for row in rows]
    return f"Predictions are {stats.median(errors):.1%} off in the median, {max(errors):.0%} at worst"


def checkpoints(rows: list[dict]) -> str:
    low, high = (extreme(row["bytes a parameter"] for row in rows) for extreme in (min, max))
    text = f"A checkpoint has {low:.3g} to {high:.3g} bytes a parameter"
    pairs = [(row["bytes a parameter"], row["predicted bytes a parameter"]) for row in rows]
    errors = [abs(size / predicted - 1) for size, predicted in pairs if predicted]
    return f"{text}, at most {max(errors):.1%} off the prediction" if errors else text


def saving(rows: list[dict]) -> str:
    saved, loaded = ([row[name] for row in rows if row[name] is not None] for name in ("save s", "load s"))
    text = f"The libraries save it in {min(saved):.2g} to {max(saved):.2g} s"
    return f"{text} and load it in {min(loaded):.2g} to {max(loaded):.2g} s" if loaded else text


def went_on(rows: list[dict]) -> str:
    worst = max(row["losses differ by"] for row in rows)
    exact = sum(row["losses differ by"] == 0 for row in rows)
    if worst == 0:
        return f"All {exact} that went on have the same losses to the last bit"
    return (
        f"{exact} of {len(rows)} that went on have the same losses to the last bit, the others {worst:.0e} off at most"
    )
