"""Bytes that a rank sends in a step: by collective, and inside and between nodes."""

from matplotlib.figure import Figure

from study.bench.prediction import setup_of
from study.io.words import joined
from study.predictor import nodes, papers
from study.records import metrics
from study.records.groups import by, groups, lines
from study.records.runs import Run, Runs
from study.report import published, stacked, style
from study.report.grouping import ORDER, columns
from study.report.style import ordered
from study.spec import node_traffic


def table(runs: Runs) -> list[dict]:
    """Bytes that a rank sends in a step, as a multiple of one all-reduce of the gradients: counted, and as published.

    Bytes count as in the ZeRO paper, for rings: an all-reduce sends the data twice, every other collective once.
    """
    rows = []
    known = groups([run for run in runs.done if run.traffic and run.ranks > 1 and run.parameters])
    for group, line, repeats in ((group, *each) for group, members in known.items() for each in lines(members).items()):
        run = repeats[0]
        all_reduce = 2 * run.parameters * (2 if run.precision == "bf16_cast" else 4) * (run.ranks - 1) / run.ranks
        moved = {kind: sent / all_reduce for kind, sent in sent_bytes(run).items()}
        # Without collectives too small for a bar, such as averaging a loss over ranks.
        counted = {kind.replace("_", "-"): times for kind, times in moved.items() if times > 1e-4}
        paper = {"reduce-scatter": 0.5, "all-gather": 1.0 if run.stage == 3 else 0.5}
        printed = {"any": published.TRAFFIC_000[run.arm]} if run.arm in published.TRAFFIC_000 else {}
        place = {"group": group, "line": line, "passes": run.accumulation} | columns(run, "arm", "ranks", "kind")
        for source, bars, n in (
            ("counted", counted, len(repeats)),
            ("ZeRO paper", paper if run.stage else {} if run.record.observed.fsdp else {"all-reduce": 1.0}, 0),
            ("document 000", printed, 0),
        ):
            bar = place | {"source": source}
            rows += [bar | {"collective": kind, "times": times, "n": n} for kind, times in bars.items()]
    return rows


def sent_bytes(run: Run) -> dict[str, float]:
    """What the first rank sends in a step, by collective. Rings: an all-reduce sends the data twice."""
    sent = dict.fromkeys(run.traffic, 0.0)
    for kind, count in run.record.traffic.per_rank[0].items() if sent else ():
        for ranks, size_bytes in count.by_ranks(run.ranks).items():
            sent[kind] += papers.wire_bytes({kind: size_bytes}, len(ranks))
    return sent


def between_nodes(runs: Runs, node_ranks: int = 2) -> list[dict]:
    """Bytes of a step inside nodes of `node_ranks` ranks and between them, and what a rank then holds.

    A node sends on rings that enter and leave each node once. `kernel`: bytes that the kernel saw written, divided by
    what gloo should write. Only models with formulas have predictions.
    """
    several = [run for run in runs.done if run.traffic and run.ranks > node_ranks and run.ranks % node_ranks == 0]
    rows = []
    for group, members in groups(several).items():
        members.sort(key=lambda run: ORDER.get(run.arm, len(ORDER)))
        rows += [{"group": group} | _between_nodes(run, node_ranks) for run in members]
    return rows


def _between_nodes(run: Run, node_ranks: int) -> dict:
    moved = {kind: count.by_ranks(run.ranks) for kind, count in run.record.traffic.per_rank[0].items()}
    split, setup = node_traffic.by_node(moved, node_ranks), setup_of(run.record)
    theory = setup and node_traffic.by_node(nodes.predicted(setup), node_ranks)["between"]
    wire, kernel = metrics.wire_bytes_per_rank(run.record)[0], run.record.traffic.kernel_bytes_written[0]
    held = next((rank.at_peak for rank in run.record.memory.components.per_rank if rank.at_peak), {})
    return {
        "arm": run.arm,
        "ranks": f"{run.ranks} virtual" if run.virtual else str(run.ranks),
        "inside MB": sum(split["inside"].values()) / 1e6,
        "between MB": sum(split["between"].values()) / 1e6,
        "predicted between MB": theory and sum(theory.values()) / 1e6,
        "a node sends MB": node_traffic.sent_by_a_node(moved, node_ranks) / 1e6,
        "kernel": kernel / wire if wire and kernel else None,
        "weights at peak MB": held.get("weights", 0) / 1e6 if held else None,
        "peak MB": run.peak_bytes and run.peak_bytes / 1e6,
    }


def sentence(rows: list[dict]) -> str:
    """From `traffic.table`: multiples of an all-reduce, as counted and as published."""
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
    head = "Bytes sent in a step, as multiples of one all-reduce of the gradients, over all groups, by passes per step:"
    return f"{head}\n\n" + "\n".join(items) if items else ""


def _range(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"**{low:.3g}**" if high < 1.005 * low else f"**{low:.3g}** to **{high:.3g}**"


def title(rows: list[dict]) -> str:
    counted = [row for row in rows if row["source"] == "counted"]
    times = {line: sum(row["times"] for row in mine) for (line,), mine in by(counted, "line").items()}
    if not times:
        return "No bytes were counted"
    least, most = min(times, key=times.get), max(times, key=times.get)
    if times[most] < 1.005 * times[least]:
        return f"Every arm sends {times[most]:.2g} times the bytes of one all-reduce"
    other = "as many" if abs(times[least] - 1) < 0.005 else f"{times[least]:.2g} times"
    return f"{most} sends {times[most]:.2g} times the bytes of one all-reduce, {least} {other}"


@style.figure
def figure(rows: list[dict]) -> Figure:
    """Bytes that a rank sends in a step, as a multiple of one all-reduce of the gradients: counted and published."""
    lengths, label = [row["times"] for row in rows], "bytes sent in a step (1 = one all-reduce of the gradients)"
    text = f"Counted: {style.counted(rows)}. Bytes as sent in rings, where an all-reduce sends the data twice."
    lead = title(rows)
    return stacked.bars(rows, lengths, "collective", style.COLLECTIVES, "counted", label, text, lead, "all-reduces")
