"""The tables behind the figures: runs in, rows out. A row is a plain dictionary; `pandas.DataFrame(rows)` takes them.

Every row says how many runs it rests on (`n`). Seconds are medians over runs, with a 95 % bootstrap interval from
three runs on; else `low` and `high` are None. Virtual runs send nothing, so no table has their seconds.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import pandas as pd

from study.claims import ledger
from study.claims.files import read_all
from study.claims.ledger import Verdict
from study.claims.words import plainly
from study.errors import Stop
from study.outside import rows as published_rows
from study.outside import sources, written
from study.outside import summary as outside_summary
from study.outside import words as outside_words
from study.records import stats
from study.records.compare import compare
from study.records.groups import by, groups, lines
from study.records.prediction import predicted, setup_of
from study.records.runs import Run, Runs
from study.report import published
from study.spec import arms
from study.spec.shapes import shape_of
from study.text.numbers import size
from study.theory import nodes, papers
from study.theory.architecture import named, parameters
from study.theory.estimate import estimate
from study.theory.replay import as_rows
from study.theory.setup import Setup
from study.theory.steptime import Machine, step_time

# What a model of time needs and no record of this machine has: `study peaks` has not been run beside them.
NO_TIME_ON_CPU = "no prediction: the pace of this CPU was not measured"
DISK_BYTES_PER_S = 6e9  # of two good NVMe disks, where a disk is drawn
REPAIRS = {"none": "as printed", "fresh_model": "with a fresh model", "engaged": "with DeepSpeed engaged"}
# What decides memory: two peaks are compared only where these are equal.
SETTINGS = ("task", "model", "precision", "micro_batch", "accumulation", "sequence", "checkpointing", "attention")
SETTINGS += ("optimizer", "lora_rank", "train_only", "compile")
SET_BY_MODEL = ("lr", "attention")  # their defaults depend on it
PARTS = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("master", "moments", "swap"),
    "buckets": ("buckets", "staging"),
    "gathered weights": ("gathered_weights",),
    "activations": ("activations",),
    "other": ("temporaries", "constants", "other"),
}
PREDICTORS = ("ours", "deepspeed", "accelerate")
VARIED = {"micro_batch": "rows per pass", "accumulation": "passes per step"}
ORDER = {arm: place for place, arm in enumerate(arms.all_paths())}
COUNTED = ("claim", "document", "verdict", "basis", "premise", "contradiction")
FIRST_COLUMNS = ("arm", "model", "environment", "runs", "s/step", "from", "to", "vs A", "peak MB", "loss")


def _facts(run: Run, *names: str) -> dict:
    """What a run knows, as columns."""
    return {name.replace("_", " "): getattr(run, name) for name in names}


def runs(runs: Runs) -> list[dict]:
    """Every run as a row, whatever became of it."""
    rows = []
    for run in runs:
        about = _facts(run, "status", "kind", "arm", "task", "model", "precision", "ranks")
        results = {
            "loss": run.losses[-1] if run.losses else None,
            "eval loss": run.record.loss.eval[-1].eval_loss if run.record.loss.eval else None,
            "s/step": run.median_step_s,
            "peak MB": run.peak_bytes and run.peak_bytes / 1e6,
            "peak of": run.peak_of,
            "moved MB": sum(run.traffic.values()) / 1e6 if run.traffic else None,
        }
        settings = {"rows/pass": run.micro_batch, "passes": run.accumulation, "seed": run.seed}
        rows.append({"run": run.name} | about | results | settings)
    return rows


def judged(runs: Runs, document: str | None = None) -> list[Verdict]:
    """The claims of one document, or of all, judged by these runs."""
    return ledger.judge_all([claim for claim in read_all() if document in (None, claim.document)], runs)


def verdict(judged: Verdict) -> dict:
    """A verdict as a row."""
    return ledger.row(judged) | {"plainly": plainly(judged)}


def verdicts(runs: Runs, document: str | None = None) -> list[dict]:
    """The claims of one document, or of all, with their verdicts over these runs."""
    return [verdict(each) for each in judged(runs, document)]


def tallied(verdicts: list[dict]) -> list[dict]:
    """Verdicts with what a figure needs to count them; the table of claims has their words."""
    return [{name: row[name] for name in COUNTED} for row in verdicts]


# --- losses --------------------------------------------------------------------------------------------------------


def losses(runs: Runs, baseline: str = "ddp", tasks: Iterable[str] = ()) -> list[dict]:
    """The loss of every step of every run, and its distance from the baseline's of the same seed.

    A group without the baseline is compared with its plainest arm; `against` says which. Runs whose steps have other
    rows than the baseline's are not compared.
    """
    chosen = [run for run in runs.done if run.losses and not run.virtual and not run.record.is_script]
    rows = []
    for group, members in groups(run for run in chosen if not tasks or run.task in tasks).items():
        present = {run.arm for run in members}
        reference = next((arm for arm in (baseline, *arms.NAMES) if arm in present), None)
        for line, run in ((line, run) for line, repeats in lines(members).items() for run in repeats):
            against = _partner(run, members, reference)
            about = {"group": group, "line": line, "arm": run.arm, "run": run.name}
            about |= _facts(run, "seed", "rows_per_step", "kind")
            for number, loss in enumerate(run.losses):
                difference = abs(loss - against.losses[number]) if against else None
                compared = {"difference": difference, "against": against and against.arm}
                rows.append(about | {"step": number + 1, "loss": loss} | compared)
    return rows


def _partner(run: Run, members: list[Run], reference: str | None) -> Run | None:
    """The reference's run with the same seed and rows in every step, with as many ranks where there is a choice."""
    if run.arm == reference or run.init == "in_place":  # weights that are drawn where they stay are other weights
        return None
    sizes = (run.seed, run.rows_per_step, len(run.losses))
    alike = [other for other in members if (other.seed, other.rows_per_step, len(other.losses)) == sizes]
    alike = [other for other in alike if other.arm == reference]
    return min(alike, key=lambda other: other.ranks != run.ranks, default=None)


def parity(rows: list[dict]) -> list[dict]:
    """For each line of `losses`: its largest distance from the baseline, and how far the baseline's seeds are apart."""
    apart = {group: _seeds_apart(mine) for (group,), mine in by(rows, "group").items()}
    table = []
    for (group, line, arm), mine in by(rows, "group", "line", "arm").items():
        steps = max(row["step"] for row in mine)
        differences = [row["difference"] for row in mine if row["difference"] is not None]
        final = stats.median([row["loss"] for row in mine if row["step"] == steps])
        against = ", ".join(sorted({row["against"] for row in mine} - {None})) or None
        about = {"group": group, "line": line, "arm": arm, "n": len({row["run"] for row in mine}), "steps": steps}
        distance = {"largest difference": max(differences, default=None)}
        distance["seeds differ by"] = apart[group] if differences else None
        table.append(about | {"final loss": final, "against": against} | distance)
    return table


def _seeds_apart(rows: list[dict]) -> float | None:
    """The spread of the baseline's losses over seeds, in the median over steps; None with one seed."""
    references = {row["against"] for row in rows}
    frame = pd.DataFrame([row for row in rows if row["arm"] in references])
    if frame.empty:
        return None
    medians = frame.groupby(["line", "rows per step", "step", "seed"])["loss"].median().unstack("seed")
    spreads = (medians.max(axis=1) - medians.min(axis=1))[medians.count(axis=1) > 1]
    return float(spreads.median()) if len(spreads) else None


def script(runs: Runs) -> list[dict]:
    """Document 002's own script: each of its trainings, what it started from, and whether DeepSpeed was called."""
    rows = []
    for run in runs.select(arm="single").done:
        for number, training in enumerate(run.record.observed.runs, 1):
            about = {"script": REPAIRS.get(run.repair, run.repair), "seed": run.seed, "training": number}
            about |= {"name": training.name, "batch": training.batch, "weights from": training.weights_from}
            calls = {"deepspeed.initialize calls": training.deepspeed_initialize_calls}
            for window, loss in enumerate(training.losses, 1):
                step = {"step": window * run.record.observed.logging_steps, "loss": loss}
                rows.append(about | step | calls | {"seconds": training.training_s})
    return sorted(rows, key=lambda row: list(REPAIRS.values()).index(row["script"]))


def saved(runs: Runs) -> list[dict]:
    """What `--save` left on the disk, and whether the model was built in parts: two settings of document 003."""
    rows = []
    for run in runs.done:
        if saved := run.record.observed.saved:
            about = _facts(run, "arm", "precision", "model", "parameters")
            about |= {"built in parts": run.record.observed.built_in_parts, "saved MB": saved.bytes / 1e6}
            rows.append(about | {"parameters saved": saved.parameters, "as": ", ".join(saved.dtypes)})
    return rows


# --- memory and bytes ----------------------------------------------------------------------------------------------


def memory(runs: Runs) -> list[dict]:
    """What a rank holds at its peak, by part: measured, predicted, and the model states by the ZeRO paper's formula."""
    rows = []
    for place, run, n in _largest(runs):
        ours, recipe = predicted(run.record), papers.OF_PRECISION.get(run.precision)
        paper = recipe and run.parameters and papers.states_bytes(run.parameters, run.stage or 0, run.ranks, recipe)
        rows += _stack(place, "measured", parts(run.components), n)
        rows += _stack(place, "predicted", parts(ours.at_peak) if ours else {}, n)
        rows += _stack(place, "ZeRO paper, states", paper or {}, n)
    return rows


def buckets(runs: Runs) -> list[dict]:
    """What each stage holds with buckets of DDP's size and with DeepSpeed's default ones, measured or predicted."""
    rows = []
    for place, run, n in _largest(runs):
        arm = run.arm.removesuffix("_default")
        if arm not in ("zero1", "zero2", "zero3"):
            continue
        line = place["line"].replace(run.arm, f"{arm}, {'default' if run.arm != arm else 'small'} buckets")
        rows += _stack(place | {"line": line}, "measured", parts(run.components), n)
        default = arms.read(arms.all_paths()[f"{arm}_default"]).deepspeed
        if run.arm == arm and (ours := predicted(run.record, deepspeed=default)):
            rows += _stack(place | {"line": f"{arm}, default buckets"}, "predicted", parts(ours.at_peak), 0)
    return sorted(rows, key=lambda row: (row["group"], row["line"]))


def _largest(runs: Runs) -> Iterator[tuple[dict, Run, int]]:
    """Of each line of each group, the run that held most, and of how many."""
    known = _split_by_ranks(groups([run for run in runs.done if run.components], only=SETTINGS), with_lone=True)
    for group, members in known.items():
        for line, repeats in lines(members).items():
            run = max(repeats, key=_held_bytes)
            yield {"group": group, "line": line} | _facts(run, "arm", "ranks", "kind", "parameters"), run, len(repeats)


def _held_bytes(run: Run) -> int:
    return sum(run.components.values())


def _stack(place: dict, source: str, held: dict[str, float], n: int) -> list[dict]:
    """The parts of one bar."""
    return [place | {"source": source, "part": part, "bytes": size, "n": n} for part, size in held.items()]


def _split_by_ranks(members_of: dict[str, list[Run]], with_lone: bool = False) -> dict[str, list[Run]]:
    """The groups split by ranks, which a label names where there are several.

    With lone processes, they are in each group, because a rank of DDP should hold as much; and all labels name ranks.
    """
    split = {}
    for group, members in members_of.items():
        lone = [run for run in members if with_lone and run.arm == "single"]
        shared = by([run for run in members if run not in lone], "ranks") or {(1,): []}
        for (ranks,), mine in shared.items():
            named = f"{group}, {ranks} rank{'s' if ranks > 1 else ''}"
            split[named if with_lone or len(shared) > 1 else group] = lone + mine
    return split


def parts(components: dict[str, float]) -> dict[str, float]:
    """Components under the few names that a figure has room for."""
    name_of, sizes = {role: part for part, roles in PARTS.items() for role in roles}, Counter()
    for role, size_bytes in components.items():
        sizes[name_of.get(role, "other")] += size_bytes
    return {part: sizes[part] for part in PARTS if part in sizes}


def memory_000(runs: Runs) -> list[dict]:
    """Document 000's setting with activations kept and recomputed, predicted and measured; and its printed numbers."""
    name, ranks, tokens = published.MODEL_000, published.RANKS_000, published.SEQUENCE_000
    shape, passes = named(name), published.BATCH_000 // ranks
    setting = {"ranks": ranks, "sequence": tokens, "precision": "bf16_cast", "micro_batch": 1}
    fixed = setting | {"accumulation": passes, "attention": "eager", "device": "cuda"}
    rows = []
    for arm, printed_bytes in published.MEMORY_000.items():
        place = {"group": f"{name}, {ranks} ranks, {tokens} tokens, bf16_cast", "line": arm, "arm": arm}
        place |= {"ranks": ranks, "parameters": parameters(shape), "kind": "real"}
        measured = [run for run in runs.select(model=name, arm=arm, **setting).done if run.components]
        for recompute, how in ((False, ""), (True, ", recomputing")):
            if repeats := [run for run in measured if bool(run.checkpointing) == recompute]:
                run = max(repeats, key=_held_bytes)
                rows += _stack(place | {"kind": run.kind}, f"measured{how}", parts(run.components), len(repeats))
            ours = estimate(Setup.of_arm(shape, arm, checkpointing=recompute, **fixed))
            rows += _stack(place, f"predicted{how}", parts(ours.at_peak), 0)
        rows += _stack(place, "document 000", {"all": printed_bytes}, 0)
    return rows


def memory_003(runs: Runs) -> list[dict]:
    """What each stage holds on four ranks, and what document 003 says of it."""
    ranks, arms_003 = published.RANKS_003, ("ddp", *published.MEMORY_003)
    rows = [row for row in memory(runs) if row["ranks"] == ranks and row["arm"] in arms_003 and row["parameters"]]
    rows = [row for row in rows if row["source"] != "predicted"]
    for group in dict.fromkeys(row["group"] for row in rows):
        for arm, held in published.MEMORY_003.items():
            place = {"group": group, "line": arm, "arm": arm, "ranks": ranks, "kind": "real"}
            rows += _stack(place | {"parameters": published.PARAMETERS_003}, "document 003", held, 0)
    return rows


def peaks(runs: Runs, ranks: Iterable[int] = tuple(2**i for i in range(1, 11)), most: int | None = None) -> list[dict]:
    """Peak memory of a rank against the number of ranks: measured ones, and those that the formulas give.

    Of the `most` groups with most arms, where not all are shown: each prediction takes a part of a second.
    """
    rows = []
    known = [run for run in runs.done if run.tracked_bytes and run.kind != "capped"]
    by_arms = sorted(groups(known, only=SETTINGS).items(), key=lambda item: -len({run.arm for run in item[1]}))
    for group, members in by_arms[:most]:
        for repeats in by(members, "arm", "ranks", "kind").values():
            largest = {"source": "seen", "bytes": max(run.tracked_bytes for run in repeats), "n": len(repeats)}
            rows.append({"group": group} | _facts(repeats[0], "arm", "ranks", "kind") | largest)
        for (arm,), mine in by([run for run in members if run.ranks > 1], "arm").items():
            place = {"group": group, "arm": arm}
            for count in ranks:
                if ours := predicted(mine[0].record, ranks=count):
                    of_theory = {"ranks": count, "kind": "predicted", "source": "predicted", "bytes": ours.peak_bytes}
                    rows.append(place | of_theory | {"n": 0})
    return rows


def capacity(runs: Runs) -> list[dict]:
    """How far each arm goes under a memory cap: the largest that survived, and the smallest that did not."""
    rows = []
    capped = [run for run in runs if run.memory_cap_gib and run.status in ("done", "oom", "host_oom")]
    for what in ("model", "micro_batch"):
        alike = [name for name in ("memory_cap_gib", *SETTINGS) if name not in (what, "attention")]
        for group, members in groups(capped, only=alike).items():
            sizes = {getattr(run, what): _size(run, what, members) for run in members}
            sizes = {value: size for value, size in sizes.items() if size}
            if len(sizes) < 2:
                continue
            for line, mine in lines([run for run in members if getattr(run, what) in sizes]).items():
                largest = max((getattr(run, what) for run in mine if run.done), key=sizes.get, default=None)
                smallest = min((getattr(run, what) for run in mine if not run.done), key=sizes.get, default=None)
                place = {"group": group, "line": line, "arm": mine[0].arm, "what": what}
                place |= {"cap GiB": mine[0].memory_cap_gib, "largest": largest, "size": sizes.get(largest)}
                rows.append(place | {"failed": smallest, "failed size": sizes.get(smallest), "n": len(mine)})
    return rows


def _size(run: Run, what: str, members: list[Run]) -> float | None:
    """What tried values are ordered by: rows per pass as they are, models by their parameters."""
    if what == "micro_batch":
        return run.micro_batch
    observed = [member.parameters for member in members if member.model == run.model and member.parameters]
    with contextlib.suppress(Stop):  # no built-in shape has this name
        return observed[0] if observed else parameters(named(shape_of(run.model)))


def traffic(runs: Runs) -> list[dict]:
    """Bytes that a rank sends in a step, over those of one all-reduce of the gradients: counted, and as published.

    As the ZeRO paper counts, for collectives in rings: an all-reduce goes round twice, everything else once.
    """
    rows = []
    known = groups([run for run in runs.done if run.traffic and run.ranks > 1 and run.parameters])
    for group, line, repeats in ((group, *each) for group, members in known.items() for each in lines(members).items()):
        run = repeats[0]
        all_reduce = 2 * run.parameters * (2 if run.precision == "bf16_cast" else 4) * (run.ranks - 1) / run.ranks
        moved = {kind: sent / all_reduce for kind, sent in sent_bytes(run).items()}
        # Without what is not worth a bar, such as a loss that is averaged over ranks.
        counted = {kind.replace("_", "-"): times for kind, times in moved.items() if times > 1e-4}
        paper = {"reduce-scatter": 0.5, "all-gather": 1.0 if run.stage == 3 else 0.5}
        printed = {"any": published.TRAFFIC_000[run.arm]} if run.arm in published.TRAFFIC_000 else {}
        place = {"group": group, "line": line, "passes": run.accumulation} | _facts(run, "arm", "ranks", "kind")
        for source, bars, n in (
            ("counted", counted, len(repeats)),
            ("ZeRO paper", paper if run.stage else {} if run.record.observed.fsdp else {"all-reduce": 1.0}, 0),
            ("document 000", printed, 0),
        ):
            bar = place | {"source": source}
            rows += [bar | {"collective": kind, "times": times, "n": n} for kind, times in bars.items()]
    return rows


def sent_bytes(run: Run) -> dict[str, float]:
    """What the first rank sends in a step by collective, in rings: an all-reduce goes round twice."""
    sent = dict.fromkeys(run.traffic, 0.0)
    for kind, count in run.record.traffic.per_rank[0].items() if sent else ():
        for ranks, size_bytes in count.by_ranks(run.ranks).items():
            sent[kind] += papers.wire_bytes({kind: size_bytes}, len(ranks))
    return sent


def between_nodes(runs: Runs, node_ranks: int = 2) -> list[dict]:
    """What a step moves inside nodes and between them, if so many ranks stand for a node; and what a rank then holds.

    What a node sends is on rings that enter and leave each node once. `kernel`: what the kernel saw written over what
    gloo should write. Theory knows only models with formulas here.
    """
    several = [run for run in runs.done if run.traffic and run.ranks > node_ranks and run.ranks % node_ranks == 0]
    rows = []
    for group, members in groups(several).items():
        members.sort(key=lambda run: ORDER.get(run.arm, len(ORDER)))
        rows += [{"group": group} | _between_nodes(run, node_ranks) for run in members]
    return rows


def _between_nodes(run: Run, node_ranks: int) -> dict:
    moved = {kind: count.by_ranks(run.ranks) for kind, count in run.record.traffic.per_rank[0].items()}
    split, setup = nodes.by_node(moved, node_ranks), setup_of(run.record)
    theory = setup and nodes.by_node(nodes.predicted(setup), node_ranks)["between"]
    wire, kernel = run.record.traffic.gloo_wire_bytes[0], run.record.traffic.kernel_bytes_written[0]
    held = next((rank.at_peak for rank in run.record.memory.components.per_rank if rank.at_peak), {})
    return {
        "arm": run.arm,
        "ranks": f"{run.ranks} virtual" if run.virtual else str(run.ranks),
        "inside MB": sum(split["inside"].values()) / 1e6,
        "between MB": sum(split["between"].values()) / 1e6,
        "predicted between MB": theory and sum(theory.values()) / 1e6,
        "a node sends MB": nodes.sent_by_a_node(moved, node_ranks) / 1e6,
        "kernel": kernel / wire if wire and kernel else None,
        "weights at peak MB": held.get("weights", 0) / 1e6 if held else None,
        "peak MB": run.peak_bytes and run.peak_bytes / 1e6,
    }


def scores(cells: list[dict]) -> list[dict]:
    """Each predictor's error on each measured peak, from the cells of `study scoreboard`."""
    rows = []
    for cell in cells:
        name = f"{cell['cell']}, {cell['ranks']} ranks, {cell['precision']}"
        for predictor in (predictor for predictor in PREDICTORS if cell[predictor] is not None):
            error = {"predictor": predictor, "error": cell[predictor], "held out": cell["held out"]}
            rows.append({"cell": name, "arm": cell["arm"]} | error)
    return rows


# --- seconds -------------------------------------------------------------------------------------------------------


def middle(values: list[float], over: list[float] | None = None) -> dict:
    """A median over runs, or a ratio of two, with its interval where there are enough runs, and how many there are."""
    samples = [values] if over is None else [values, over]
    median, low, high, n = stats.median(values), None, None, min(map(len, samples))
    if over:
        median /= stats.median(over)
    if n >= stats.FEWEST_RUNS:
        interval = stats.ratio_of_medians if over else stats.median_with_interval
        _, low, high = interval(*samples, np.random.default_rng(0))
    return {"median": median, "low": low, "high": high, "n": n}


def timed(runs: Runs) -> list[Run]:
    return [run for run in runs.done if run.median_step_s and not run.virtual]


def seconds(runs: Iterable[Run]) -> list[float]:
    return [run.median_step_s for run in runs if run.median_step_s]


def ladder(runs: Runs, base: str = "single", other: str = "zero3_cpu") -> list[dict]:
    """Seconds of a step as the model grows, and the speed-up by the other arm: document 002, figure 2."""
    rows = []
    chosen = [run for run in timed(runs) if run.arm in (base, other) and run.parameters and run.kind == "real"]
    for group, members in _split_by_ranks(groups(chosen, without=("model", *SET_BY_MODEL))).items():
        sizes = {run.model: run.parameters for run in members}
        for model in sorted(sizes, key=sizes.get) if len(sizes) > 1 else ():
            of_arm = {arm: [run for run in members if (run.model, run.arm) == (model, arm)] for arm in (base, other)}
            common = {"group": group, "model": model, "parameters": sizes[model], "weights GB": 4 * sizes[model] / 1e9}
            for arm, mine in of_arm.items():
                if mine:
                    rows.append(common | {"what": "s/step", "arm": arm} | middle(seconds(mine)))
            if all(of_arm.values()):
                faster = middle(seconds(of_arm[base]), seconds(of_arm[other]))
                faster |= {key: faster[key] and faster[key] - 1 for key in ("median", "low", "high")}
                rows.append(common | {"what": "speed-up", "arm": other} | faster)
    return rows


def batches(runs: Runs, baseline: str = "ddp") -> list[dict]:
    """Speed over the baseline's as the batch grows, by rows per pass or by passes; and document 000's numbers."""
    rows = []
    for setting, words in VARIED.items():
        for group, members in groups(timed(runs), without=(setting,)).items():
            baselines = by([run for run in members if run.arm == baseline], "ranks")
            varied = [ranks for (ranks,), mine in baselines.items() if len({getattr(run, setting) for run in mine}) > 1]
            for (value, ranks), mine in by([run for run in members if run.ranks in varied], setting, "ranks").items():
                of_arm = by(mine, "arm")
                base = of_arm.pop((baseline,), [])
                for (arm,), repeats in of_arm.items() if base else ():
                    place = {"group": group, "varied": words, "arm": arm, "value": value, "ranks": ranks}
                    place |= {"batch": repeats[0].rows_per_step, "source": "measured"}
                    rows.append(place | middle(seconds(base), seconds(repeats)))
    for band in published.BATCHES_000 if rows else ():
        for arm in ("zero2", "zero3"):
            place = {"group": None, "varied": "batch", "arm": arm, "value": band["from"], "ranks": 8}
            place |= {"batch": band["from"], "source": "document 000", "median": band[arm], "low": None, "high": None}
            rows.append(place | {"n": 0, "from": band["from"], "to": band["to"]})
    return rows


def frontier(runs: Runs) -> list[dict]:
    """Seconds of a step against memory at the peak, each arm a point: what offloading saves, and what it costs."""
    rows, known = [], [run for run in timed(runs) if run.peak_bytes]
    for group, members in _split_by_ranks(groups(known), with_lone=True).items():
        if len({run.arm for run in members}) < 2:
            continue
        for line, mine in lines(members).items():
            place = {"group": group, "line": line} | _facts(mine[0], "arm", "ranks", "kind")
            place |= {"peak bytes": max(run.peak_bytes for run in mine)} | _facts(mine[0], "peak_of", "rows_per_step")
            rows.append(place | middle(seconds(mine)))
    return rows


def settings(runs: Runs, setting: str) -> list[dict]:
    """One setting varied with all else equal: losses, seconds, memory and bytes of each of its values."""
    rows = []
    chosen = [run for run in runs.done if run.kind == "real" and not run.record.is_script]
    for group, members in groups(chosen, without=(setting,)).items():
        alike = by(members, *({"arm", "ranks"} - {setting})).values()
        if not any(len({getattr(run, setting) for run in mine}) > 1 for mine in alike):
            continue  # no arm has two values of it
        for (arm, value, ranks), mine in by(members, "arm", setting, "ranks").items():
            times, run = seconds(mine), mine[0]
            place = {"group": group, "arm": arm, setting: value, "ranks": ranks, "n": len(mine)}
            results = {
                "final loss": stats.median([run.losses[-1] for run in mine]) if run.losses else None,
                "s/step": stats.median(times) if times else None,
                "peak MB": run.peak_bytes and max(run.peak_bytes or 0 for run in mine) / 1e6,
                "moved MB": sum(run.traffic.values()) / 1e6 if run.traffic else None,
            }
            rows.append(place | results)
    return rows


def throughput_000(runs: Runs) -> list[dict]:
    """Document 000's table, and below it the speed over DDP's in each group here that has all three arms."""
    printed, tokens = published.TOKENS_PER_S_AND_GPU_000, published.BATCH_000 * published.SEQUENCE_000
    rows = []
    for arm, speed in printed.items():
        row = {"group": "document 000", "arm": arm, "tokens/s/rank": speed, "over DDP's": speed / printed["ddp"]}
        by_tokens = 3600 * speed * published.RANKS_000 / tokens
        rows.append(row | {"steps/h": published.STEPS_PER_HOUR_000[arm], "steps/h by its tokens/s": by_tokens})
    members_of = {group: [run for run in mine if run.arm in printed] for group, mine in groups(timed(runs)).items()}
    for group, members in _split_by_ranks(members_of).items():
        of_arm = {arm: [run for run in members if run.arm == arm] for arm in printed}
        for arm, mine in of_arm.items() if all(of_arm.values()) else ():
            speed, step_s, run = middle(seconds(of_arm["ddp"]), seconds(mine)), stats.median(seconds(mine)), mine[0]
            row = {"group": group, "arm": arm, "tokens/s/rank": run.rows_per_step * run.sequence / step_s / run.ranks}
            row |= {"over DDP's": speed["median"], "from": speed["low"], "to": speed["high"], "n": speed["n"]}
            rows.append(row | {"steps/h": 3600 / step_s})
    return rows if len(rows) > len(printed) else []


def offload_001(runs: Runs) -> list[dict]:
    """Document 001's table of 20 billion parameters, and below it the same arms here, whatever became of them."""
    rows = [{"group": "document 001, 20B on eight GPUs"} | row for row in published.OFFLOAD_001]
    for group, members in groups(runs.select(arm=["single", "ddp", "zero3", "zero3_cpu", "zero3_nvme"])).items():
        for line, mine in lines(members).items() if any(run.arm == "zero3_nvme" for run in members) else ():
            times, run, outcomes = seconds(mine), mine[0], ", ".join(sorted({run.status for run in mine}))
            place = {"group": group, "arm": line, "ranks": run.ranks, "outcome": outcomes, "n": len(mine)}
            place |= {"peak bytes": run.peak_bytes}
            rows.append(place | {"samples/s": run.rows_per_step / stats.median(times) if times else None})
    return rows if len(rows) > len(published.OFFLOAD_001) else []


def machines(runs: Runs) -> tuple[list[dict], list[dict]]:
    """Equal cells in each environment, and the environments by their letters; what differs comes first."""
    compared = compare(runs)
    places = [{"environment": letter} | place for letter, place in compared.environments.items()]
    places = [
        {("instruments" if name == "measure_version" else name): value for name, value in place.items()}
        for place in places
    ]
    names = dict.fromkeys(name for place in places for name in place)
    differ = [name for name in names if len({str(place.get(name)) for place in places}) > 1]
    return [_first(row, FIRST_COLUMNS) for row in compared.rows], [_first(place, differ) for place in places]


def _first(row: dict, names: Iterable[str]) -> dict:
    return {name: row[name] for name in names if name in row} | row


# --- predictions held against what others measured ----------------------------------------------------------------


def outside() -> list[dict]:
    """Every published number that has a prediction: both, and how far they are apart."""
    return [
        {"source": row.source, "model": row.model, "GPU": row.gpu, "GPUs": row.n_gpus, "arm": row.arm}
        | {"rows per pass": row.micro_batch, "role": sources.own()[row.source].role_of(row)}
        | {name: quantity[name] for name in ("quantity", "measured", "predicted")}
        | {"error": quantity["predicted"] / quantity["measured"] - 1}
        for row, kept in zip(published_rows.own(), written.read()["rows"], strict=True)
        for quantity in kept["quantities"]
    ]


def outside_errors() -> list[dict]:
    """How far off predictions are, by source and over all, beside simpler ways to predict."""
    return outside_words.lines(written.read()["summary"])


def here(runs: Runs) -> list[dict]:
    """Runs of this project on a CPU as rows of the same kind, by arm: memory, and why time has no prediction."""
    rows = []
    chosen = [run for run in runs.done if run.components and run.ranks == 2 and run.record.observed.device == "cpu"]
    for (arm, kind), mine in sorted(
        by([{"run": run, "arm": run.arm, "kind": run.kind} for run in chosen], "arm", "kind").items()
    ):
        pairs = [(sum(run["run"].components.values()), predicted(run["run"].record)) for run in mine]
        errors = [ours.peak_bytes / held - 1 for held, ours in pairs if ours]
        rows.append(
            {
                "arm": arm,
                "two ranks": kind,
                "runs": len(mine),
                "with a prediction": len(errors),
                "memory off by": outside_words.percent(stats.median(list(map(abs, errors)))) if errors else None,
                "worst": outside_words.percent(max(errors, key=abs)) if errors else None,
                "time": NO_TIME_ON_CPU,
            }
        )
    return rows


def outside_misses() -> list[dict]:
    """The predictions that are off by more than 10 % (memory) or 30 % (time), and why, as far as that is known."""
    return outside_words.misses(outside_summary.misses(written.own()))


def timelines() -> list[dict]:
    """What runs when in a predicted step of GPT-2 XL on eight A100, under three arms: a row for each task."""
    machine = Machine(gpu="A100-80GB", disk_bytes_per_s=DISK_BYTES_PER_S)
    how = {"ranks": 8, "precision": "bf16_cast", "micro_batch": 8, "sequence": 1024, "device": "cuda"}
    setup = f"GPT-2 XL, 8 x A100 80GB, 8 rows of 1024 tokens each, a disk of {size(DISK_BYTES_PER_S)}/s"
    return [
        {"setup": setup, "arm": arm} | row
        for arm in ("ddp", "zero3", "zero3_nvme")
        for row in as_rows(step_time(Setup.of_arm(named("gpt2-xl"), arm, **how), machine).timeline)
    ]


def outside_sources() -> list[dict]:
    """Where the published numbers come from, and what is left open."""
    of_source = {name: [] for name in sources.own()}
    for row, kept in zip(published_rows.own(), written.read()["rows"], strict=True):
        of_source[row.source].append(bool(kept["quantities"]))
    return [
        {
            "source": source.name,
            "rows": len(of_source[source.name]),
            "predicted": sum(of_source[source.name]),
            "what it is": source.what,
            "how it was read": source.read,
            "what it leaves open": source.unsaid,
            "licence": source.licence,
            "address": source.address,
        }
        for source in sources.own().values()
    ]
