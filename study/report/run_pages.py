"""A page for each run: how it ended, its curves, memory and traffic, its problems and avoidable costs."""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from study.bench.prediction import predicted
from study.errors import Stop
from study.io import files
from study.io.files import safe_join, safe_name
from study.io.numbers import count, short, size
from study.ledger.ledger import Verdict
from study.predictor.architecture import FAMILIES
from study.records import metrics, store
from study.records.privacy import redact
from study.records.runs import Run, Runs
from study.records.schema import RankComponents, Record, ScriptTraining
from study.report import charts, claim_pages, style
from study.report.templating import write_page
from study.report.topics import every_run, memory
from study.report.topics.every_run import RunRow
from study.spec.shapes import SHAPES, shape_of
from study.watcher import diagnosis
from study.watcher.facts import Facts

MOST_RAW_BYTES = 256 * 2**20  # of one of them: a longer one is left out
LOGS = ("log.txt", "output.txt", "steps.jsonl")  # what of a run folder goes into the site, beside its record
MOST_LOG = 200_000  # characters of a log that a page shows; the file beside it has all of them
FORMULAS = "by formulas"  # the bar of what was predicted
NAMES = {"all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter", "all_gather": "all-gather"}


def slugs(runs: Runs) -> dict[Run, str]:
    """The names of the runs' pages. Two runs of one name have two pages; some file systems ignore case."""
    taken, names = set(), {}
    for run in runs:
        name = safe_name(run.name)
        candidates = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        names[run] = next(slug for slug in candidates if slug.casefold() not in taken)
        taken.add(names[run].casefold())
    return names


@dataclass(frozen=True)
class Page:
    """A page that was written: the row of its run in the list of all runs, and its name."""

    row: RunRow
    slug: str
    has_log: bool


def write(
    runs: Runs, names: dict[Run, str], verdicts: list[Verdict], folder: Path, titles: dict[str, str]
) -> tuple[list[Page], list[str]]:
    """Write a page for each run, and its files beside it. Return the pages, and a sentence for each run without one.

    The files are not named as in a run folder, so that nothing takes the site for runs. The claims of `verdicts` have
    pages.
    """
    pages, problems = [], []
    resting = claim_pages.used_by(verdicts)
    about = {"up": "../", "titles": titles, "here": "run", "claims": {verdict.claim.id for verdict in verdicts}}
    for run in runs:
        try:
            pages.append(_write(run, names[run], folder, about | {"verdicts": resting.get(run.name, [])}))
        except Exception as error:  # a record may be odd in any way, and none ends a report
            reason = error.what if isinstance(error, Stop) else repr(error)
            problems.append(f"{run.folder.name} has no page ({reason})")
    return pages, problems


def _write(run: Run, slug: str, folder: Path, about: dict) -> Page:
    texts = _texts(run)
    for file, content in texts.items():
        safe_join(folder, f"{slug}.{file}").write_text(content, errors="replace")
    log = texts.get("log.txt") or texts.get("output.txt") or ""
    row = every_run.row(run)
    values = page(run) | {"row": row, "run": run, "slug": slug, "files": list(texts), "log": log[-MOST_LOG:]}
    write_page(safe_join(folder, f"{slug}.html"), "run.html", **about, **values)
    return Page(row, slug, bool(log))


def page(run: Run) -> dict:
    """Return what the page of a run shows."""
    record = run.record.model_dump(by_alias=True, include={"error", "requested", "observed"})
    judged, unknown = diagnosis.looked_at(run.record)
    ranks = [rank for rank in run.record.memory.components.per_rank if rank.tracked_peak_bytes]
    return {
        "results": _results(run),
        "error": record["error"],
        "findings": diagnosis.diagnose(run.record),
        "judged": judged,
        "not_judged": unknown,
        "losses": _losses(run),
        "seconds": _seconds(run),
        "memory": _memory(run),
        "components": _components(run),
        "peaks": sorted(rank.tracked_peak_bytes or 0 for rank in ranks),
        "traffic": _traffic(run),
        "asked": list(_asked(run.record)),
        "settings": _flat(record["requested"]),
        "observed": _flat(record["observed"]),
    }


def _results(run: Run) -> dict[str, str]:
    """What a reader wants to know first, in human units. What is not known is left out."""
    record, moved = run.record, sum(run.traffic.values())
    evaluation = metrics.final_evaluation(record)
    speed = metrics.tokens_per_s(record)
    peak_name = "peak of a rank's GPU memory" if run.peak_of == "allocated" else "peak of a rank's tensors"
    results = [
        ("last training loss (nats)", run.losses and short(run.losses[-1])),
        ("evaluation loss (nats)", evaluation and short(evaluation.eval_loss)),
        ("accuracy", evaluation and evaluation.accuracy is not None and f"{evaluation.accuracy:.1%}"),
        ("seconds of a step (median)", run.median_step_s and f"{run.median_step_s:.3g} s"),
        ("tokens per second", speed and f"{speed:,.0f}"),
        (peak_name, run.peak_bytes and size(run.peak_bytes)),
        ("in collectives, per rank and step", moved and size(moved)),
        ("parameters", run.parameters and count(run.parameters)),
    ]
    return {label: text for label, text in results if text}


def _losses(run: Run) -> dict | None:
    if run.record.is_script:  # several trainings, logged every so many steps
        series, title, caption = _of_script(run.record.observed.runs, run.record.observed.logging_steps or 1)
    else:
        evaluations = [(each.step, each.eval_loss) for each in run.record.loss.eval]
        series = {"training": list(enumerate(run.losses, 1)), "evaluation": evaluations}
        title, caption = "Losses of evaluations", "Mean over ranks, at each optimizer step."
        if run.losses:
            ends = f"from {short(run.losses[0])} to {short(run.losses[-1])}"
            title = f"The training loss goes {ends} in {len(run.losses)} steps"
    drawn = charts.chart(series, "optimizer step", "loss (nats)")
    return {"title": title, "chart": drawn, "caption": caption} if drawn else None


def _of_script(trainings: list[ScriptTraining], every: int) -> tuple[dict, str, str]:
    """Return the curves of a script's trainings; two of them may have one name."""
    series = {}
    for number, each in enumerate(trainings, 1):
        points = [(every * window, loss) for window, loss in enumerate(each.losses, 1)]
        series[f"{number}: {each.name}, batch {each.batch}"] = points
    return series, f"Losses of {len(trainings)} trainings in one process", "As the script logged them."


def _seconds(run: Run) -> dict | None:
    seconds, first = run.record.time.step_s, (run.record.requested.warmup_steps or 0) + 1
    if len(seconds) < 2 or run.virtual:
        return None
    title = f"A step takes {run.median_step_s:.3g} s in the median, from {min(seconds):.3g} to {max(seconds):.3g} s"
    drawn = charts.chart({"step": list(enumerate(seconds, first))}, "optimizer step", "seconds", " s")
    return {"title": title, "chart": drawn}


def _memory(run: Run) -> dict | None:
    """Memory of the rank with the highest peak, at its peak and after a step, and the peak by formulas."""
    fullest = _fullest(run)
    if fullest is None:
        return None
    held = {"at the peak": fullest.at_peak or {}, "after the step": fullest.after_step}
    if estimate := _predicted(run):
        held[FORMULAS] = estimate
    stacks = {name: memory.part_bytes(components) for name, components in held.items() if components}
    if not stacks:
        return None
    when, parts = next(iter(stacks.items()))
    largest = max(parts, key=lambda part: (part != "other") * parts[part])
    share = parts[largest] / sum(parts.values())
    title = f"A rank holds {size(sum(parts.values()))} {when}, {share:.0%} of it {largest}"
    drawn = charts.bars(stacks, style.PARTS, f"Memory of a rank of {run.arm} by component", FORMULAS)
    return {"title": title, "bars": drawn, "has_prediction": FORMULAS in stacks}


def _fullest(run: Run) -> RankComponents | None:
    return max(run.record.memory.components.per_rank, key=lambda rank: rank.tracked_peak_bytes, default=None)


def _predicted(run: Run) -> dict[str, int] | None:
    """Components by formulas. None for a model without formulas: tracing it would take seconds."""
    shape = SHAPES.get(shape_of(run.record.requested.model or ""), {})
    if shape.get("model_type") not in FAMILIES or not run.done:
        return None
    estimate = predicted(run.record)
    return estimate.at_peak if estimate else None


def _components(run: Run) -> list[dict]:
    """A row for each component, the largest first."""
    fullest = _fullest(run)
    if fullest is None:
        return []
    at_peak, after = fullest.at_peak or {}, fullest.after_step
    names = sorted({*at_peak, *after}, key=lambda name: -at_peak.get(name, 0))
    return [{"name": name.replace("_", " "), "peak": at_peak.get(name), "after": after.get(name)} for name in names]


def _traffic(run: Run) -> dict | None:
    """Collectives of a step of the first rank. Those that are too small for a bar are in the table."""
    if not run.traffic:
        return None
    moved = {NAMES.get(kind, kind): size_bytes for kind, size_bytes in run.traffic.items()}
    colours = {name: style.COLLECTIVES.get(name, style.FAINT) for name in [*style.COLLECTIVES, *moved]}
    drawn = charts.bars({name: {name: moved[name]} for name in moved}, colours, "Bytes of a step by collective")
    calls = {NAMES.get(kind, kind): each for kind, each in run.record.traffic.per_rank[0].items()}
    title = f"The collectives of a step handle {size(sum(moved.values()))}"
    return {"title": title, "bars": drawn, "calls": calls}


def _asked(record: Record) -> Iterator[dict]:
    """Each requested setting beside the one read back from the prepared objects, if one of the two is known."""
    promised, wanted, seen = Facts(record).promised, record.requested, record.observed
    weights = seen.dtypes.get("weights")
    precision = f"autocast to {seen.autocast}" if seen.autocast else weights and f"{weights} throughout"
    pairs = (  # the last value: whether the two can be compared
        ("arm", wanted.arm, seen.arm, True),
        ("ranks", promised.ranks or wanted.virtual_ranks, seen.ranks, True),
        ("ZeRO stage", promised.stage, seen.stage, True),
        ("optimizer states offloaded to", promised.offload_optimizer, seen.offload_optimizer, True),
        ("weights offloaded to", promised.offload_param, seen.offload_param, True),
        ("passes per step", promised.accumulation, seen.accumulation, True),
        ("activation checkpointing", promised.checkpointing, seen.checkpointing, True),
        ("gradient clipping", promised.clipping, seen.clipping, True),
        ("steps", wanted.steps, seen.steps, True),
        ("precision", wanted.precision or promised.precision, precision, False),
        ("attention", wanted.attention, seen.attention, False),
        ("optimizer", promised.optimizer, seen.optimizer, False),
        ("data", wanted.data, seen.data_source, False),
    )
    for what, asked, observed, comparable in pairs:
        if asked is not None or observed is not None:
            differs = comparable and None not in (asked, observed) and asked != observed
            yield {"what": what, "asked": asked, "observed": observed, "differs": differs}


def _texts(run: Run) -> dict[str, str]:
    """Return the files of a run's page: its record, and its logs without paths of the machine.

    Symbolic links are left out: they may lead anywhere.
    """
    texts = {store.RECORD: run.record.model_dump_json(by_alias=True) + "\n"}
    for name in LOGS:
        with contextlib.suppress(OSError):
            texts[name] = redact(files.read_below(run.folder, name, MOST_RAW_BYTES).decode(errors="replace"))
    return texts


def _flat(section: dict) -> dict:
    """What is known of a section: nested names joined by dots, long lists by their length."""
    known = {name: value for name, value in _entries(section) if value is not None and value != []}
    long = {name: f"{len(value)} values" for name, value in known.items() if isinstance(value, list) and len(value) > 8}
    return known | long


def _entries(section: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _entries(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
