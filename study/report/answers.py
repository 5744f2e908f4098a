"""What the index and the README answer first: does ZeRO change the losses, save memory, cost time, send more?

Each answer is a figure and a sentence that is computed from the rows that the figure draws. Losses are of real ranks,
on a model so small that two CPU cores can train it. Memory and traffic are of sizes that people train where the runs
have them (virtual ranks), because on a tiny model ZeRO costs memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pandas as pd
from matplotlib.figure import Figure

from study.bench.prediction import setup_of
from study.io.numbers import count, nats, size
from study.io.words import joined
from study.ledger.verdict import REFUTED
from study.predictor.estimate import estimate
from study.predictor.outside import side_by_side
from study.records.groups import by, groups
from study.records.runs import Run, Runs
from study.report import answer_figures, grouping
from study.report.grouping import parts, sums
from study.report.templating import machine
from study.report.topics import losses, memory, traffic

BASELINE = "ddp"
STAGES = ("zero1", "zero2", "zero3")
TINY = {"task": "wikitext", "model": "gpt-tiny", "ranks": 2, "virtual": False, "precision": "fp32"}
PROTOCOL, RANKS = "at_scale", 8
MEASURED, VIRTUAL, PREDICTED, PUBLISHED = "measured", "measured on virtual ranks", "predicted", "published by others"
BASES = (VIRTUAL, MEASURED, PREDICTED, PUBLISHED)
GPU, HOST = "GPU", "host"  # where memory is
NAMES = {"llama3-8b": "Llama-3-8B", "gpt2-xl": "GPT-2 XL", "bert-large": "BERT-large", "gemma2-9b": "Gemma2-9B"}
NAMES |= {"qwen3-32b": "Qwen3-32B", "bert-tiny": "a BERT", "gpt-tiny": "a GPT"}
AT_SCALE = "study sweep at_scale --runs runs/at_scale"
FP32_NOISE = 1e-5  # nats: differences that come from the order of additions in fp32, see `tests/test_parity.py`
IN_WORDS = {"zero1": "stage 1", "zero2": "stage 2", "zero3": "stage 3", "zero3_cpu": "offloading", "fsdp2": "FSDP2"}
LIKE = 0.05  # share of a peak: what differs by less is called as much
COSTS = 1.1  # from this multiple of DDP's time or bytes on, a sentence says that an arm costs more


@dataclass(frozen=True)
class Answer:
    """The answer to one question of the index. Without rows it has no figure, but a command that makes the runs."""

    name: str  # of its files
    question: str
    sentence: str
    rows: pd.DataFrame = field(default_factory=pd.DataFrame)
    figure: Figure | None = None
    bases: tuple[str, ...] = ()
    where: tuple[str, ...] = ()  # the machines of the runs
    links: tuple[tuple[str, str], ...] = ()  # where there is more: a page and its name
    command: str = ""  # what makes runs that are missing here


def name_of(run: Run) -> str:
    """Return the model of a run as people call it."""
    return NAMES.get(run.model or "", run.model or "a model")


def first_sentence(text: str) -> str:
    """Return the first sentence after the bold answer: it has the number."""
    end = text.find(". ", text.find("** ") + 3)
    return text if end < 0 else text[: end + 1]


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
    mine = [run for run in runs if run.name in names]
    first = mine[0]  # a group is of one model and precision
    answer = "No." if worst["difference"] <= FP32_NOISE else "Here they differ by more than fp32 rounding explains."
    arms = rows[rows["difference"].notna()]["arm"].nunique()
    sentence = (
        f"**{answer}** With {name_of(first)} in {first.precision}, the losses of {arms} arms stay"
        f" within {nats(worst['difference'])} of {worst['against']}'s at each of {rows['step'].max()} steps"
        f" (furthest: {worst['arm']})."
    )
    links = (("compare.html#Losses", "all tasks and precisions"),)
    return Answer("losses", question, sentence, rows, losses.figure(rows), (MEASURED,), machines(mine), links)


# --- memory --------------------------------------------------------------------------------------------------------


def of_memory(runs: Runs) -> Answer:
    """Return whether an arm saves GPU memory."""
    question = "Does it save memory?"
    at_scale = of_scale(runs)
    tiny = trained_here(runs)
    rows = pd.DataFrame(
        [row for mine in at_scale.values() for row in (*held(mine), *_published(mine[0].model or ""))] + held(tiny)
    )
    if rows.empty:
        return Answer("memory", question, "No two arms have records of their memory yet.", command=AT_SCALE)
    members = [run for mine in at_scale.values() for run in mine] + tiny
    return Answer(
        name="memory",
        question=question,
        sentence=memory_in_words(rows),
        rows=rows,
        figure=answer_figures.memory(rows),
        bases=tuple(basis for basis in BASES if (rows["basis"] == basis).any()),
        where=machines(members),
        links=(("compare.html#Memory-at-the-peak", "every group of runs"), ("calculator.html", "other shapes and GPUs")),
        command="" if at_scale else AT_SCALE,
    )


def of_scale(runs: Runs) -> dict[str, list[Run]]:
    """Return the protocol's runs on eight virtual ranks, by model: first the one with most arms, then from the largest.

    If a model has runs that recompute activations, only those.
    """
    protocol = [run for run in runs.done if run.record.cell.protocol == PROTOCOL]
    of_model = {}
    for (model,), members in by([run for run in protocol if run.ranks == RANKS and run.components], "model").items():
        mine = [run for run in members if run.requested.checkpointing] or members
        if len(mine) > 1 and BASELINE in {run.arm for run in mine}:
            of_model[model] = mine
    by_size = sorted(of_model, key=lambda model: -(of_model[model][0].parameters or 0))
    first = max(by_size, key=lambda model: len(of_model[model]), default=None)
    return {model: of_model[model] for model in sorted(by_size, key=lambda model: model != first)}


def trained_here(runs: Runs) -> list[Run]:
    """Return one run per arm of the model whose losses are shown; if there is none, of the group with the most arms."""
    real = [run for run in runs.done if run.components and not run.virtual and (run.ranks or 1) > 1]
    known = [run for run in real if not run.requested.memory_cap_gib]
    for choice in (Runs(tuple(known)).select(**TINY).runs, known):
        alike = groups(choice, only=grouping.SETTINGS).values()
        for members in sorted(alike, key=lambda mine: -len({run.arm for run in mine})):
            of_arm = {run.arm: run for run in reversed(members) if run.ranks == members[0].ranks}
            if BASELINE in of_arm and len(of_arm) > 1:
                return list(of_arm.values())
    return []


def held(members: list[Run]) -> list[dict]:
    """Return the parts of a rank's peak of GPU memory, measured and predicted, and what is on the host.

    Where a run without a GPU offloads, both are one memory: its split is predicted. It is left out where a GPU would
    need other memory than the CPU on which the other arms were measured.
    """
    rows: list[dict] = []
    is_like_gpu = all(_is_like_gpu(run) for run in members if run.arm == BASELINE)
    for run in sorted(members, key=grouping.in_order):
        about = {"model": name_of(run), "parameters": run.parameters, "ranks": run.ranks}
        about |= {"conditions": conditions(run), "arm": run.arm, "memory": GPU}
        if offloads(run) and run.device == "cpu":
            rows += _split(run, about | {"basis": PREDICTED}) if is_like_gpu else []
        else:
            basis = VIRTUAL if run.virtual else MEASURED
            rows += _parts(about | {"basis": basis}, memory.part_bytes(run.components))
            rows += _parts(about | {"basis": PREDICTED}, memory.predicted_parts(run))
    return rows


def _parts(about: dict, sizes: dict[str, float]) -> list[dict]:
    return [about | {"part": part, "bytes": part_bytes} for part, part_bytes in sizes.items()]


def offloads(run: Run) -> bool:
    """Return whether an arm keeps states in host memory or on a disk."""
    observed = run.record.observed
    places = {observed.offload_optimizer, observed.offload_param} - {None, "none"}
    return bool(places or (observed.fsdp and observed.fsdp["offloads"]))


def _is_like_gpu(run: Run) -> bool:
    """Return whether a GPU would need as much memory for a run as the CPU did: kernels of attention may differ."""
    setup = setup_of(run.record)
    if run.device != "cpu" or setup is None:
        return True
    on_gpu = estimate(replace(setup, device="cuda", data_bytes=0)).peak_bytes
    return abs(on_gpu / memory.held_bytes(run) - 1) < LIKE


def _split(run: Run, about: dict) -> list[dict]:
    """Return what a GPU and its host would hold, predicted."""
    setup = setup_of(run.record)
    if setup is None:
        return []
    on_gpu = estimate(replace(setup, device="cuda", data_bytes=0))
    host = about | {"memory": HOST, "part": "host memory", "bytes": on_gpu.host_bytes}
    return [*_parts(about, memory.part_bytes(on_gpu.at_peak)), host]


def conditions(run: Run) -> str:
    """Return what a rank did in a pass: `1 row of 2048 tokens per pass, activations recomputed`."""
    rows = f"{run.micro_batch} row{'s' * (run.micro_batch != 1)} of {run.sequence} tokens per pass"
    return f"{rows}, activations {'recomputed' if run.requested.checkpointing else 'kept'}"


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


def memory_in_words(rows: pd.DataFrame) -> str:
    """Return which stages save memory on which model."""
    yes: list[str] = []
    no: list[str] = []
    for model, mine in parts(rows, "model").items():
        peaks = totals(mine, mine["basis"].iloc[0])
        stages = {arm: peaks[arm] for arm in STAGES if arm in peaks}
        if BASELINE in peaks and stages:
            parameters = mine["parameters"].iloc[0]
            what = f"{model} ({count(parameters)} parameters)" if pd.notna(parameters) else model
            text = f"with {what}, a rank holds {size(peaks[BASELINE])} under DDP, {by_stage(stages)}"
            (yes if min(stages.values()) < peaks[BASELINE] else no).append(text)
    texts = [f"**Yes, where the model states are large:** {yes[0]}."] if yes else []
    if len(yes) > 1:
        texts.append(f"At the small end, {yes[-1]}.")
    if no:
        texts.append(f"**{'But on' if yes else 'On'} a tiny model it costs memory:** {no[-1]}.")
    missing = "The figure shows the arms. DDP or the stages of ZeRO are missing, so nothing is compared."
    return " ".join(texts) or missing


def by_stage(peaks: dict[str, float]) -> str:
    """Return sizes of the stages that keep everything on the GPU: `60 GB under stage 1, ...`."""
    return ", ".join(f"{size(peaks[arm])} under stage {arm[-1]}" for arm in STAGES if arm in peaks)


# --- time ----------------------------------------------------------------------------------------------------------


def of_time() -> Answer:
    """Return predicted and published times. No GPU was measured here, and times of a CPU say nothing about GPUs."""
    rows = steps()
    figure, links = answer_figures.steps(rows), (("predictions.html", "how good such predictions are"),)
    where = (f"predictions: {side_by_side.RANKS} x {side_by_side.GPU}; nothing was measured on a GPU here",)
    bases = (PREDICTED, PUBLISHED)
    return Answer("time", "Does it cost time?", time_in_words(rows), rows, figure, bases, where, links)


def steps() -> pd.DataFrame:
    """Return the seconds of a step of each arm in each setting: predicted, and as others measured them."""
    names = ("sequence", "micro_batch", "accumulation")
    rows = []
    for each in side_by_side.read()["steps"]:
        rows.append({name: each[name] for name in (*names, "arm", "seconds", "low", "high")} | {"basis": PREDICTED})
    settings = [{name: row[name] for name in names} for row in rows]
    for published in side_by_side.published():
        setting = dict(zip(names, (published.seq, published.micro_batch, published.grad_acc), strict=True))
        if published.step_s and setting in settings:
            place = setting | {"arm": published.arm, "basis": PUBLISHED, "source": published.source}
            rows.append(place | {"seconds": published.step_s, "low": None, "high": None})
    for row in rows:
        passes = f"{row['accumulation']} pass{'es' * (row['accumulation'] > 1)}"
        row["setting"] = f"{passes} of {row['micro_batch']} row of {row['sequence']} tokens"
    return pd.DataFrame(rows)


def time_in_words(rows: pd.DataFrame) -> str:
    """Return which arms take longer than DDP."""
    predicted = rows[(rows["setting"] == rows["setting"].iloc[0]) & (rows["basis"] == PREDICTED)]
    ours = sums(predicted, "arm", "seconds")
    base = ours[BASELINE]
    named = {arm: f"{ours[arm] / base:.2f}".rstrip("0").rstrip(".") for arm in ours}
    words = joined([f"{named[arm]} times with {IN_WORDS[arm]}" for arm in IN_WORDS if arm != "fsdp2"])
    dear = [IN_WORDS[arm] for arm in IN_WORDS if ours[arm] > COSTS * base]
    cheap = [IN_WORDS[arm] for arm in IN_WORDS if ours[arm] <= COSTS * base]
    lead = f"{joined(dear) or 'nothing'} {'does' if len(dear) < 2 else 'do'}; {joined(cheap) or 'nothing'} hardly."
    text = f"**{lead[0].upper()}{lead[1:]}** Predicted for {NAMES[side_by_side.MODEL]} on eight H100:"
    text += f" compared with DDP, a step takes {words.replace(' times', ' times as long', 1)}."
    published = rows[rows["basis"] == PUBLISHED]
    theirs = sums(published, "arm", "seconds")
    if set(STAGES) <= theirs.keys():
        second, third = theirs["zero2"] / theirs["zero1"], theirs["zero3"] / theirs["zero1"]
        text += (
            f" With {published['setting'].iloc[0]} in a step, others measured that stage 2 takes {second:.2g} times as"
            f" long as stage 1, and stage 3 {third:.2g} times."
        )
    return text


# --- bytes ---------------------------------------------------------------------------------------------------------


def of_traffic(runs: Runs) -> Answer:
    """Return whether an arm sends more than DDP."""
    question = "Does it send more?"
    at_scale = of_scale(runs)
    rows = sent(runs)
    if rows.empty:
        return Answer("traffic", question, "No two arms have records of what they send yet.", command=AT_SCALE)
    names = set(rows["run"])
    mine = [run for run in runs if run.name in names]
    return Answer(
        name="traffic",
        question=question,
        sentence=traffic_in_words(rows),
        rows=rows,
        figure=answer_figures.traffic(rows),
        bases=(VIRTUAL if mine[0].virtual else MEASURED,),
        where=machines(mine),
        links=(("claims/L-32.html", "claim L-32"), ("compare.html#Bytes-moved", "every group of runs")),
        command="" if at_scale else AT_SCALE,
    )


def sent(runs: Runs) -> pd.DataFrame:
    """Return what arms send: of the first model on virtual ranks; if there is none, of the model trained here."""
    chosen = next(iter(of_scale(runs).values()), None) or trained_here(runs)
    members = [run for run in chosen if run.traffic]
    rows = traffic.table(Runs(tuple(members)))
    counted = traffic.by_arm(rows, traffic.COUNTED) if len(rows) else {}
    if BASELINE not in counted or len(counted) < 2:
        return pd.DataFrame()
    first = members[0]
    rows = rows[rows["source"].isin([traffic.COUNTED, traffic.PAPER])]
    runs_of = {run.arm: run.name for run in members}
    return rows.assign(model=name_of(first), conditions=conditions(first), run=rows["arm"].map(runs_of))


def traffic_in_words(rows: pd.DataFrame) -> str:
    """Return which arms send more than DDP, and where the ZeRO paper expects less."""
    counted = traffic.by_arm(rows, traffic.COUNTED)
    paper = traffic.by_arm(rows, traffic.PAPER)
    times = {arm: counted[arm] / counted[BASELINE] for arm in IN_WORDS if arm in counted}
    named = joined([f"{factor:.2g} times with {IN_WORDS[arm]}" for arm, factor in times.items()])
    answer = "Yes." if max(times.values(), default=0) > COSTS else "No."
    text = f"**{answer}** Compared with DDP, a rank that trains {rows['model'].iloc[0]} sends"
    text += f" {named.replace(' times', ' times as many bytes', 1) or 'as many bytes'}."
    more = [arm for arm in ("zero1", "zero2") if arm in counted and counted[arm] > COSTS * paper[arm]]
    if more:
        stages = f"stage{'s' * (len(more) > 1)} {' and '.join(arm[-1] for arm in more)}"
        text += f" For {stages}, the ZeRO paper expects as much as DDP sends. DeepSpeed sends more, because it"
        text += " all-reduces the gradients, as DDP does, and then gathers the weights."
    return text


def advice() -> str:
    """Return which arm `study advise` recommends for 7 billion parameters on eight GPUs."""
    return side_by_side.read()["advice"]["in_words"][0]


# --- findings ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Headline:
    """What the README's picture shows, as rows."""

    losses: pd.DataFrame
    memory: pd.DataFrame
    traffic: pd.DataFrame
    tiny: pd.DataFrame  # memory of the model whose losses these are


def headline(runs: Runs) -> Headline | None:
    """Return the rows of the README's picture; None if the runs lack something that it shows."""
    at_scale = next(iter(of_scale(runs).values()), [])
    tables = [trained(runs), pd.DataFrame(held(at_scale)), sent(runs), pd.DataFrame(held(trained_here(runs)))]
    is_complete = bool(at_scale) and all(len(rows) and (rows["arm"] == BASELINE).any() for rows in tables)
    return Headline(*tables) if is_complete else None


def findings(shown: Headline, verdicts: list[dict]) -> list[str]:
    """Return sentences with their numbers, and what shows each."""
    compared = shown.losses[shown.losses["difference"].notna()]
    peaks, tiny = totals(shown.memory, VIRTUAL), totals(shown.tiny, MEASURED)
    moved = traffic.by_arm(shown.traffic, traffic.COUNTED)
    model, tiny_model = shown.memory["model"].iloc[0], shown.tiny["model"].iloc[0]
    parameters = count(shown.tiny["parameters"].iloc[0])
    curve = shown.losses.groupby("step")["loss"].mean()
    first, last = curve.iloc[0], curve.iloc[-1]
    lines = [
        f"**ZeRO does not change the losses.** In fp32, {compared['arm'].nunique()} arms on two real ranks stay within"
        f" {nats(compared['difference'].max())} of DDP at each of {shown.losses['step'].max()} steps, while the loss"
        f" goes from {first:.2f} to {last:.2f} (`study sweep smoke`).",
        f"**It saves memory on large models.** For {model} on eight GPUs, a rank holds {by_stage(peaks)} and"
        f" {size(peaks[BASELINE])} under DDP (virtual ranks, activations recomputed).",
        f"**On a tiny model it costs memory.** For {tiny_model} with {parameters} parameters, a rank holds"
        f" {by_stage(tiny)} and {size(tiny[BASELINE])} under DDP: the buckets are larger than the states that are"
        " partitioned.",
        f"**Stages 1 and 2 send more than DDP:** {_times(moved['zero1'], moved['zero2'])} as much"
        " (`study claims L-32`). They all-reduce the gradients, as DDP does, and then gather the weights.",
    ]
    return lines + _about_script(verdicts)


def _times(first: float, second: float) -> str:
    texts = dict.fromkeys(f"{value:.2g}" for value in (first, second))
    return f"{' and '.join(texts)} times"


def _about_script(verdicts: list[dict]) -> list[str]:
    by_id = {row["claim"]: row["verdict"] for row in verdicts}
    if not by_id.get("S002-25") == by_id.get("S002-27") == REFUTED:
        return []
    return [
        "**The script of document 002 never switches DeepSpeed on.** Its gain comes from a second training that"
        " starts from the weights of the first (`study claims S002-25`, `S002-27`)."
    ]


def beyond_papers(verdicts: list[dict]) -> list[str]:
    """Return findings that no paper states: one sentence for each of these claims that is refuted."""
    refuted = {row["claim"] for row in verdicts if row["verdict"] == REFUTED}
    known = {
        "L-32": "**Stages 1 and 2 send more than DDP,** because DeepSpeed all-reduces the gradients and then gathers"
        " the weights.",
        "L-67": "**Without a GPU, Accelerate does not use FSDP2,** even if its config asks for it, and does not warn.",
    }
    lines = [f"{text} ([{claim}](claims/{claim}.html))" for claim, text in known.items() if claim in refuted]
    about_script = [text[: text.rindex(" (")] for text in _about_script(verdicts)]
    return lines + [f"{text}. ([S002-25](claims/S002-25.html))" for text in about_script]
