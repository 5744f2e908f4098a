"""What the index answers first: does ZeRO change the losses, save memory, cost time, send more?

Each answer is a figure and a sentence that is computed from the rows that the figure draws. Sizes that people train
come first where the runs have them (virtual ranks); where they have not, the models that were trained here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from matplotlib.figure import Figure

from study.bench.prediction import predicted
from study.io.numbers import count, nats, size
from study.io.words import joined
from study.predictor.outside import side_by_side
from study.records.groups import by, groups
from study.records.runs import Run, Runs
from study.report import answer_figures, grouping, headline, readme
from study.report.topics import losses, memory, traffic

PROTOCOL, RANKS = "at_scale", 8
MEASURED, VIRTUAL, PREDICTED, PUBLISHED = "measured", "measured on virtual ranks", "predicted", "published by others"
NAMES = {"llama3-8b": "Llama-3-8B", "gpt2-xl": "GPT-2 XL", "bert-large": "BERT-large", "gemma2-9b": "Gemma2-9B"}
NAMES |= {"qwen3-32b": "Qwen3-32B", "bert-tiny": "a BERT", "gpt-tiny": "a GPT"}
PAPER = "ZeRO paper"  # the source of its rows
AT_SCALE = "study sweep at_scale --runs runs/at_scale"
FP32_NOISE = 1e-5  # nats: differences that come from the order of additions in fp32, see `tests/test_parity.py`
STAGES = {"zero1": "stage 1", "zero2": "stage 2", "zero3": "stage 3", "zero3_cpu": "offloading"}
STAGES |= {"fsdp2": "FSDP2"}  # the arms that the sentences name
COSTS = 1.1  # from this multiple of DDP's time or bytes on, a sentence says that an arm costs more


@dataclass(frozen=True)
class Answer:
    """The answer to one question of the index. Without rows it has no figure, but a command that makes the runs."""

    name: str  # of its files
    question: str
    sentence: str
    rows: list[dict] = field(default_factory=list)
    figure: Figure | None = None
    bases: tuple[str, ...] = ()
    where: tuple[str, ...] = ()  # the machines of the runs
    links: tuple[tuple[str, str], ...] = ()  # where there is more: a page and its name
    command: str = ""  # what makes runs that are missing here


def first_sentence(text: str) -> str:
    """The first sentence after the bold answer: it has the number."""
    end = text.find(". ", text.find("** ") + 3)
    return text if end < 0 else text[: end + 1]


def of(runs: Runs) -> list[Answer]:
    return [of_losses(runs), of_memory(runs), of_time(), of_traffic(runs)]


def machines(runs: Iterable[Run]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(readme.machine(run).replace("\\", "") for run in runs))


# --- losses --------------------------------------------------------------------------------------------------------


def of_losses(runs: Runs) -> Answer:
    question, command = "Does ZeRO change the losses?", "study sweep smoke --runs runs/smoke"
    rows = trained(runs)
    compared = [row for row in rows if row["difference"] is not None]
    if not compared:
        return Answer("losses", question, "No two arms have trained on the same rows yet.", command=command)
    worst = max(compared, key=lambda row: row["difference"])
    arms, steps = len({row["arm"] for row in compared}), max(row["step"] for row in rows)
    answer = "No." if worst["difference"] <= FP32_NOISE else "Here they differ by more than fp32 rounding explains."
    names = {row["run"] for row in rows}
    mine = [run for run in runs if run.name in names]
    first = mine[0]  # a group is of one model and precision
    sentence = (
        f"**{answer}** With {NAMES.get(first.model, first.model)} in {first.precision}, the losses of {arms} arms stay"
        f" within {nats(worst['difference'])} of {worst['against']}'s at each of {steps} steps"
        f" (furthest: {worst['arm']})."
    )
    figure = losses.figure(rows)
    more = (("claims/S002-35.html", "claim S002-35"), ("compare.html#Losses", "all tasks and precisions"))
    return Answer("losses", question, sentence, rows, figure, (MEASURED,), machines(mine), more)


def trained(runs: Runs) -> list[dict]:
    """The losses that the README shows. If there are none, those of the group with the most arms, fp32 first."""
    for chosen in (runs.select(**headline.TINY), runs.select(precision="fp32"), runs):
        groups = by([row for row in losses.table(chosen) if row["rows per step"]], "group").values()
        several = [rows for rows in groups if any(row["difference"] is not None for row in rows)]
        if several:
            return max(several, key=lambda rows: len({row["arm"] for row in rows}))
    return []


# --- memory --------------------------------------------------------------------------------------------------------


def of_memory(runs: Runs) -> Answer:
    question, rows = "Does it save memory?", []
    at_scale = of_scale(runs)
    tiny = trained_here(runs)
    for model, members in at_scale.items():
        rows += [*_held(model, members, VIRTUAL), *_published(model)]
    if tiny:
        rows += _held(tiny[0].model, tiny, MEASURED)
    if not rows:
        return Answer("memory", question, "No two arms have records of their memory yet.", command=AT_SCALE)
    members = [run for mine in at_scale.values() for run in mine] + tiny
    bases = tuple(
        basis for basis in (VIRTUAL, MEASURED, PREDICTED, PUBLISHED) if any(r["basis"] == basis for r in rows)
    )
    more = (("compare.html#Memory-at-the-peak", "every group of runs"), ("calculator.html", "your own model"))
    command = "" if at_scale else AT_SCALE
    sentence = _memory_in_words(rows)
    return Answer(
        "memory", question, sentence, rows, answer_figures.memory(rows), bases, machines(members), more, command
    )


def of_scale(runs: Runs) -> dict[str, list[Run]]:
    """The protocol's runs on eight virtual ranks, by model: first the one with the most arms, then from large to small.

    If a model has runs that recompute activations, only those.
    """
    chosen = [
        run for run in runs.done if run.record.cell.protocol == PROTOCOL and run.ranks == RANKS and run.components
    ]
    of_model = {}
    for (model,), members in by(chosen, "model").items():
        recomputing = [run for run in members if run.checkpointing]
        of_model[model] = recomputing or members
    whole = {model: mine for model, mine in of_model.items() if "ddp" in {run.arm for run in mine} and len(mine) > 1}
    by_size = sorted(whole, key=lambda model: -(whole[model][0].parameters or 0))
    first = max(by_size, key=lambda model: len(whole[model]), default=None)
    return {model: whole[model] for model in sorted(by_size, key=lambda model: model != first)}


def trained_here(runs: Runs) -> list[Run]:
    """One run per arm of the model that the README shows. If there is none, of the group with the most arms."""
    known = [
        run for run in runs.done if run.components and not run.virtual and run.ranks > 1 and not run.memory_cap_gib
    ]
    alike = Runs(tuple(known)).select(**headline.TINY)
    for choice in (alike.runs, known):
        for members in sorted(
            groups(choice, only=grouping.SETTINGS).values(), key=lambda mine: -len({r.arm for r in mine})
        ):
            of_arm = {run.arm: run for run in reversed(members) if run.ranks == members[0].ranks}
            if "ddp" in of_arm and len(of_arm) > 1:
                return list(of_arm.values())
    return []


def _held(model: str, members: list[Run], basis: str) -> list[dict]:
    """The parts of a rank's peak, measured and predicted."""
    run = members[0]
    about = {"model": NAMES.get(model, model), "parameters": run.parameters, "ranks": run.ranks}
    about["conditions"] = conditions(run)
    rows = []
    for run in sorted(members, key=lambda run: grouping.ORDER.get(run.arm, len(grouping.ORDER))):
        for name, held in (("measured", memory.parts(run.components)), ("predicted", predicted_parts(run))):
            rows += [
                about
                | {
                    "arm": run.arm,
                    "basis": basis if name == "measured" else PREDICTED,
                    "part": part,
                    "bytes": held_bytes,
                }
                for part, held_bytes in held.items()
            ]
    return rows


def predicted_parts(run: Run) -> dict[str, float]:
    ours = predicted(run.record)
    return memory.parts(ours.at_peak) if ours else {}


def conditions(run: Run) -> str:
    """What a rank did in a pass: `1 row of 2048 tokens per pass, activations recomputed`."""
    rows = f"{run.micro_batch} row{'s' * (run.micro_batch > 1)} of {run.sequence} tokens per pass"
    return f"{rows}, activations {'recomputed' if run.checkpointing else 'kept'}"


def _published(model: str) -> list[dict]:
    """What others measured of the same model and arm on as many GPUs; their other settings are in the row."""
    rows = []
    for row in side_by_side.published(model, RANKS):
        if row.memory_bytes:
            known = {"rows per pass": row.micro_batch, "tokens": row.seq, "passes": row.grad_acc}
            said = ", ".join(f"{name} {value}" for name, value in known.items() if value)
            place = {"model": NAMES.get(model, model), "parameters": row.params, "ranks": RANKS, "arm": row.arm}
            place |= {"conditions": said, "basis": PUBLISHED, "part": "all", "bytes": row.memory_bytes}
            rows.append(place | {"source": row.source})
    return rows


def totals(rows: list[dict], basis: str) -> dict[str, float]:
    """Bytes of the whole peak by arm."""
    chosen = [row for row in rows if row["basis"] == basis]
    return {arm: sum(row["bytes"] for row in mine) for (arm,), mine in by(chosen, "arm").items()}


def _memory_in_words(rows: list[dict]) -> str:
    sentences = []
    for (model,), mine in by(rows, "model").items():
        basis = mine[0]["basis"]
        held = totals(mine, basis)
        stages = {arm: held[arm] for arm in ("zero1", "zero2", "zero3") if arm in held}
        if "ddp" not in held or not stages:
            continue
        named = ", ".join(f"{size(held_bytes)} under stage {arm[-1]}" for arm, held_bytes in stages.items())
        billions = f"{model} ({count(mine[0]['parameters'])} parameters)" if mine[0]["parameters"] else model
        text = f"with {billions}, a rank holds {size(held['ddp'])} under DDP, {named}"
        sentences.append((min(stages.values()) < held["ddp"], text))
    yes = [text for saves, text in sentences if saves]
    no = [text for saves, text in sentences if not saves]
    parts = [f"**Yes, where the model states are large:** {yes[0]}." if yes else ""]
    if len(yes) > 1:
        parts.append(f"At the small end, {yes[-1]}.")
    parts.append(f"**{'But on' if yes else 'On'} a tiny model it costs memory:** {no[-1]}." if no else "")
    missing = "The figure shows the arms. DDP or the stages of ZeRO are missing, so nothing is compared."
    return " ".join(filter(None, parts)) or missing


# --- time ----------------------------------------------------------------------------------------------------------


def of_time() -> Answer:
    """Predicted and published times. No GPU was measured here, and times of this machine say nothing about GPUs."""
    rows = steps()
    figure, more = answer_figures.steps(rows), (("predictions.html", "how good such predictions are"),)
    where = (f"predictions: {side_by_side.RANKS} x {side_by_side.GPU}; nothing was measured on a GPU here",)
    return Answer("time", "Does it cost time?", _time_in_words(rows), rows, figure, (PREDICTED, PUBLISHED), where, more)


def steps() -> list[dict]:
    """Seconds of a step of each arm in each setting: predicted, and as others measured them."""
    rows = []
    names = ("sequence", "micro_batch", "accumulation")
    for each in side_by_side.read()["steps"]:
        setting = {name: each[name] for name in names}
        rows.append(
            setting | {"arm": each["arm"], "basis": PREDICTED} | {key: each[key] for key in ("seconds", "low", "high")}
        )
    for row in side_by_side.published():
        setting = dict(zip(names, (row.seq, row.micro_batch, row.grad_acc), strict=True))
        if row.step_s and any(setting.items() <= each.items() for each in rows):
            bounds = {"seconds": row.step_s, "low": None, "high": None, "source": row.source}
            rows.append(setting | {"arm": row.arm, "basis": PUBLISHED} | bounds)
    for row in rows:
        passes = f"{row['accumulation']} pass{'es' * (row['accumulation'] > 1)}"
        row["setting"] = f"{passes} of {row['micro_batch']} row of {row['sequence']} tokens"
    return rows


def _time_in_words(rows: list[dict]) -> str:
    first = rows[0]["setting"]
    ours = {row["arm"]: row["seconds"] for row in rows if row["setting"] == first and row["basis"] == PREDICTED}
    base = ours["ddp"]
    named = {arm: f"{ours[arm] / base:.2f}".rstrip("0").rstrip(".") for arm in ours}
    words = joined([f"{named[arm]} times with {STAGES[arm]}" for arm in STAGES if arm != "fsdp2"])
    dear = [STAGES[arm] for arm in STAGES if ours[arm] > COSTS * base]
    cheap = [STAGES[arm] for arm in STAGES if ours[arm] <= COSTS * base]
    verb = "does" if len(dear) < 2 else "do"
    lead = f"{joined(dear) or 'nothing'} {verb}; {joined(cheap) or 'nothing'} hardly."
    text = f"**{lead[0].upper()}{lead[1:]}** Predicted for {NAMES[side_by_side.MODEL]} on eight H100:"
    text += f" compared with DDP, a step takes {words.replace(' times', ' times as long', 1)}."
    theirs = {row["arm"]: row["seconds"] for row in rows if row["basis"] == PUBLISHED}
    if {"zero1", "zero2", "zero3"} <= theirs.keys():
        second, third = theirs["zero2"] / theirs["zero1"], theirs["zero3"] / theirs["zero1"]
        setting = next(row["setting"] for row in rows if row["basis"] == PUBLISHED)
        text += (
            f" With {setting} in a step, others measured that stage 2 takes {second:.2g} times as long as stage 1,"
            f" and stage 3 {third:.2g} times."
        )
    return text


# --- bytes ---------------------------------------------------------------------------------------------------------


def of_traffic(runs: Runs) -> Answer:
    """For the first model on virtual ranks; if there is none, for the model that was trained here."""
    question, at_scale = "Does it send more?", of_scale(runs)
    members = [run for run in next(iter(at_scale.values()), None) or trained_here(runs) if run.traffic]
    rows = [row for row in traffic.table(Runs(tuple(members))) if row["source"] in ("counted", PAPER)]
    if "ddp" not in (counted := sent(rows, "counted")) or len(counted) < 2:
        return Answer("traffic", question, "No two arms have records of what they send yet.", command=AT_SCALE)
    model, basis = NAMES.get(members[0].model, members[0].model), VIRTUAL if members[0].virtual else MEASURED
    rows = [row | {"model": model, "conditions": conditions(members[0])} for row in rows]
    more = (("claims/L-32.html", "claim L-32"), ("compare.html#Bytes-moved", "every group of runs"))
    command, text = "" if at_scale else AT_SCALE, _traffic_in_words(rows)
    return Answer(
        "traffic", question, text, rows, answer_figures.traffic(rows), (basis,), machines(members), more, command
    )


def sent(rows: list[dict], source: str) -> dict[str, float]:
    """Bytes that a rank sends in a step, as a multiple of one all-reduce, by arm."""
    chosen = by([row for row in rows if row["source"] == source], "arm")
    return {arm: sum(row["times"] for row in mine) for (arm,), mine in chosen.items()}


def _traffic_in_words(rows: list[dict]) -> str:
    counted, paper = sent(rows, "counted"), sent(rows, PAPER)
    times = {arm: counted[arm] / counted["ddp"] for arm in STAGES if arm in counted}
    named = joined([f"{factor:.2g} times with {STAGES[arm]}" for arm, factor in times.items()])
    answer = "Yes." if max(times.values(), default=0) > COSTS else "No."
    text = f"**{answer}** Compared with DDP, a rank that trains {rows[0]['model']} sends"
    text += f" {named.replace(' times', ' times as many bytes', 1) or 'as many bytes'}."
    if off := [arm for arm in ("zero1", "zero2") if arm in counted and counted[arm] > COSTS * paper[arm]]:
        stages = f"stage{'s' * (len(off) > 1)} {' and '.join(arm[-1] for arm in off)}"
        text += f" For {stages}, the ZeRO paper expects as much as DDP sends. DeepSpeed sends more, because it"
        text += " all-reduces the gradients, as DDP does, and then gathers the weights."
    return text


def advice() -> str:
    """Which arm for 7 billion parameters on eight GPUs: what `study advise` says of it."""
    return side_by_side.read()["advice"]["in_words"][0]
