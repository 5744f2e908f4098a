"""What `study virtual train.py` prints: the verdict, the parts of the peak, and what the script decided."""

from dataclasses import asdict
from pathlib import Path

from study.configs.stacks import described
from study.core.errors import Stop
from study.core.gpus import GPUS
from study.core.text import number_of, say, say_wrapped, show, size
from study.known.findings import COSTS, with_id
from study.known.which_apply import Flags, which_apply
from study.predict.front import StepTime, fits_on
from study.records import store
from study.records.schema import Record
from study.rehearsal.on_gpu import OnGpu, on_gpu
from study.rehearsal.request import Answer, Failure, Request
from study.rehearsal.seconds import seconds_of
from study.rehearsal.start import Tried
from study.watch.about import about

FITS = {"yes": "it fits", "only just": "it fits only just", "no": "it does not fit"}
GIB = 2**30


def failed(failure: Failure, request: Request) -> dict:
    """Say how a script ended that did not reach its steps."""
    place = f" at {failure.where}" if failure.where else ""
    if failure.kind == "hang":
        say_wrapped(f"It hangs{place}, as it would on {number_of(request.ranks, 'GPUs')}: {failure.message}")
    elif failure.kind == "script":
        # What is left out may be what the script misses.
        so = "with --skip" if request.skips else f"as it would on {number_of(request.ranks, 'GPUs')}"
        say_wrapped(f"It ends{place}, {so}: {failure.message}")
    else:
        say_wrapped(f"A rehearsal cannot go on{place}: {failure.message}")
    if failure.code:
        say("", f"    {failure.code}")
    if failure.kind == "value":
        say_wrapped("", "--value NAME=NUMBER gives a variable of the script a value; --skip FUNCTION leaves one out.")
    return {"fine": False, "peak_bytes": None, "parts": None, "fits": None, "error": asdict(failure)}


def show_answer(request: Request, answer: Answer, record: Record, rows: list[Tried], folder: Path) -> dict:
    """Print the verdict, the parts of the peak, and what the script decided."""
    seen = record.observed
    rank = record.memory.components.per_rank[0]
    device = on_gpu(answer, request.ranks, seen.stage)
    when = f"step {answer.peaks.index(max(answer.peaks)) + 1}"
    parts = rank.at_peak or {}
    for kind in ("evaluation", "saving"):
        highest = max(device.whole_evaluation or 0, device.evaluation or 0) if kind == "evaluation" else device.saving
        if highest == device.peak > device.training:
            when = kind
            parts = max((each.parts or {} for each in answer.moments if each.kind == kind), key=of_all)
    first = f"Rank 0 of {request.ranks}, run alone (virtual), peaks at {size(device.peak)} in {when}"
    fits = None
    if request.gpu:
        total_bytes = GPUS[request.gpu].memory_bytes
        fits = fits_on(GPUS[request.gpu], device.peak, device.driver)
        first += f", and nvidia-smi would show {device.driver / GIB:.1f} of {total_bytes / GIB:.0f} GiB: {FITS[fits]}"
    say_wrapped(f"{first}.")
    findings = show_mistakes(folder)
    if answer.cuda_peaks:
        say_wrapped(f"CUDA's own peak, with real values, is {size(max(answer.cuda_peaks))}.")
    show_tried(fits, rows)
    step = show_seconds(request, answer, record, folder) if request.gpu else None
    largest = sorted(parts.items(), key=lambda part: -part[1])
    say_wrapped("At the peak: " + ", ".join(f"{name.replace('_', ' ')} {size(held)}" for name, held in largest) + ".")
    if device.host:
        say_wrapped(f"The host keeps {size(device.host)} of these for this rank.")
    show_moments(request, answer, device)
    say_wrapped(f"Your script decided: {'; '.join(decided(record, answer, request))}.")
    if request.gpu:
        say_wrapped("Reserved and nvidia-smi are predicted: the count is replayed on PyTorch's allocator.")
    return {
        "peak_bytes": device.peak,
        "all_bytes": max(answer.peaks),
        "peaks": answer.peaks,
        "cuda_peaks": answer.cuda_peaks,
        "parts": parts,
        "after_step": rank.after_step,
        "device": asdict(device),
        "fits": fits,
        "findings": findings,
        "step": asdict(step) if step else None,
        "ranks_compared": request.compares_ranks,
        "moments": [asdict(each) for each in answer.moments],
        "loading_peak_bytes": answer.loading_peak_bytes,
        "observed": seen.model_dump(mode="json", exclude_defaults=True),
        "error": None,
    }


def show_seconds(request: Request, answer: Answer, record: Record, folder: Path) -> StepTime | None:
    """Say how long a step takes, or why that is not known."""
    try:
        step = seconds_of(request, answer, record, folder)
    except Stop as stop:
        say_wrapped(f"The seconds of a step are not predicted: {stop.what}.")
        return None
    interval = f"{step.low_s:.2g} to {step.high_s:.2g}"
    say_wrapped(f"A step is predicted to take {step.seconds:.2g} s ({interval}).")
    return step


def show_mistakes(folder: Path) -> list[dict]:
    """Show and return the mistakes that the prepared objects and the steps tell of."""
    mistakes = [each for each in about(folder).findings if all(getattr(each, cost) is None for cost in COSTS)]
    for each in mistakes:
        say_wrapped(f"{each.said} What to do: {each.remedy}.", indent="  ", first="- ")
    return list(map(asdict, mistakes))


def of_all(parts: dict[str, int]) -> int:
    return sum(parts.values())


def show_moments(request: Request, answer: Answer, device: OnGpu) -> None:
    """Say what evaluation and saving hold, or that the script did not come there."""
    left = max((each.batches_left or 0 for each in answer.moments), default=0)
    updates = number_of(answer.updates, "updates")
    if device.whole_evaluation:
        whole = size(device.whole_evaluation)
        say_wrapped(f"Evaluation peaks at {whole} if its last {left} batches leave as much behind as the first.")
    elif device.evaluation is not None:
        say_wrapped(f"Evaluation peaks at {size(device.evaluation)}.")
    elif request.evaluate:
        say_wrapped(f"It did not evaluate in its first {updates}. If it does later, give more --steps.")
    if device.saving is not None:
        say_wrapped(f"Saving peaks at {size(device.saving)}.")
    elif request.save:
        say_wrapped(f"It did not save in its first {updates}. If it does later, give more --steps.")


def show_known(folder: Path) -> list[str]:
    """Show the known faults that apply to what was prepared. Nothing is asked. Return their ids."""
    asked, _ = described((), Flags(), folder / store.RECORD)
    applying = [each for each in which_apply(asked) if each.answer == "applies"]
    if not applying:
        say_wrapped("No known fault surely applies here. `study stack` can check what a rehearsal cannot see.")
    else:
        count = "1 known fault applies" if len(applying) == 1 else f"{len(applying)} known faults apply"
        say_wrapped(f"{count} (seen, not asked):")
    for known in applying[:3]:
        said = with_id(known.fault.in_releases, known.fault.id)
        say_wrapped(f"{said} What to do: {known.do}.", indent="  ", first="- ")
    return [each.fault.id for each in applying]


def show_not_rehearsed(request: Request) -> None:
    """Say that nobody looked whether the ranks part, which would hang."""
    if request.ranks > 1 and not request.compares_ranks:
        say_wrapped("Rank 1 was not rehearsed: --evaluate compares its collectives, so that a hang is found.")


def decided(record: Record, answer: Answer, request: Request) -> list[str]:
    """Return what the prepared objects are, which no flag has said."""
    seen = record.observed
    how = seen.wrapper or "one process"
    if seen.stage is not None:
        how = f"ZeRO stage {seen.stage}"
    elif seen.fsdp:
        how = "FSDP2"
    elif "FullySharded" in how:
        how = "FSDP1"
    words = [how]
    offloaded = {"optimizer": seen.offload_optimizer, "weights": seen.offload_param}
    words += [f"{what} offloaded to {home}" for what, home in offloaded.items() if home not in (None, "none")]
    kinds = {name: seen.dtypes.get(name) for name in ("weights", "master") if seen.dtypes.get(name)}
    words.append(", ".join(f"{name} in {kind}" for name, kind in kinds.items()))
    if seen.autocast:
        words.append(f"autocast {seen.autocast}")
    fused = ", fused" if (seen.optimizer_settings or {}).get("fused") else ""
    words.append(f"{seen.optimizer}{fused}")
    if None not in (seen.parameters, seen.trained_parameters) and seen.trained_parameters != seen.parameters:
        words.append(f"{seen.trained_parameters:,} of {seen.parameters:,} parameters train")
    if seen.checkpointing:
        words.append("activations are recomputed")
    if seen.attention:
        words.append(f"attention {seen.attention}")
    if answer.batch:
        shape = " x ".join(map(str, answer.batch))
        words.append(f"batch {shape}, {number_of(seen.accumulation or 1, 'micro-batches')}, {request.ranks} ranks")
    if seen.clipping is not None:
        words.append(f"clipping {seen.clipping:g}" if seen.clipping else "no clipping by the library")
    return words


def show_tried(fits: str | None, rows: list[Tried]) -> None:
    """Say which other arm would fit, and what the script holds under each."""
    fitting = min(
        (row for row in rows if row.fits in ("yes", "only just")), key=lambda row: row.peak_bytes or 0, default=None
    )
    if fits == "no" and fitting:
        say_wrapped(f"With {fitting.arm} {FITS[fitting.fits or '']}: it peaks at {size(fitting.peak_bytes or 0)}.")
    elif fits == "no" and not rows:
        say_wrapped("`--try zero2,zero3,zero3_cpu,fsdp2` rehearses it with other arms.")
    if rows:
        show(
            [
                {
                    "with": row.arm,
                    "peak": size(row.peak_bytes) if row.peak_bytes else "-",
                    "nvidia-smi": f"{row.driver_bytes / GIB:.1f} GiB" if row.driver_bytes and row.fits else "-",
                    "": row.error or FITS.get(row.fits or "", ""),
                }
                for row in rows
            ]
        )
