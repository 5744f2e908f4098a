"""What the index and the README answer first: does ZeRO change the losses, save memory, cost time, send more?

Each answer is a figure and a sentence that is computed from the rows that the figure draws. Losses are of real ranks,
on a model so small that two CPU cores can train it. Memory and traffic are of sizes that people train where the runs
have them (virtual ranks), because on a tiny model ZeRO costs memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pandas as pd
from matplotlib.figure import Figure

from study.core.numbers import count, nats, size
from study.core.words import joined
from study.predict.front import estimate, papers
from study.records import metrics
from study.records.groups import by, groups
from study.records.runs import Run, Runs
from study.report import answer_figures, grouping, side_by_side
from study.report.grouping import parts, sums
from study.report.of_record import setup_of
from study.report.templating import machine
from study.report.topics import losses, memory, traffic

BASELINE = "ddp"
STAGES = ("zero1", "zero2", "zero3")
TINY = {"task": "wikitext", "model": "gpt-tiny", "ranks": 2, "virtual": False, "precision": "fp32"}
PROTOCOL, RANKS = "at_scale", 8
MEASURED, VIRTUAL, PREDICTED, PUBLISHED = "measured", "measured on virtual ranks", "predicted", "published by others"
GPU, HOST = "GPU", "host"  # where memory is
NAMES = {"llama3-8b": "Llama-3-8B", "gpt2-xl": "GPT-2 XL", "bert-large": "BERT-large", "gemma2-9b": "Gemma2-9B"}
NAMES |= {"qwen3-32b": "Qwen3-32B", "bert-tiny": "a BERT", "gpt-tiny": "a GPT"}
AT_SCALE = "study sweep at_scale --runs runs/at_scale"
FP32_NOISE = 1e-5  # nats: differences that come from the order of additions in fp32, see `tests/test_parity.py`
IN_WORDS = {"zero1": "stage 1", "zero2": "stage 2", "zero3": "stage 3", "zero3_cpu": "offloading", "fsdp2": "FSDP2"}
LIKE = 0.05  # share of a peak: what differs by less is called as much
OVER_DDP = ["over_ddp_low", "over_ddp_high"]  # the interval of a ratio of predicted seconds
PASSES = 8  # of a step, beside the one pass of the runs: stages 2 and 3 send in each
COSTS = 1.1  # from this multiple of DDP's time or bytes on, a sentence says that an arm costs more


@dataclass(frozen=True)
class Answer:
    """The answer to one question of the index. Without rows it has no figure, but a command that makes the runs."""

    name: str  # of its files
    question: str
    sentence: str
    more: str = ""  # what only the index says
    rows: pd.DataFrame = field(default_factory=pd.DataFrame)
    figure: Figure | None = None
    bases: tuple[str, ...] = ()  # that of the first sentence comes first
    where: tuple[str, ...] = ()  # the machines of the runs
    links: tuple[tuple[str, str], ...] = ()  # where there is more: a page and its name
    command: str = ""  # what makes runs that are missing here


def name_of(run: Run) -> str:
    """Return the model of a run as people call it."""
    return NAMES.get(run.record.requested.model or "", run.record.requested.model or "a model")


def answers(runs: Runs) -> list[Answer]:
    """Return the answers of the index, in their order."""
    return [of_losses(runs), of_memory(runs), of_time(), of_traffic(runs)]


def machines(runs: Iterable[Run]) -> tuple[str, ...]:
    """Return the machines of some runs in words."""
    return tuple(dict.fromkeys(machine(run).replace("\\", "") for run in runs))


# --- losses --------------------------------------------------------------------------------------------------------


def trained(runs: Runs) -> pd.DataFrame:
    """Return the losses of a training that learns; if there is none, of the group with the most arms, fp32 first."""
    for chosen in (runs.select(**TINY), runs.select(precision="fp32"), runs):
        rows = losses.table(chosen)
        compared = rows[rows["rows_per_step"].notna()] if len(rows) else rows
        several = [mine for mine in parts(compared, "group").values() if losses.furthest(mine) is not None]
        if several:
            return max(several, key=lambda mine: mine["arm"].nunique())
    return pd.DataFrame()


def of_losses(runs: Runs) -> Answer:
    """Return whether an arm changes the losses."""
    question = "Does ZeRO change the losses?"
    rows = trained(runs)
    worst = losses.furthest(rows)
    if worst is None:
        command = "study sweep smoke --runs runs/smoke"
        return Answer("losses", question, "No two arms have trained on the same rows yet.", command=command)
    names = set(rows["run"])
    mine = [run for run in runs if run.record.run_id in names]
    first = mine[0]  # a group is of one model and precision
    answer = "No." if worst["difference"] <= FP32_NOISE else "Here they differ by more than fp32 rounding explains."
    arms = rows[rows["difference"].notna()]["arm"].nunique()
    curve = rows.groupby("step")["loss"].mean()
    sentence = (
        f"**{answer}** With {name_of(first)} in {first.record.requested.precision}, the losses of {arms} arms stay"
        f" within {nats(worst['difference'])} of {worst['against']}'s at each of {len(curve)} steps"
        f" (furthest: {worst['arm']}), while the loss goes from {curve.iloc[0]:.2f} to {curve.iloc[-1]:.2f}."
    )
    links = (("compare.html#Losses", "all tasks and precisions"),)
    figure = losses.figure(rows)
    return Answer("losses", question, sentence, "", rows, figure, (MEASURED,), machines(mine), links)


# --- memory --------------------------------------------------------------------------------------------------------


def of_memory(runs: Runs) -> Answer:
    """Return whether an arm saves GPU memory."""
    question = "Does it save memory?"
    at_scale = of_scale(runs)
    tiny = trained_here(runs)
    of_models = [
        row
        for mine in at_scale.values()
        for row in (*memory_rows(mine), *_published(mine[0].record.requested.model or ""))
    ]
    rows = pd.DataFrame(of_models + memory_rows(tiny))
    if rows.empty:
        return Answer("memory", question, "No two arms have records of their memory yet.", command=AT_SCALE)
    members = [run for mine in (*at_scale.values(), tiny) for run in mine]
    first, *others = memory_in_words(rows)
    return Answer(
        name="memory",
        question=question,
        sentence=first,
        more=" ".join(others),
        rows=rows,
        figure=answer_figures.memory(rows),
        bases=tuple(basis for basis in (VIRTUAL, MEASURED, PREDICTED, PUBLISHED) if (rows["basis"] == basis).any()),
        where=machines(members),
        links=(("compare.html#Memory-at-the-peak", "every group of runs"), ("calculator.html", "other shapes")),
        command="" if at_scale else AT_SCALE,
    )


def of_scale(runs: Runs) -> dict[str, list[Run]]:
    """Return the protocol's runs on eight virtual ranks of two models: the one with the most arms, and the smallest.

    If a model has runs that recompute activations, only those.
    """
    chosen = [
        run
        for run in runs.select(ranks=RANKS).done
        if run.record.cell.protocol == PROTOCOL and metrics.components(run.record)
    ]
    of_model = {}
    for (model,), members in by(chosen, "model").items():
        mine = [run for run in members if run.record.requested.checkpointing] or members
        if len(mine) > 1 and BASELINE in {run.record.arm for run in mine}:
            of_model[model] = mine
    by_size = sorted(of_model, key=lambda model: -(of_model[model][0].record.observed.parameters or 0))
    by_size.sort(key=lambda model: len(of_model[model]) < max(map(len, of_model.values())))
    return {model: of_model[model] for model in (*by_size[:1], *by_size[1:][-1:])}


def trained_here(runs: Runs) -> list[Run]:
    """Return one run per arm of the model whose losses are shown; if there is none, of the group with the most arms."""
    real = [
        run
        for run in runs.done
        if metrics.components(run.record) and not run.record.is_virtual and (run.record.observed.ranks or 1) > 1
    ]
    known = [run for run in real if not run.record.requested.memory_cap_gib]
    for choice in (Runs(tuple(known)).select(**TINY).runs, known):
        alike = groups(choice, only=grouping.SETTINGS).values()
        for members in sorted(alike, key=lambda mine: -len({run.record.arm for run in mine})):
            of_arm = {
                run.record.arm: run
                for run in reversed(members)
                if run.record.observed.ranks == members[0].record.observed.ranks
            }
            if BASELINE in of_arm and len(of_arm) > 1:
                return list(of_arm.values())
    return []


def memory_rows(members: list[Run]) -> list[dict]:
    """Return the parts of a rank's peak of GPU memory, measured and predicted, and what is on the host.

    Where a run without a GPU offloads, both are one memory: its split is predicted. It is left out where a GPU would
    need other memory than the CPU on which the other arms were measured.
    """
    rows: list[dict] = []
    is_like_gpu = all(_is_like_gpu(run) for run in members if run.record.arm == BASELINE)
    for run in sorted(members, key=grouping.in_order):
        about = {
            "model": name_of(run),
            "parameters": run.record.observed.parameters,
            "ranks": run.record.observed.ranks,
        }
        about |= {"conditions": conditions(run), "arm": run.record.arm, "memory": GPU}
        if not memory.has_one_memory(run):
            basis = VIRTUAL if run.record.is_virtual else MEASURED
            rows += _parts(about | {"basis": basis}, memory.part_bytes(metrics.components(run.record)))
            rows += _parts(about | {"basis": PREDICTED}, memory.predicted_parts(run))
        elif is_like_gpu and (setup := setup_of(run.record)):
            on_gpu = estimate(replace(setup, device="cuda", data_bytes=0))
            about |= {"basis": PREDICTED}
            rows += _parts(about, memory.part_bytes(on_gpu.at_peak))
            rows += _parts(about | {"memory": HOST}, {answer_figures.HOST: on_gpu.host_bytes})
    return rows


def _parts(about: dict, sizes: dict[str, float]) -> list[dict]:
    return [about | {"part": part, "bytes": part_bytes} for part, part_bytes in sizes.items()]


def _is_like_gpu(run: Run) -> bool:
    """Return whether a GPU would need as much memory for a run as the CPU did: kernels of attention may differ."""
    setup = setup_of(run.record)
    if run.record.observed.device != "cpu" or setup is None:
        return True
    on_gpu = estimate(replace(setup, device="cuda", data_bytes=0)).peak_bytes
    return abs(on_gpu / memory.held_bytes(run) - 1) < LIKE


def conditions(run: Run) -> str:
    """Return what a rank did in a pass: `rows per pass 1, tokens 2048, activations recomputed`."""
    activations = "recomputed" if run.record.requested.checkpointing else "kept"
    requested = run.record.requested
    return f"rows/pass {requested.micro_batch}, tokens {requested.sequence}, activations {activations}"


def _published(model: str) -> list[dict]:
    """Return what others measured of the same model and arm on as many GPUs; their other settings are in the row."""
    rows = []
    for row in side_by_side.published(model, RANKS):
        if row.memory_bytes:
            known = {"rows per pass": row.micro_batch, "tokens": row.seq, "passes": row.grad_acc}
            settings = ", ".join(f"{name} {value}" for name, value in known.items() if value)
            place = {"model": NAMES.get(model, model), "parameters": row.params, "ranks": RANKS, "arm": row.arm}
            place |= {"conditions": settings, "basis": PUBLISHED, "memory": GPU, "part": "all"}
            rows.append(place | {"bytes": row.memory_bytes, "source": row.source})
    return rows


def totals(rows: pd.DataFrame, basis: str) -> dict[str, float]:
    """Return the bytes of GPU memory at the peak by arm."""
    return sums(rows[(rows["basis"] == basis) & (rows["memory"] == GPU)], "arm", "bytes")


def memory_in_words(rows: pd.DataFrame) -> list[str]:
    """Return which stages save memory, a sentence for each model."""
    saving: dict[bool, list[str]] = {True: [], False: []}
    for model, mine in parts(rows, "model").items():
        peaks = totals(mine, mine["basis"].iloc[0])
        stages = [peaks[arm] for arm in STAGES if arm in peaks]
        if BASELINE in peaks and stages:
            first = mine.iloc[0]
            text = f"with {model} ({count(first['parameters'])} parameters), a rank of {first['ranks']} holds"
            text += f" {size(peaks[BASELINE])} under DDP, {by_stage(peaks)} ({first['conditions']})."
            saving[min(stages) < peaks[BASELINE]].append(text)
    yes, no = saving[True], saving[False]
    texts = [f"**Yes, where the model states are large:** {text}" for text in yes[:1]]
    texts += [f"At the small end, {text}" for text in yes[1:]]
    costs = "**On a tiny model it costs memory,** because buckets are larger than the states that are divided:"
    texts += [f"{costs} {text}" for text in no[-1:]]
    return texts or ["DDP or the stages of ZeRO are missing, so nothing is compared."]


def by_stage(peaks: dict[str, float]) -> str:
    """Return sizes of the stages that keep everything on the GPU: `60 GB under stage 1, ...`."""
    return ", ".join(f"{size(peaks[arm])} under stage {arm[-1]}" for arm in STAGES if arm in peaks)


# --- time ----------------------------------------------------------------------------------------------------------


def of_time() -> Answer:
    """Return predicted and published times. No GPU was measured here, and times of a CPU say nothing about GPUs."""
    rows = steps()
    where = (f"predictions: {side_by_side.RANKS} x {side_by_side.GPU}; nothing was measured on a GPU here",)
    links, bases = (("calculator.html#basis", "how good such predictions are"),), (PREDICTED, PUBLISHED)
    sentence, more, figure = time_in_words(rows), published_in_words(rows), answer_figures.steps(rows)
    return Answer("time", "Does it cost time?", sentence, more, rows, figure, bases, where, links)


def steps() -> pd.DataFrame:
    """Return the seconds of a step of each arm in each setting: predicted, and as others measured them."""
    names = ["sequence", "micro_batch", "accumulation"]
    ours = pd.DataFrame(side_by_side.steps())[[*names, "arm", "seconds", "low", "high", *OVER_DDP]]
    theirs = pd.DataFrame(
        {"arm": row.arm, "seconds": row.step_s, "source": row.source}
        | dict(zip(names, (row.seq, row.micro_batch, row.grad_acc), strict=True))
        for row in side_by_side.published()
        if row.step_s
    )
    theirs = theirs.merge(ours[names].drop_duplicates())  # those in a setting of ours
    rows = pd.concat([ours.assign(basis=PREDICTED), theirs.assign(basis=PUBLISHED)], ignore_index=True)
    about = [
        f"{count:g} x {rows_per_pass:g} row of {tokens:g} tokens"
        for tokens, rows_per_pass, count in rows[names].to_numpy()
    ]
    return rows.assign(setting=about)


def time_in_words(rows: pd.DataFrame) -> str:
    """Return which arms take longer than DDP."""
    predicted = rows[rows["basis"] == PREDICTED]
    first = predicted[predicted["setting"] == predicted["setting"].iloc[0]]
    times, (low, high) = over_ddp(first), (sums(first, "arm", name) for name in OVER_DDP)
    surely = [IN_WORDS[arm] for arm in times if low[arm] > COSTS]
    probably = [IN_WORDS[arm] for arm in times if times[arm] > COSTS >= low[arm]]
    words = joined([f"{times[arm]:.2f} ({low[arm]:.2g} to {high[arm]:.2g}) with {IN_WORDS[arm]}" for arm in times])
    answers = [f"{answer} with {joined(arms)}" for answer, arms in (("yes", surely), ("probably", probably)) if arms]
    text = f"**{(', '.join(answers) or 'no').capitalize()}.** Predicted for {NAMES[side_by_side.MODEL]} on eight H100"
    text += f" with one pass in a step, as multiples of DDP's seconds: {words}."
    for (passes, tokens), mine in predicted[predicted["accumulation"] > 1].groupby(["accumulation", "sequence"]):
        longer = [f"{times:.2f} with {IN_WORDS[arm]}" for arm, times in over_ddp(mine).items()]
        text += f" With {passes} passes of {tokens} tokens: {joined(longer)}."
    return text


def over_ddp(rows: pd.DataFrame) -> dict[str, float]:
    """Return the predicted seconds of arms as multiples of DDP's."""
    seconds = sums(rows, "arm", "seconds")
    return {arm: seconds[arm] / seconds[BASELINE] for arm in IN_WORDS if arm != "fsdp2"}


def published_in_words(rows: pd.DataFrame) -> str:
    """Return what counts as a cost, and what others measured."""
    text = f"More than {COSTS} counts as a cost."
    published = rows[rows["basis"] == PUBLISHED]
    theirs = sums(published, "arm", "seconds")
    if set(STAGES) <= theirs.keys():
        measured = [f"{theirs[arm] / theirs['zero1']:.2g} with stage {arm[-1]}" for arm in ("zero2", "zero3")]
        text += f" Others measured, as multiples of stage 1's ({published['setting'].iloc[0]}): {joined(measured)}."
    return text


# --- bytes ---------------------------------------------------------------------------------------------------------


def of_traffic(runs: Runs) -> Answer:
    """Return whether an arm sends more than DDP."""
    question = "Does it send more?"
    rows = sent(runs)
    if rows.empty:
        return Answer("traffic", question, "No two arms have records of what they send yet.", command=AT_SCALE)
    names = set(rows["run"])
    mine = [run for run in runs if run.record.run_id in names]
    return Answer(
        name="traffic",
        question=question,
        sentence=f"{traffic_in_words(rows)} {many_passes(mine)}",
        rows=rows,
        figure=answer_figures.traffic(rows),
        bases=(VIRTUAL if mine[0].record.is_virtual else MEASURED,),
        where=machines(mine),
        links=(("claims.html#S000-20", "claim S000-20"), ("compare.html#Bytes-moved", "every group of runs")),
        command="" if mine[0].record.is_virtual else AT_SCALE,
    )


def sent(runs: Runs) -> pd.DataFrame:
    """Return what arms send: of the first model on virtual ranks; if there is none, of the model trained here."""
    chosen = next(iter(of_scale(runs).values()), None) or trained_here(runs)
    members = [run for run in chosen if metrics.sent(run.record)]
    rows = traffic.table(Runs(tuple(members)))
    counted = traffic.by_arm(rows, traffic.COUNTED) if len(rows) else {}
    if BASELINE not in counted or len(counted) < 2:
        return pd.DataFrame()
    first = members[0]
    rows = rows[rows["source"].isin([traffic.COUNTED, traffic.PAPER])]
    runs_of = {run.record.arm: run.record.run_id for run in members}
    return rows.assign(model=name_of(first), conditions=conditions(first), run=rows["arm"].map(runs_of))


def traffic_in_words(rows: pd.DataFrame) -> str:
    """Return which arms send more than DDP, and where the ZeRO paper expects less."""
    counted, paper = (traffic.by_arm(rows, source) for source in (traffic.COUNTED, traffic.PAPER))
    times = {arm: counted[arm] / counted[BASELINE] for arm in IN_WORDS if arm in counted}
    answer = "Yes." if max(times.values(), default=0) > COSTS else "No."
    words = joined([f"{times[arm]:.2g} with {IN_WORDS[arm]}" for arm in times])
    model = rows["model"].iloc[0]
    passes = "one pass" if (rows["passes"] == 1).all() else "these passes"
    text = f"**{answer}** With {passes} in a step, a rank that trains {model} sends these multiples of what it sends"
    text += f" under DDP: {words}."
    more = [arm[-1] for arm in ("zero1", "zero2") if arm in counted and counted[arm] > COSTS * paper[arm]]
    if more:
        text += f" The ZeRO paper expects 1 for stages {joined(more)}: it reduce-scatters the gradients. DeepSpeed"
        text += " all-reduces them, as DDP does, and then gathers the weights."
    return text


def many_passes(members: list[Run]) -> str:
    """Return what stages send if a step has several passes, as multiples of DDP's bytes. Predicted."""
    sent = {}
    for run in members:
        if setup := setup_of(run.record):
            prediction = estimate(replace(setup, accumulation=PASSES))
            sent[run.record.arm] = papers.wire_bytes(prediction.traffic, setup.ranks)
    if BASELINE not in sent:
        return ""
    words = [f"{sent[arm] / sent[BASELINE]:.2g} with {IN_WORDS[arm]}" for arm in STAGES if arm in sent]
    return f"With {PASSES} passes: {joined(words)} (predicted), because stages 2 and 3 send in each pass."


def advice() -> list[str]:
    """Return which arm `study advise` recommends for 7 billion parameters on eight GPUs."""
    return side_by_side.advice()


# Findings that no paper states, each by its claim or fault.
BEYOND_PAPERS = {
    "L-67": "**Without a GPU, Accelerate does not use FSDP2,** even if its config asks for it, and does not warn.",
    "S002-25": "**The script of document 002 never switches DeepSpeed on.** Run as printed, with a small BERT, its gain"
    " comes from a second training that starts from the weights of the first. Whether the published curves are from"
    " this script is not known.",
}
