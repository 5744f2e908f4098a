"""What `study virtual train.py` prints: the verdict, the parts of the peak, and what the script decided."""

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from study.configs.pasted import tracebacks
from study.configs.stacks import described
from study.core import machine
from study.core.errors import Stop
from study.core.text import rounded, say, say_wrapped, show, size
from study.known.findings import with_id
from study.known.stacks import Flags
from study.known.which_apply import which_apply
from study.predict.front import StepTime
from study.records import store
from study.records.schema import Record
from study.rehearsal.request import Answer, Failure, Request
from study.rehearsal.seconds import seconds_of
from study.rehearsal.start import Tried
from study.report import rehearsals
from study.report.rehearsals import Rehearsed
from study.watch.about import about

MOST_FAULTS = MOST_DECISIONS = 3
JOINS = re.compile(r"\bJoin\(|\.join\(\)|join_uneven_inputs")  # a loop whose ranks wait for nobody that has ended
SEQUENCES = "row_tokens", "longest_row", "lengthened_to", "max_length"  # of an answer


def failed(failure: Failure, request: Request) -> dict:
    """Say how a script ended that did not reach its steps."""
    say_wrapped(rehearsals.ending(failure, request))
    if failure.code:
        say("", f"    {failure.code}")
    for known in tracebacks.errors(failure.trace)[:1] if failure.kind == "script" else ():
        say_wrapped("", f"Known: {with_id(known.sentence, known.id)} What to do: {known.remedy}.", indent="  ")
        installed = {
            name: machine.version(name) for name in ("transformers", "trl", "accelerate", "deepspeed", "torch")
        }
        say_wrapped(f"Installed here: {', '.join(f'{name} {each}' for name, each in installed.items() if each)}.")
    if failure.kind == "value" and "What to do: " not in failure.message:
        say_wrapped("", "--value NAME=NUMBER gives a variable of the script a value; --skip FUNCTION leaves one out.")
    return {"fine": False, "peak_bytes": None, "parts": None, "fits": None, "error": asdict(failure)}


def show_answer(request: Request, answer: Answer, record: Record, rows: list[Tried], folder: Path) -> dict:
    """Print the verdict, the parts of the peak, and what the script decided."""
    of = Rehearsed.of(request, answer, record)
    say_wrapped(*rehearsals.short(of), rehearsals.verdict(of), *rehearsals.one_update(of))
    findings = show_mistakes(folder) if answer.updates > 1 else []  # a step is followed from the first update on
    remarks = dict(rehearsals.in_script(request, record.observed, [each["id"] for each in findings]))
    say_wrapped(*remarks.values())
    if answer.cuda_peaks:
        say_wrapped(f"CUDA's own peak, with real values, is {size(max(answer.cuda_peaks))}.")
    say_wrapped(*rehearsals.in_fp32(record.observed, rehearsals.text_of(request)))
    if request.gpu:
        say_wrapped(*rehearsals.longest_seen(of))
    say_wrapped(*rehearsals.other_arm(of.device.fits, rows))
    show(list(map(rehearsals.row_of, rows)))
    step = show_seconds(of, folder) if request.gpu else None
    say_wrapped(*rehearsals.parts_of_peak(of), *rehearsals.evaluation(of), *rehearsals.saving(of))
    say_wrapped(rehearsals.decided(of), *rehearsals.ran_with(of))
    if request.gpu:
        say_wrapped("Reserved and nvidia-smi are predicted: the count is replayed on PyTorch's allocator.")
    return in_json(of, findings, step) | {"remarks": [*remarks]}


def in_json(of: Rehearsed, findings: list[dict], step: StepTime | None) -> dict:
    return {
        "peak_bytes": of.device.peak,
        "all_bytes": max(of.answer.peaks),
        "peaks": of.answer.peaks,
        "sequences": {each: getattr(of.answer, each) for each in SEQUENCES},
        "cuda_peaks": of.answer.cuda_peaks,
        "parts": of.peak.parts,
        "after_step": of.record.memory.components.per_rank[0].after_step,
        "device": asdict(of.device),
        "fits": of.device.fits,
        "findings": findings,
        "step": asdict(step) if step else None,
        "ranks_compared": of.request.compares_ranks,
        "moments": [asdict(each) for each in of.answer.moments],
        "loading_peak_bytes": of.answer.loading_peak_bytes,
        "observed": of.record.observed.model_dump(mode="json", exclude_defaults=True),
        "releases": of.answer.releases,
        "loss_in_chunks": of.answer.loss_in_chunks,
        "error": None,
    }


def show_seconds(of: Rehearsed, folder: Path) -> StepTime | None:
    """Say how long a step takes, or why that is not known."""
    try:
        step = seconds_of(of.request, of.answer, of.record, folder)
    except Stop as stop:
        say_wrapped(f"The seconds of a step are not predicted: {stop.sentence}")
        return None
    interval = f"{rounded(step.low_s, '.2g')} to {rounded(step.high_s, '.2g')}"
    say_wrapped(f"A step is predicted to take {rounded(step.seconds, '.2g')} s ({interval}).")
    return step


def show_mistakes(folder: Path) -> list[dict]:
    """Show and return the mistakes that the prepared objects and the steps tell of."""
    mistakes = [each for each in about(folder).findings if not each.costs]
    for each in mistakes:
        say_wrapped(f"{each.said} What to do: {each.remedy}.", indent="  ", first="- ")
    return list(map(asdict, mistakes))


def show_known(folder: Path, releases: Mapping[str, str]) -> list[str]:
    """Show the known faults that apply to what was prepared, of the releases that ran. Nothing is asked. Return ids."""
    words = tuple(f"{name} {release}" for name, release in releases.items())
    asked, _ = described(words, Flags(), folder / store.RECORD)
    ran = [f"{name} {release}" for name, release in asked.releases.items()]
    applying = [each for each in which_apply(asked) if each.answer == "applies"]
    if not applying:
        say_wrapped(
            f"No known fault surely applies to the releases that ran here, {', '.join(ran)}. "
            "If yours are others, or for what a rehearsal cannot see: `study stack requirements.txt`."
        )
        return []
    count = "1 known fault applies" if len(applying) == 1 else f"{len(applying)} known faults apply"
    say_wrapped(f"{count} (seen, not asked):")
    for known in applying[:MOST_FAULTS]:
        said = with_id(known.fault.in_releases, known.fault.id)
        say_wrapped(f"{said} What to do: {known.do}.", indent="  ", first="- ")
    return [each.fault.id for each in applying]


def show_ranks(request: Request, answer: Answer, folder: Path) -> bool:
    """Say whether the ranks part, which would hang. Where they do, the answer ends with that. Return if they may."""
    for where, line in list(answer.decides.items())[:MOST_DECISIONS]:
        what = f"{where} decides by a number that does not exist here, and is 0: `{line}`."
        hangs = " If it differs between ranks, they may part there and wait for ever." if request.ranks > 1 else ""
        say_wrapped(f"{what}{hangs} --value gives it another.")
    records = [each / store.RECORD for each in (folder, folder / "rank-1")]
    passes = [store.read(each).watched.passes_in_epoch for each in records if each.exists()]
    if None not in passes and len(set(passes)) == 2 and not JOINS.search(rehearsals.text_of(request)):
        what = (
            f"At {answer.batch_at} the loader of rank 0 has {passes[0]} micro-batches, and that of rank 1 {passes[1]}:"
        )
        say_wrapped(f"{what} unless the loop runs under `join`, one rank ends it, and the other waits for ever.")
        return True
    if request.compares_ranks:
        ranks = "With the values of this rehearsal ranks" if answer.decides else "Ranks"
        say_wrapped(f"{ranks} 0 and 1 call the same collectives, as far as rank 1 was followed: no hang was found.")
    elif request.ranks > 1:
        say_wrapped(
            "Rank 1 was not rehearsed: --evaluate and --save compare its collectives there, so that a hang is found."
        )
    return False
