"""A page for each run: how it ended, its curves, memory and traffic, its problems and avoidable costs."""

import contextlib
import dataclasses
import functools
import itertools
import lzma
from collections.abc import Collection, Iterator
from pathlib import Path

from study.bench.prediction import predicted
from study.errors import Stop
from study.io import files
from study.io.files import safe_join, safe_name
from study.io.numbers import count, number_of, short, size
from study.ledger.judging import Verdict
from study.records import metrics
from study.records.privacy import redact
from study.records.runs import Run, Runs
from study.records.schema import Record, ScriptTraining
from study.report import charts, claim_pages, style
from study.report.templating import write_page
from study.report.topics import memory, speed
from study.spec.settings import Flags
from study.watcher import diagnosis, facts

MOST_RAW_BYTES = 256 * 2**20  # of one of them: a longer one is left out
LOGS = ("log.txt", "output.txt", "steps.jsonl")  # what of a run folder goes into the site, beside its record
MOST_LOG = 200_000  # characters of a log that a page shows; the file beside it has all of them
RENAMED = ("precision", "attention", "optimizer", "data")  # settings whose observed value has other names
PLACES = ("arm", "config_file", "run_dir", "cache_dir")  # its title names the arm
ABOVE = {  # what is observed, in the table of settings
    *("arm", "ranks", "stage", "offload_optimizer", "offload_param", "accumulation", "checkpointing"),
    *("clipping", "steps", "attention", "optimizer", "data_source"),
}
PREDICTED = "predicted"  # the bar of what was predicted


def slugs(runs: Runs) -> dict[Run, str]:
    """The names of the runs' pages. Two runs of one name have two pages; some file systems ignore case."""
    taken = set()
    names = {}
    for run in runs:
        name = safe_name(run.name)
        candidates = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        names[run] = next(slug for slug in candidates if slug.casefold() not in taken)
        taken.add(names[run].casefold())
    return names


def write(
    runs: Runs, names: dict[Run, str], verdicts: list[Verdict], folder: Path, titles: dict[str, str]
) -> tuple[list[dict], list[str]]:
    """Write a page for each run with its logs beside it, and all records into one file.

    Return the runs with a page, and a sentence for each without.

    The files are not named as in a run folder, so that nothing takes the site for runs. The claims of `verdicts` have
    pages.
    """
    pages, problems, lines = [], [], []
    resting = claim_pages.used_by(verdicts)
    about = {"up": "../", "titles": titles, "here": "run", "claims": {verdict.claim.id for verdict in verdicts}}
    for run in runs:
        try:
            pages.append(_write(run, names[run], folder, about | {"verdicts": resting.get(run.name, [])}))
            lines.append(f"{run.record.model_dump_json(by_alias=True)}\n")
        except Exception as error:  # a record may be odd in any way, and none ends a report
            reason = error.what if isinstance(error, Stop) else repr(error)
            problems.append(f"{run.folder.name} has no page ({reason})")
    # In one file, and as xz: alone or as zip they are larger, because they repeat each other.
    (folder / "records.jsonl.xz").write_bytes(lzma.compress("".join(lines).encode(errors="replace"), preset=9))
    return pages, problems


def _write(run: Run, slug: str, folder: Path, about: dict) -> dict:
    texts = _texts(run)
    for file, content in texts.items():
        safe_join(folder, f"{slug}.{file}").write_text(content, errors="replace")
    log = texts.get("log.txt") or texts.get("output.txt") or ""
    row = speed.row_of(run)
    values = page(run) | {"row": row, "run": run, "slug": slug, "files": list(texts), "log": log[-MOST_LOG:]}
    write_page(safe_join(folder, f"{slug}.html"), "run.html", **about, **values)
    return {"row": row, "slug": slug, "checks": values["judged"] + values["not_judged"]}


def page(run: Run) -> dict:
    """Return what the page of a run shows."""
    record = run.record.model_dump(by_alias=True, include={"error", "requested", "observed"})
    judged, unknown = diagnosis.looked_at(run.record)
    return {
        "results": _results(run),
        "error": record["error"],
        "findings": diagnosis.diagnose(run.record),
        "judged": judged,
        "not_judged": unknown,
        "losses": _losses(run),
        "seconds": _seconds(run),
        "memory": _memory(run),
        "traffic": _traffic(run),
        "asked": list(_settings(run.record)),
        "settings": [line for line in _lines(_without(record["requested"], PLACES)) if line not in _defaults()],
        "observed": [*_lines(_without(record["observed"], ABOVE))],
    }


def _results(run: Run) -> dict[str, str]:
    """Return what a reader wants to know first, in human units. What is not known is left out."""
    record = run.record
    evaluation = metrics.final_evaluation(record)
    peak_name = "peak of a rank's GPU memory" if run.peak_of == "allocated" else "peak of a rank's tensors"
    results = {
        "last training loss (nats)": (run.losses[-1] if run.losses else None, "{:.4g}"),
        "evaluation loss (nats)": (evaluation and evaluation.eval_loss, "{:.4g}"),
        "accuracy": (evaluation and evaluation.accuracy, "{:.1%}"),
        "seconds of a step (median)": (run.median_step_s, "{:.3g} s"),
        "tokens per second": (metrics.tokens_per_s(record), "{:,.0f}"),
        peak_name: (run.peak_bytes and size(run.peak_bytes), "{}"),
        "in collectives, per rank and step": (size(sum(run.traffic.values())) if run.traffic else None, "{}"),
        "parameters": (run.parameters and count(run.parameters), "{}"),
    }
    return {label: words.format(value) for label, (value, words) in results.items() if value is not None}


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
    seconds = run.record.time.step_s
    first = (run.record.requested.warmup_steps or 0) + 1
    if len(seconds) < 2 or run.virtual or run.device != "cuda":  # seconds of a CPU say little, and others share it
        return None
    title = f"A step takes from {min(seconds):.3g} to {max(seconds):.3g} s"  # a resumed run has no median
    drawn = charts.chart({"step": list(enumerate(seconds, first))}, "optimizer step", "seconds")
    return {"title": title, "chart": drawn}


def _memory(run: Run) -> dict | None:
    """Return the memory of the rank with the highest peak, at its peak and after a step, and the predicted peak."""
    ranks = run.record.memory.components.per_rank
    if not ranks:
        return None
    fullest = max(ranks, key=lambda rank: rank.tracked_peak_bytes)
    at_peak = fullest.at_peak or {}
    after = fullest.after_step
    moments = {"at the peak": at_peak, "after the step": after, PREDICTED: _predicted(run)}
    stacks = {name: memory.part_bytes(components) for name, components in moments.items() if components}
    if not stacks:
        return None
    when, parts = next(iter(stacks.items()))
    largest = max(parts, key=lambda part: (part != "other") * parts[part])
    share = parts[largest] / sum(parts.values())
    components = {when: parts for when, parts in moments.items() if parts}
    names = sorted({name for parts in components.values() for name in parts}, key=lambda name: -at_peak.get(name, 0))
    return {
        "title": f"A rank holds {size(sum(parts.values()))} {when}, {share:.0%} of it {largest}",
        "bars": charts.bars(stacks, style.PARTS, f"Memory of a rank of {run.arm} by component", PREDICTED),
        "has_prediction": PREDICTED in stacks,
        "components": {name: [parts.get(name) for parts in components.values()] for name in names},
        "columns": list(components),
        "peaks": sorted(rank.tracked_peak_bytes for rank in ranks if rank.tracked_peak_bytes),
    }


def _predicted(run: Run) -> dict[str, int] | None:
    """Return the predicted components; None for a run that is not predicted."""
    estimate = predicted(run.record) if run.done else None
    return estimate.at_peak if estimate else None


def _traffic(run: Run) -> dict | None:
    """Return collectives of a step of the first rank. One that is too small for a bar has its numbers."""
    if not run.traffic:
        return None
    colours, stacks = style.COLLECTIVES.copy(), {}
    for kind, moved in run.record.traffic.per_rank[0].items():
        name = kind.replace("_", "-")
        colours.setdefault(name, style.FAINT)
        stacks[f"{name}, {number_of(moved.calls, 'calls')}"] = {name: moved.bytes}
    drawn = charts.bars(stacks, colours, "Bytes of a step by collective")
    return {"title": f"The collectives of a step handle {size(sum(run.traffic.values()))}", "bars": drawn}


def _settings(record: Record) -> Iterator[dict]:
    """Yield each requested setting beside the one read back from the prepared objects, if one of the two is known."""
    promised = facts.promised(record)
    wanted = record.requested
    seen = record.observed
    weights = seen.dtypes.get("weights")
    precision = f"autocast to {seen.autocast}" if seen.autocast else weights and f"{weights} throughout"
    pairs = {
        "arm": (wanted.arm, seen.arm),
        "ranks": (promised.ranks or wanted.virtual_ranks, seen.ranks),
        "ZeRO stage": (promised.stage, seen.stage),
        "optimizer states offloaded to": (promised.offload_optimizer, seen.offload_optimizer),
        "weights offloaded to": (promised.offload_param, seen.offload_param),
        "passes per step": (promised.accumulation, seen.accumulation),
        "activation checkpointing": (promised.checkpointing, seen.checkpointing),
        "gradient clipping": (promised.clipping, seen.clipping),
        "steps": (wanted.steps, seen.steps),
        "precision": (wanted.precision or promised.precision, precision),
        "attention": (wanted.attention, seen.attention),
        "optimizer": (promised.optimizer, seen.optimizer),
        "data": (wanted.data, seen.data_source),
    }
    for what, (requested, observed) in pairs.items():
        if requested is not None or observed is not None:
            differs = what not in RENAMED and None not in (requested, observed) and requested != observed
            yield {"what": what, "asked": requested, "observed": observed, "differs": differs}


def _texts(run: Run) -> dict[str, str]:
    """Return the logs of a run without paths of the machine. Symbolic links are left out: they may lead anywhere."""
    texts = {}
    for name in LOGS:
        with contextlib.suppress(OSError):
            texts[name] = redact(files.read_below(run.folder, name, MOST_RAW_BYTES).decode(errors="replace"))
    return texts


@functools.cache
def _defaults() -> set[str]:
    """Return the trainer's settings that nobody has to give, as lines."""
    return {*_lines(dataclasses.asdict(Flags()))}


def _without(section: dict, names: Collection[str]) -> dict:
    return {name: value for name, value in section.items() if name not in names}


def _lines(section: dict, indent: str = "") -> Iterator[str]:
    """Yield what is known of a section as lines, as in a config: parts are indented, long lists have their length."""
    for name, value in section.items():
        if isinstance(value, dict):
            if inner := [*_lines(value, f"{indent}  ")]:
                yield f"{indent}{name}:"
                yield from inner
        elif value is not None and value != []:
            is_long = isinstance(value, list) and len(value) > 8
            yield f"{indent}{name}: {f'{len(value)} values' if is_long else short(value)}"
