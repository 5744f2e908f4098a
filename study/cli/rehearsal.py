"""`study virtual train.py`: somebody's own script as rank 0 of N, without a GPU."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from study.configs.stacks import described
from study.core.arms import Arm, all_paths, load_arm
from study.core.errors import Stop
from study.core.gpus import GPUS, gpu_named, num_gpus
from study.core.text import during, number_of, say, say_wrapped, show, size
from study.known.findings import COSTS, with_id
from study.known.which_apply import Flags, which_apply
from study.predict.front import StepTime, fits_on
from study.records import store
from study.records.schema import Record
from study.rehearsal.alternatives import check_is, under
from study.rehearsal.files import remove_made
from study.rehearsal.on_gpu import OnGpu, on_gpu
from study.rehearsal.request import ANSWER, REQUEST, Answer, Failure, Request
from study.rehearsal.seconds import seconds_of
from study.rehearsal.together import apart
from study.watch.about import about

MOST_RANKS = 100_000
DEFAULT_CONFIG = Path("~/.cache/huggingface/accelerate/default_config.yaml")
FITS = {"yes": "it fits", "only just": "it fits only just", "no": "it does not fit"}
GIB = 2**30


def rehearse(
    script: tyro.conf.Positional[str],
    words: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    /,
    *,
    ranks: int = 8,
    config_file: Path | None = None,
    gpu: str | None = None,
    gpus_per_node: int = 8,
    steps: int = 2,
    evaluate: bool = False,
    save: bool = False,
    real: bool = False,
    others: Annotated[str | None, tyro.conf.arg(name="try")] = None,
    config_of: tuple[str, ...] = (),
    value: tuple[str, ...] = (),
    skip: tuple[str, ...] = (),
    run_dir: Path | None = None,
    timeout: int = 900,
) -> dict:
    """Run a training script as rank 0 of N without a GPU, and say what the rank would hold and whether it would run.

    The script's libraries, data and tokenizer are real. Other ranks do not exist; weights have shapes but no values.
    The script runs with your rights, as when you start it yourself. An exception of the script is the answer, and the
    exit code is 1 then.

    With --json: the same. Example: `study virtual examples/trainer_glue.py --ranks 8 -- --steps 4`

    Args:
        script: The script, as `accelerate launch` and `torchrun` take it; or a program on the PATH, or a module.
        words: After `--`: the script's own words.
        ranks: Ranks of the group.
        config_file: Accelerate's YAML. Default: that of `accelerate config`, if there is one.
        gpu: A kind of GPU, such as H100: what it would show, and whether it fits.
        gpus_per_node: Ranks on one machine.
        steps: Updates. One more shows what the peak consists of.
        evaluate: Go on until the script has evaluated: at most four batches of a loader.
        save: Go on until the script has saved. Nothing is written.
        real: On a machine with a GPU: with real values, and CUDA's own peak beside the count.
        others: Arms, such as zero2,zero3,fsdp2: what the same script would hold with each.
        config_of: NAME=FOLDER: the folder with the config.json of a model that is not here.
        value: NAME=NUMBER: the value of a variable of the script that it decides by, such as loss=2.3.
        skip: A function of the script that does nothing here.
        run_dir: Keep the record in this new folder.
        timeout: Seconds after which it ends.
    """
    path, module = found(script)
    for name, number, most in (("--ranks", ranks, MOST_RANKS), ("--steps", steps, 1000), ("--timeout", timeout, 86400)):
        if not 1 <= number <= most:
            raise Stop(f"{name} must be 1 to {most} (got {number})", "give such a number")
    if real and not num_gpus():
        raise Stop("--real needs a GPU, and there is none here", "leave it out: a rehearsal without values needs none")
    if run_dir and run_dir.exists():
        raise Stop(f"--run-dir {run_dir} exists", "give a new folder")
    arms = [load_arm(name.strip()) for name in others.split(",")] if others else []
    default = DEFAULT_CONFIG.expanduser()
    config = config_file or (default if default.is_file() else None)
    if config is not None and not config.is_file():
        raise Stop(f"there is no --config_file {config}", "name Accelerate's YAML")
    request = Request(
        script=str(path),
        module=module,
        words=list(words),
        ranks=ranks,
        ranks_per_machine=min(ranks, gpus_per_node),
        steps=steps,
        config_file=str(config) if config else None,
        configs_of=pairs("--config-of", config_of),
        values={name: number_in("--value", text) for name, text in pairs("--value", value).items()},
        skips=list(skip),
        gpu=gpu_named(gpu) if gpu else None,
        evaluate=evaluate,
        save=save,
        real=real,
    )
    during(f"running {path.name} as rank 0 of {ranks}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = run_dir or Path(temporary, "run")
        folder.mkdir(parents=True)
        answer = ran(request, folder, timeout)
        if answer.failure or not answer.updates:
            return failed(answer.failure or Failure("script", "it made no update of an optimizer"), request)
        if parted := parts_from_rank_1(request, answer, folder, timeout):
            return failed(parted, request)
        rows = [tried(arm, request, folder / arm.name, timeout) for arm in arms]
        shown = show_answer(request, answer, store.read(folder / store.RECORD), rows, folder)
        return shown | {"faults": show_known(folder), "tried": [asdict(row) for row in rows]}


def found(script: str) -> tuple[Path, str | None]:
    """Return the file of a script, a program or a module, and the module's name."""
    if Path(script).is_file():
        return Path(script), None
    if program := shutil.which(script):
        if b"python" not in Path(program).read_bytes()[:200].partition(b"\n")[0]:
            raise Stop(f"{script} is no program in Python", "name a Python file")
        return Path(program), None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(script)  # imports the packages around it alone
        if spec is not None and spec.submodule_search_locations:
            main = Path(spec.submodule_search_locations[0], "__main__.py")
            return main, f"{script}.__main__"
        if spec is not None and spec.origin:
            return Path(spec.origin), script
    remedy = "name a Python file, a program on the PATH, or an installed module"
    if script in all_paths():
        remedy = f"did you mean '--arm {script}', or {remedy.removeprefix('name ')}"
    raise Stop(f"there is no script {script}", remedy)


def pairs(option: str, texts: tuple[str, ...]) -> dict[str, str]:
    """Return NAME=TEXT by name."""
    for text in texts:
        if "=" not in text:
            raise Stop(f"{option} takes NAME=VALUE (got {text!r:.80})", f"write {option} {text}=...")
    return dict(text.split("=", 1) for text in texts)


def number_in(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise Stop(f"{option} takes NAME=NUMBER (got {text!r:.80})", "give a number") from None


def ran(request: Request, folder: Path, timeout_s: int) -> Answer:
    """Run the rehearsal in a process of its own, and return its answer."""
    request.write(folder / REQUEST)
    command = [sys.executable, "-m", "study.rehearsal.run", str(folder)]
    # The folder of this package, which may be a checkout that is not installed.
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    with (folder / "log.txt").open("w+") as log:
        with contextlib.suppress(subprocess.TimeoutExpired):
            environment = os.environ | {"PYTHONPATH": path}
            subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, timeout=timeout_s, check=False
            )
        remove_made(folder)
        log.seek(0)
        output = log.read()[-20_000:]
    if not (folder / ANSWER).exists():
        last = (output.strip().splitlines() or ["it printed nothing"])[-1]
        raise Stop(
            f"{Path(request.script).name} ended without an answer, or took more than {timeout_s} s ({last:.200})",
            "give a longer --timeout, or fewer --steps, or report it with the script",
        )
    return Answer.read(folder / ANSWER)


def parts_from_rank_1(request: Request, answer: Answer, folder: Path, timeout_s: int) -> Failure | None:
    """Rehearse rank 1 as well, where ranks usually part: as one of them evaluates or saves. Return where they do."""
    if request.ranks == 1 or not (request.evaluate or request.save):
        return None
    during("running it as rank 1, which must call the same collectives")
    other = folder / "rank-1"
    other.mkdir()
    second = replace(request, rank=1, most_collectives=len(answer.collectives) + 1)
    return apart(answer, ran(second, other, timeout_s), Path(request.script))


@dataclass(frozen=True)
class Tried:
    """What a script holds under another arm, or why it does not train so."""

    arm: str
    peak_bytes: int | None = None
    driver_bytes: int | None = None
    fits: str | None = None
    error: str | None = None


def tried(arm: Arm, request: Request, folder: Path, timeout_s: int) -> Tried:
    """Rehearse the same script under another arm."""
    during(f"running it under {arm.name}")
    folder.mkdir()
    try:
        answer = ran(under(arm, request, folder), folder, timeout_s)
        if answer.failure:
            raise Stop(answer.failure.message, "")
        seen = store.read(folder / store.RECORD).observed
        check_is(arm, seen)
    except Stop as stop:
        return Tried(arm.name, error=stop.sentence)
    device = on_gpu(answer, request.ranks, seen.stage)
    fits = fits_on(GPUS[request.gpu], device.peak, device.driver) if request.gpu else None
    return Tried(arm.name, device.peak, device.driver, fits)


def show_tried(fits: str | None, rows: list[Tried]) -> None:
    """Say which other arm would fit, and what the script holds with each."""
    fitting = min(
        (row for row in rows if row.fits in ("yes", "only just")), key=lambda row: row.peak_bytes or 0, default=None
    )
    if fits == "no" and fitting:
        say_wrapped(f"Under {fitting.arm} {FITS[fitting.fits or '']}: it peaks at {size(fitting.peak_bytes or 0)}.")
    elif fits == "no" and not rows:
        say_wrapped("`--try zero2,zero3,zero3_cpu,fsdp2` rehearses it with other arms.")
    if rows:
        show(
            [
                {
                    "arm": row.arm,
                    "peak": size(row.peak_bytes) if row.peak_bytes else "-",
                    "nvidia-smi": f"{row.driver_bytes / GIB:.1f} GiB" if row.driver_bytes and row.fits else "-",
                    "": row.error or FITS.get(row.fits or "", ""),
                }
                for row in rows
            ]
        )


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
    return {"fine": False, "error": asdict(failure)}


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
    if device.whole_evaluation:
        whole = size(device.whole_evaluation)
        say_wrapped(f"Evaluation peaks at {whole} if its last {left} batches leave as much behind as the first.")
    elif device.evaluation is not None:
        say_wrapped(f"Evaluation peaks at {size(device.evaluation)}.")
    elif request.evaluate:
        say_wrapped("The script ended without an evaluation.")
    if device.saving is not None:
        say_wrapped(f"Saving peaks at {size(device.saving)}.")
    elif request.save:
        say_wrapped("The script ended without saving.")


def show_known(folder: Path) -> list[str]:
    """Show the known faults that apply to what was prepared. Nothing is asked. Return their ids."""
    asked, _ = described((), Flags(), folder / store.RECORD)
    applying = [each for each in which_apply(asked) if each.answer == "applies"]
    if not applying:
        say_wrapped("No known fault surely applies here. `study stack` asks what could not be seen.")
    else:
        count = "1 known fault applies" if len(applying) == 1 else f"{len(applying)} known faults apply"
        say_wrapped(f"{count} (seen, not asked):")
    for known in applying[:3]:
        said = with_id(known.fault.in_releases, known.fault.id)
        say_wrapped(f"{said} What to do: {known.do}.", indent="  ", first="- ")
    return [each.fault.id for each in applying]


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
    if seen.parameters and seen.trained_parameters != seen.parameters:
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
