"""What tables show, in sentences: rows in, Markdown out. Every number in them comes from the rows."""

from collections import Counter
from collections.abc import Iterable

from study.claims.ledger import bases, counted
from study.claims.model import MEASURED, OWN, PREDICTED, READ, TRIED, VIRTUAL
from study.claims.verdict import VERDICTS
from study.records import stats
from study.records.groups import by
from study.report.published import SMALLEST_SPEEDUP_002, WORTHWHILE_FROM_BYTES_002
from study.report.style import conditions, ordered
from study.text.numbers import nats, size

OTHER_BASES = {VIRTUAL: "virtual ranks", TRIED: "trying the libraries", PREDICTED: "formulas", READ: "reading sources"}


def largest_groups(rows: list[dict], most: int) -> list[list[dict]]:
    """The groups that a notebook shows, in figures and in sentences alike: those with most arms that really ran."""

    def shown(mine: list[dict]) -> tuple[int, int, int]:
        arms = [(row.get("arm", row.get("line")), row.get("kind", "real")) for row in mine]
        return len({arm for arm, kind in arms if kind == "real"}), len({arm for arm, _ in arms}), len(mine)

    return sorted(by(rows, "group").values(), key=shown, reverse=True)[:most]


def losses(rows: list[dict]) -> str:
    """From `tables.parity`: how far the arms are apart, and how far seeds are."""
    compared = [row for row in rows if row["largest difference"] is not None]
    if not compared:
        why = "No losses are compared: no two arms here have runs with the same seed, rows per step and steps."
        return why if rows else ""
    worst = max(compared, key=lambda row: row["largest difference"])
    distance = f"{nats(worst['largest difference'])}** ({worst['line']} in {conditions(worst['group'])}"
    text = f"**At no step is an arm further from {worst['against']} than {distance}; {len(compared)} comparisons)."
    usual = [row["largest difference"] for row in compared if _is_usual(row["group"])]
    if usual and len(usual) < len(compared):
        text += f" In fp32 with AdamW the largest distance is {nats(max(usual))}."
    if seeds := [row["seeds differ by"] for row in compared if row["seeds differ by"]]:
        text += f" Another seed alone moves the loss by {stats.median(seeds):.2g}, in the median over steps."
    return text


def _is_usual(group: str) -> bool:
    """A group's label names its optimizer only where its namesakes have others."""
    named = [part.removeprefix("optimizer ") for part in group.split(", ") if part.startswith("optimizer ")]
    return "fp32" in group.split(", ") and named in ([], ["adamw"])


def script(rows: list[dict]) -> str:
    """From `tables.script`: what document 002's script did."""
    items = []
    for (kind,), mine in by(rows, "script").items():
        first = by([row for row in mine if row["step"] == mine[0]["step"]], "training")
        without, with_zero = ([row["loss"] for row in first.get((number,), [])] for number in (1, 2))
        calls = {row["deepspeed.initialize calls"] for row in mine if row["training"] == 2}
        if without and with_zero:
            verb = "never calls" if not max(calls) else "calls" if min(calls) else "does not always call"
            medians = f"{stats.median(with_zero):.3f}, and {stats.median(without):.3f} without ZeRO"
            items.append(f"- **{kind}**: the “ZeRO” training {verb} DeepSpeed; its first mean loss is {medians}.")
    return "\n".join(items)


def memory(rows: list[dict], most: int = 2) -> str:
    """From `tables.memory`: which arm holds least, of what it consists, and how good the formulas are.

    It is about the first `most` groups, the same that are drawn.
    """
    totals = {key: sum(row["bytes"] for row in mine) for key, mine in by(rows, "group", "line", "source").items()}
    sentences = []
    for mine in largest_groups(rows, most):
        group = mine[0]["group"]
        held = {line: totals[group, line, "measured"] for (line,) in by(mine, "line")}
        least, largest = min(held, key=held.get), max(held, key=held.get)
        measured = [row for row in mine if (row["line"], row["source"]) == (largest, "measured")]
        part = max(measured, key=lambda row: row["bytes"])
        if held[least] < held[largest]:
            lead = f"{least} holds least at its peak ({size(held[least])}) and {largest} most ({size(held[largest])})"
        else:
            lead = f"{' and '.join(held)} {'holds' if len(held) == 1 else 'hold'} {size(held[least])} at the peak"
        share = part["bytes"] / held[largest]
        sentences.append(f"In {conditions(group)} **{lead}**; its largest part is {part['part']}, {share:.0%}.")
    predicted = {key[:2]: total for key, total in totals.items() if key[2] == "predicted"}
    errors = [abs(total / totals[*place, "measured"] - 1) for place, total in predicted.items()]
    if errors:
        median = f"{_percent(stats.median(errors))} in the median over {len(errors)} peaks"
        sentences.append(f"The formulas are off by {median}, and by {_percent(max(errors))} at worst.")
    return " ".join(sentences)


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 1e-3 else "less than 0.1%"


def traffic(rows: list[dict]) -> str:
    """From `tables.traffic`: multiples of an all-reduce, as counted and as published."""
    items = []
    for arm in ordered(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == arm]
        times = {
            key: sum(row["times"] for row in bar) for key, bar in by(mine, "source", "passes", "group", "line").items()
        }
        counted = {passes: [] for _, passes, *_ in sorted(times)}
        for (source, passes, *_), total in times.items():
            counted[passes] += [total] if source == "counted" else []
        alike = by([{"range": _range(values), "passes": str(n)} for n, values in counted.items() if values], "range")
        spans = {span: joined([each["passes"] for each in same]) for (span,), same in alike.items()}
        words = [f"{span} ({which} pass{'es' * (which != '1')})" for span, which in spans.items()]
        published = {source: total for (source, *_), total in times.items() if source != "counted"}
        words += [f"{source} {total:.3g}" for source, total in published.items()]
        items.append(f"- {arm}: {'; '.join(words)}")
    head = (
        "Bytes sent in a step over those of one all-reduce of the gradients, over all groups, by the passes of a step:"
    )
    return f"{head}\n\n" + "\n".join(items) if items else ""


def _range(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"**{low:.3g}**" if high < 1.005 * low else f"**{low:.3g}** to **{high:.3g}**"


def frontier(rows: list[dict], most: int = 2) -> str:
    """From `tables.frontier`: the fastest, the smallest, and what one costs of the other, of `most` groups."""
    sentences = []
    for mine in largest_groups(rows, most):
        fast, small = min(mine, key=lambda row: row["median"]), min(mine, key=lambda row: row["peak bytes"])
        speed, held = f"{fast['median']:.3g} s a step", size(fast["peak bytes"])
        if len(mine) == 1:
            rest = f"there is only {fast['line']}: {speed}, {held}."
        elif small["peak bytes"] == fast["peak bytes"]:
            rest = f"{fast['line']} is the fastest ({speed}) and the smallest ({held})."
        else:
            less, slower = 1 - small["peak bytes"] / fast["peak bytes"], small["median"] / fast["median"]
            offloaded = f"{small['line']} holds {less:.0%} less and takes {slower:.2g} times as long."
            rest = f"{fast['line']} is the fastest ({speed}); {offloaded}"
        sentences.append(f"In {conditions(mine[0]['group'])} {rest}")
    return " ".join(sentences)


def ladder(rows: list[dict]) -> str:
    """From `tables.ladder`: the speed-up of the smallest and of the largest model."""
    ups = sorted((row for row in rows if row["what"] == "speed-up"), key=lambda row: row["parameters"])
    if not ups:
        return ""
    small, large = (
        f"**{row['median']:+.0%}** for the {which} ({row['model']}, {row['weights GB']:.3g} GB"
        for row, which in ((ups[0], "smallest model"), (ups[-1], "largest here"))
    )
    faster = next((row["model"] for row in ups if row["median"] > 0), None)
    first = f"The smallest that is faster with it is {faster}." if faster else "None is faster with it."
    printed = f"{SMALLEST_SPEEDUP_002:+.0%} for its smallest, and a gain beyond {WORTHWHILE_FROM_BYTES_002 / 1e9:g} GB"
    text = f"The speed-up by {ups[0]['arm']} is {small} of weights) and {large}). {first}"
    return f"{text} The document prints {printed}."


def batches(rows: list[dict]) -> str:
    """From `tables.batches`: whether a larger batch favours an arm."""
    items = []
    for (varied, arm), mine in by([row for row in rows if row["source"] == "measured"], "varied", "arm").items():
        if len(mine) > 1:
            first, *_, last = sorted(mine, key=lambda row: row["batch"])
            small = f"{first['median']:.0%} of DDP's speed at {first['batch']} rows a step"
            items.append(f"- {varied}, {arm}: {small}, {last['median']:.0%} at {last['batch']}")
    return "\n".join(items)


def network(rows: list[dict]) -> str:
    """From `network.network`: how well a slow link is predicted, and what it costs the arms."""
    limited = [row for row in rows if row["error"] is not None]
    if not limited:
        return ""
    held_out = [abs(row["error"]) for row in limited if row["held out"]]
    text = f"**Of {len(held_out)} held-out cells the median error is {stats.median(held_out):.1%}" if held_out else ""
    text += f", the largest {max(held_out):.0%}.**" if held_out else ""
    items = []
    for (ranks, passes, mbit), mine in by(limited, "ranks", "passes", "Mbit/s").items():
        of_arm = {row["arm"]: row["median"] for row in mine if row["hosts"] == max(row["hosts"] for row in mine)}
        if "ddp" in of_arm:
            others = [f"{arm} {of_arm[arm] / of_arm['ddp']:.2f}" for arm in ordered(of_arm) if arm != "ddp"]
            count = "1 pass" if passes == 1 else f"{passes} passes"
            items.append(f"- {ranks} ranks, {count}, {mbit:g} Mbit/s: {', '.join(others)} times DDP's step")
    return "\n".join([text, "", *items])


def capacity(rows: list[dict]) -> str:
    """From `tables.capacity`: the largest that survived, arm by arm."""
    items = []
    for row in rows:
        unit = "" if row["what"] == "model" else " rows per pass"
        text = "nothing that was tried survives"
        if row["largest"] is not None:
            text = f"the largest that survives is {row['largest']}{unit}"
        if row["failed"] is not None:
            text += f", and the smallest that does not is {row['failed']}{unit}"
        items.append(f"- {conditions(row['group'])}, {row['arm']}: {text}")
    return "\n".join(items)


def scores(rows: list[dict]) -> str:
    """From `tables.scores`: the median and worst error of each predictor."""
    items = []
    for (name,), mine in by(rows, "predictor").items():
        errors = [abs(row["error"]) for row in mine]
        items.append(f"{name} {stats.median(errors):.2%} in the median, {max(errors):.0%} at worst ({len(mine)} cells)")
    return f"Off by: {'; '.join(items)}." if items else ""


def verdicts(rows: list[dict]) -> str:
    """How many claims got which verdict, and what the verdicts rest on."""
    mine, resting = counted(rows), bases(rows)
    if not mine:
        return ""
    own = Counter(row["verdict"] for row in mine if row["basis"] == OWN)
    counts = Counter(row["verdict"] for row in mine if row["basis"] != OWN)
    text = f"Of {sum(counts.values())} claims about the world: {_counts(counts, VERDICTS)}."
    others = [f"{OTHER_BASES[basis]} ({resting[basis]})" for basis in OTHER_BASES if resting[basis]]
    text += f" The verdicts rest on {joined([f'**real runs ({resting[MEASURED]})**', *others])}."
    if own:
        text += (
            f" Of {sum(own.values())} that were held against their document's own numbers: {_counts(own, VERDICTS)}."
        )
    premises = sum(row["premise"] for row in rows)
    return text + (f" Not counted: premises, which are ours ({premises})." if premises else "")


def _counts(counts: Counter, names: Iterable[str]) -> str:
    return ", ".join(f"**{counts[name]} {name}**" for name in names if counts[name])


def joined(parts: list[str]) -> str:
    """Words as a sentence lists them: a, b and c."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def _inside(row: dict) -> str:
    return f", {row['in interval']} in the interval meant to hold 80 %" if row["in interval"] else ""


def outside(rows: list[dict]) -> str:
    """From `tables.outside_errors`: how far predictions are off, over all sources and where rows decided nothing."""
    names = {"all": "over all sources", "all of role test": "over rows that decided nothing of it"}
    return "\n".join(
        f"- **{row['quantity'].capitalize()}**, {names[row['source']]}: {row['off by']} off in the median of "
        f"{row['rows']} published numbers (signed: {row['median']}; worst: {row['worst']}); {row['within 10 %']} are "
        f"within 10 %, {row['within 30 %']} within 30 %{_inside(row)}."
        for row in rows
        if row["source"] in names
    )
