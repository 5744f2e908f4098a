"""Tables that documents print, and beside them what was measured and predicted here; and document 002's script."""

import statistics
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from study.core.numbers import size
from study.core.words import joined
from study.predict.front import Setup, estimate, named
from study.records import metrics
from study.records.groups import groups, lines
from study.records.runs import Runs
from study.report import style
from study.report.grouping import parts, split_by_ranks, sums
from study.report.style import FAINT, INK, Look
from study.report.topics import memory
from study.report.topics.losses import band
from study.report.topics.speed import middle, seconds, timed

# Document 000: Gemma2-9B on eight H100, 2048 tokens, bfloat16, effective batch 144 unless said otherwise.
MODEL_000, RANKS_000, SEQUENCE_000, BATCH_000 = "gemma2-9b", 8, 2048, 144
GROUP_000 = f"{MODEL_000}, {RANKS_000} ranks, {SEQUENCE_000} tokens, bf16_cast"
MEMORY_000 = {"ddp": 76e9, "zero2": 45e9, "zero3": 28e9}  # "Memory Utilization"
TOKENS_PER_S_AND_GPU_000 = {"ddp": 2847, "zero2": 2698, "zero3": 2234}  # "Training Throughput"
STEPS_PER_HOUR_000 = {"ddp": 385, "zero2": 365, "zero3": 302}
# Document 001: "Overcoming Bottlenecks", 20 billion parameters on eight GPUs.
GROUP_001 = "document 001, 20B on eight GPUs"
OFFLOAD_001: tuple[dict, ...] = (
    {"group": GROUP_001, "arm": "ddp", "outcome": "OOM", "peak_bytes": 48e9, "samples_per_s": None},
    {"group": GROUP_001, "arm": "zero3_cpu", "outcome": "done", "peak_bytes": 12e9, "samples_per_s": 1200},
    {"group": GROUP_001, "arm": "zero3_nvme", "outcome": "done", "peak_bytes": 8e9, "samples_per_s": 950},
)
ARMS_001 = ["single", "ddp", "zero3", "zero3_cpu", "zero3_nvme"]
# Document 003: scenarios 1 to 3, four GPUs, a model whose weights take 4 GB; read as 10^9 parameters in fp32.
RANKS_003, PARAMETERS_003 = 4, 1e9
MEMORY_003 = {
    "zero1": {"weights": 4e9, "gradients": 4e9, "optimizer": 1e9},
    "zero2": {"weights": 4e9, "gradients": 1e9, "optimizer": 1e9},  # and, a sentence later, "approximately 5 GB"
    "zero3": {"weights": 1e9, "gradients": 1e9, "optimizer": 1e9},
}


NEAR = 0.1  # share of a printed size: ours within it is called possible


def memory_000(runs: Runs) -> pd.DataFrame:
    """Return document 000's setting with activations kept and recomputed, predicted and measured; and its numbers."""
    shape = named(MODEL_000)
    setting: dict[str, Any] = {"ranks": RANKS_000, "sequence": SEQUENCE_000, "precision": "bf16_cast", "micro_batch": 1}
    more: dict[str, Any] = {"accumulation": BATCH_000 // RANKS_000, "attention": "eager", "device": "cuda"}
    rows: list[dict] = []
    for arm, printed_bytes in MEMORY_000.items():
        place: dict[str, Any] = {"group": GROUP_000, "line": arm, "arm": arm}
        place |= {"ranks": RANKS_000, "parameters": shape.parameters, "kind": "real", "panel": ""}
        measured = [
            run for run in runs.select(model=MODEL_000, arm=arm, **setting).done if metrics.components(run.record)
        ]
        for recompute, how in ((False, ""), (True, ", recomputing")):
            if repeats := [run for run in measured if bool(run.record.requested.checkpointing) == recompute]:
                run = max(repeats, key=memory.held_bytes)
                bytes_by_part = memory.part_bytes(metrics.components(run.record))
                rows += memory.stack(place | {"kind": run.kind}, f"measured{how}", bytes_by_part, len(repeats))
            ours = estimate(Setup.of_arm(shape, arm, **setting, **more, checkpointing=recompute))
            rows += memory.stack(place, f"predicted{how}", memory.part_bytes(ours.at_peak), 0)
        rows += memory.stack(place, "document 000", {"all": printed_bytes}, 0)
    return pd.DataFrame(rows)


def answer_000(rows: pd.DataFrame) -> str:
    """Return which of document 000's peaks are possible where activations are recomputed, from `memory_000`."""
    peaks = sums(rows[rows["source"] == "predicted, recomputing"], "arm", "bytes")
    alike = {arm: abs(peaks[arm] / MEMORY_000[arm] - 1) < NEAR for arm in peaks}
    texts = {arm: f"{size(peaks[arm])} under {arm}" for arm in peaks}
    printed = {arm: f"{MEMORY_000[arm] / 1e9:g} GB" for arm in peaks}
    near = joined([texts[arm] for arm in peaks if alike[arm]])
    far = joined([f"{texts[arm]}, not {printed[arm]}" for arm in peaks if not alike[arm]])
    text = "With bf16 weights, an fp32 master copy and recomputed activations, a rank needs"
    if near:
        text += f" {near}; the document prints {joined([printed[arm] for arm in peaks if alike[arm]])}."
    in_short = {(True, True): "In part", (True, False): "Yes"}.get((bool(near), bool(far)), "No")
    return f"**{in_short}.** {text}" + f" But it needs {far}." * bool(far)


def memory_003(runs: Runs) -> pd.DataFrame:
    """Return what each stage holds on four ranks, measured, and as document 003 says."""
    rows = memory.table(runs)
    if rows.empty:
        return rows
    rows = rows[(rows["ranks"] == RANKS_003) & rows["arm"].isin(["ddp", *MEMORY_003]) & rows["parameters"].notna()]
    rows = rows[rows["source"] != "predicted"]
    printed = []
    for group in rows["group"].unique():
        for arm, bytes_by_part in MEMORY_003.items():
            place = {"group": group, "line": arm, "arm": arm, "ranks": RANKS_003, "kind": "real", "panel": ""}
            printed += memory.stack(place | {"parameters": PARAMETERS_003}, "document 003", bytes_by_part, 0)
    return pd.concat([rows, pd.DataFrame(printed)], ignore_index=True) if printed else rows


def throughput_000(runs: Runs) -> pd.DataFrame:
    """Return document 000's table, and the speed relative to DDP in each group that has all three arms on GPUs."""
    rows: list[dict] = []
    ddp_speed = TOKENS_PER_S_AND_GPU_000["ddp"]
    for arm, speed in TOKENS_PER_S_AND_GPU_000.items():
        row = {"group": "document 000", "arm": arm, "tokens_per_s_and_rank": speed, "over_ddp": speed / ddp_speed}
        by_tokens = 3600 * speed * RANKS_000 / (BATCH_000 * SEQUENCE_000)
        row |= {"steps_per_hour": STEPS_PER_HOUR_000[arm], "steps_per_hour_by_its_tokens": by_tokens}
        rows.append(row)
    of_group = {
        group: [run for run in members if run.record.arm in TOKENS_PER_S_AND_GPU_000]
        for group, members in groups(timed(runs)).items()
    }
    for group, members in split_by_ranks(of_group).items():
        of_arm = {arm: [run for run in members if run.record.arm == arm] for arm in TOKENS_PER_S_AND_GPU_000}
        for arm, mine in of_arm.items() if all(of_arm.values()) else ():
            run = mine[0]
            speed_up = middle(seconds(of_arm["ddp"]), seconds(mine))
            step_s = statistics.median(seconds(mine))
            row = {"group": group, "arm": arm, "tokens_per_s_and_rank": None, "over_ddp": speed_up.pop("median")}
            if run.record.observed.rows_per_step and run.record.requested.sequence and run.record.observed.ranks:
                row["tokens_per_s_and_rank"] = (
                    run.record.observed.rows_per_step
                    * run.record.requested.sequence
                    / step_s
                    / run.record.observed.ranks
                )
            rows.append(row | speed_up | {"steps_per_hour": 3600 / step_s})
    return pd.DataFrame(rows)


def printed_001() -> pd.DataFrame:
    """Return document 001's table of 20 billion parameters."""
    return pd.DataFrame(OFFLOAD_001)


def offload_001(runs: Runs) -> pd.DataFrame:
    """Return our runs of the arms in document 001's table, however they ended."""
    rows = []
    for group, members in groups(runs.select(arm=ARMS_001)).items():
        with_disk = any(run.record.arm == "zero3_nvme" for run in members)
        for line, mine in lines(members).items() if with_disk else ():
            times = seconds(run for run in mine if run.record.observed.device == "cuda")
            run = mine[0]
            row: dict[str, Any] = {"group": group, "arm": line, "ranks": run.record.observed.ranks, "n": len(mine)}
            row["peak_bytes"] = None if memory.has_one_memory(run) else metrics.peak_bytes(run.record)
            row["outcome"] = ", ".join(sorted({each.record.status for each in mine}))
            samples_per_s = (
                run.record.observed.rows_per_step / statistics.median(times)
                if times and run.record.observed.rows_per_step
                else None
            )
            rows.append(row | {"samples_per_s": samples_per_s})
    return pd.DataFrame(rows).dropna(axis="columns", how="all")


# --- document 002's own script -------------------------------------------------------------------------------------

REPAIRS = {"none": "as printed", "fresh_model": "with a fresh model", "engaged": "with DeepSpeed engaged"}
TRAININGS = {1: (INK, "-"), 2: (style.VERMILION, "--"), 3: (style.SKY, ":")}  # they are not arms


def script(runs: Runs) -> pd.DataFrame:
    """Return each training of document 002's script, what it started from, and whether DeepSpeed was called."""
    rows: list[dict] = []
    for run in runs.select(arm="single").done:
        for number, training in enumerate(run.record.observed.runs, 1):
            about: dict[str, Any] = {
                "script": REPAIRS[run.record.requested.repair or "none"],
                "seed": run.record.requested.seed,
                "training": number,
            }
            about |= {"name": training.name, "batch": training.batch, "weights_from": training.weights_from}
            about |= {"deepspeed_calls": training.deepspeed_initialize_calls, "training_s": training.training_s}
            every = run.record.observed.logging_steps or 1
            rows += [about | {"step": window * every, "loss": loss} for window, loss in enumerate(training.losses, 1)]
    if not rows:
        return pd.DataFrame()
    order = list(REPAIRS.values())
    return pd.DataFrame(rows).sort_values("script", key=lambda column: column.map(order.index), kind="stable")


def sentence_of_script(rows: pd.DataFrame) -> str:
    """Return what document 002's script did."""
    items = []
    for kind, mine in parts(rows, "script").items():
        first = mine[mine["step"] == mine["step"].iloc[0]].groupby("training")["loss"].median()
        calls = mine[mine["training"] == 2]["deepspeed_calls"].max()
        if {1, 2} <= set(first.index):
            text = (
                f"the “ZeRO” training calls DeepSpeed {times_in_words(calls)}. Its first logged loss is {first[2]:.3f};"
            )
            items.append(f"- **{kind}**: {text} that of the training without ZeRO is {first[1]:.3f}.")
    return "\n".join(items)


def times_in_words(count: float) -> str:
    """Return how often something happens: `0 times`, `once`."""
    return "once" if count == 1 else f"{count:.0f} times"


def answer_002(runs: Runs) -> str:
    """Return whether ZeRO lowers losses or time in document 002's own script; empty if that has not run."""
    rows = script(runs)
    printed = rows[rows["script"] == REPAIRS["none"]] if len(rows) else rows
    if printed.empty or printed["deepspeed_calls"].max() > 0:
        return ""
    text = "**No: in document 002's own set-up ZeRO does not lower the loss, because it is never"
    text += " switched on.** Whether it lowers the time is open."
    first, second = (printed[printed["training"] == number] for number in (1, 2))
    if second["weights_from"].iloc[0] == "initial":
        return text
    last, begins = (
        mine.groupby("seed")["loss"].agg(place).median() for mine, place in ((first, "last"), (second, "first"))
    )
    text += " Its second training has the lower losses, because it begins with the weights that the first one has"
    return f"{text} trained: the first ends at {last:.3f}, and the second begins at {begins:.3f}."


@style.figure
def figure_of_script(rows: pd.DataFrame) -> Figure:
    """Losses of the trainings in document 002's script: as printed, with a fresh model, and with DeepSpeed engaged."""
    kinds = parts(rows, "script")
    drawing, axes = style.panels([1.6] * len(kinds), sharex=True, sharey=True)
    marks: dict[str, Look] = {}
    for ax, (kind, mine) in zip(axes, kinds.items(), strict=True):
        for number, training in parts(mine, "training").items():
            tone, dash = TRAININGS.get(int(number), (FAINT, "-"))
            look: dict[str, Any] = {"linestyle": dash, "marker": "o", "markersize": 3.5}
            band(ax, training, tone, **look)
            first = training.iloc[0]
            marks[f"{number}: {first['name']}, batch {first['batch']}"] = look | {"color": tone}
        second = mine[mine["training"] == 2]
        calls = second["deepspeed_calls"].max()
        start = next(iter(second["weights_from"]), "-")
        ax.set_title(f"{kind}: training 2 calls DeepSpeed {times_in_words(calls)}, and starts from {start}")
        ax.set_ylabel("loss (nats)")
    axes[-1].set_xlabel("optimizer step of each training")
    text = f"Points: mean loss of {rows['step'].min()} steps (n = {rows['seed'].nunique()} seeds)."
    text += " Bands: from the lowest to the highest seed."
    return style.finished(drawing, style.keys([], marks), text)
