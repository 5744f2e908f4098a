"""Document 002's own script: what its trainings start from, and whether it calls DeepSpeed."""

from matplotlib.figure import Figure

from study.records import stats
from study.records.groups import by
from study.records.runs import Runs
from study.report import style
from study.report.style import FAINT, INK
from study.report.topics.losses import band

REPAIRS = {"none": "as printed", "fresh_model": "with a fresh model", "engaged": "with DeepSpeed engaged"}


def table(runs: Runs) -> list[dict]:
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


def sentence(rows: list[dict]) -> str:
    """From `script.table`: what document 002's script did."""
    items = []
    for (kind,), mine in by(rows, "script").items():
        first = by([row for row in mine if row["step"] == mine[0]["step"]], "training")
        without, with_zero = ([row["loss"] for row in first.get((number,), [])] for number in (1, 2))
        calls = {row["deepspeed.initialize calls"] for row in mine if row["training"] == 2}
        if without and with_zero:
            verb = "never calls" if not max(calls) else "calls" if min(calls) else "does not always call"
            text = f"the “ZeRO” training {verb} DeepSpeed. Its first logged loss is {stats.median(with_zero):.3f};"
            items.append(f"- **{kind}**: {text} that of the training without ZeRO is {stats.median(without):.3f}.")
    return "\n".join(items)


@style.figure
def figure(rows: list[dict]) -> Figure:
    """Losses of the trainings in document 002's script: as printed, with a fresh model, and with DeepSpeed engaged."""
    kinds = by(rows, "script")
    drawing, axes = style.panels([1.6] * len(kinds), sharex=True, sharey=True)
    looks, marks = {1: (INK, "-"), 2: (style.VERMILION, "--"), 3: (style.SKY, ":")}, {}  # trainings are not arms
    for ax, ((kind,), mine) in zip(axes, kinds.items(), strict=True):
        calls = 0
        for (number,), training in by(mine, "training").items():
            tone, dash = looks.get(number, (FAINT, "-"))
            look = {"linestyle": dash, "marker": "o", "markersize": 3.5}
            band(ax, training, "loss", tone, **look)
            marks[f"{number}: {training[0]['name']}, batch {training[0]['batch']}"] = look | {"color": tone}
            calls += max(row["deepspeed.initialize calls"] for row in training)
        start = next((row["weights from"] for row in mine if row["training"] == 2), "-")
        ax.set_title(f"{kind}: DeepSpeed called {calls} times, training 2 starts from {start}")
        ax.set_ylabel("loss (nats)")
    axes[-1].set_xlabel("optimizer step of each training")
    window, seeds = min(row["step"] for row in rows), len({row["seed"] for row in rows})
    text = f"Points: mean loss of {window} steps (n = {seeds} seeds). Bands: from the lowest to the highest seed."
    return style.finished(drawing, style.keys([], marks), text)
