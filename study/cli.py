"""The `study` command: what there is to run, and what was run.

study arms            the arms: what each file says, and whether it can run here
study doctor          what this machine has and lacks
study advise ...      which arms fit a model on your GPUs, and which to take
study estimate ...    what one rank will hold and move
study virtual ...     the same, seen on one rank of N, alone
study explain A B     why two runs differ in memory
study sweep NAME      run a declared experiment; start it again to go on
study runs DIR        the runs below a folder, as a table
study compare DIR...  time and memory of equal cells, in one folder or in several
study claims [ID]     what was published, and whether it holds
study report          all of it as pages: verdicts, figures, every run
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.extras import SubcommandApp

from study import advise as advising
from study import compare as comparing
from study import configure, protocol, record
from study import doctor as examining
from study import estimate as predict
from study import explain as explaining
from study import ledger as judging
from study import sweep as sweeping
from study.architecture import generic, named
from study.arms import ROOT, all_paths, read
from study.progress import Progress
from study.record import Stop
from study.settings import Settings
from study.table import row, show, why
from study.theory import OF_PRECISION, states_bytes

app = SubcommandApp()
AsJson = Annotated[bool, tyro.conf.arg(name="json")]

NO_ANSWER = {"failed", "timeout", "interrupted"}  # out of memory is an answer: a run told how much is too much


def main() -> None:
    """The console script. A user's mistake is one sentence and an exit code that is not 0."""
    # The environment's own programs (ninja, for one) are found whether it was activated or not.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    try:
        app.cli(prog="study", description=__doc__.partition("\n")[0])
    except Stop as stop:
        sys.exit(f"{stop.what}. What to do: {stop.remedy}.")


@app.command
def arms() -> None:
    """List the arms and what their files say."""
    homes = {"none": "device", "cpu": "host", "nvme": "disk"}
    gpus = sweeping.num_gpus()
    rows = []
    for name, path in all_paths().items():
        arm = read(path)
        stop = examining.why_not(arm, gpus)
        rows.append(
            {
                "arm": name,
                "stage": arm.stage,
                "optimizer states": homes[arm.offload_optimizer],
                "weights": homes[arm.offload_param],
                "file": path.relative_to(ROOT),
                "here": "yes" if stop is None else f"no: {stop.what}; {stop.remedy}",
            }
        )
    show(rows)


@app.command
def estimate(
    *,
    arm: str = "zero3",
    ranks: int = 8,
    model: str | None = None,
    params: float | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    precision: Literal["fp32", "bf16", "bf16_cast"] = "bf16_cast",
    recipe: str | None = None,
    micro_batch: int = 1,
    accumulation: int = 1,
    sequence: int = 1024,
    checkpointing: bool = False,
    attention: Literal["sdpa", "eager"] = "sdpa",
    device: Literal["cuda", "cpu"] = "cuda",
    as_json: AsJson = False,
) -> None:
    """Predict what a rank will hold and move in a step. Nothing is run.

    Args:
        arm: A file in accelerate_configs/.
        ranks: How many processes share the training.
        model: A built-in shape, or a folder with a config.json.
        params: Instead of a model, its parameters. Alone they give the ZeRO paper's model states, and no more.
        layers: With --params: the layers of a GPT.
        hidden: With --params: its width.
        precision: As in the trainer.
        recipe: For the paper's model states: mixed-adam, fp32-adam and others. Default: what the precision means.
        micro_batch: Rows per rank and pass.
        accumulation: Passes per step.
        sequence: Tokens per row.
        checkpointing: Recompute activations.
        attention: Fused, or written out.
        device: On a GPU what is offloaded is the host's; on a CPU it is all one memory.
        as_json: Print it as JSON.
    """
    if arm not in all_paths():
        raise Stop(f"there is no arm {arm}", f"give one of {', '.join(all_paths())}")
    found, whole = read(all_paths()[arm]), None
    if model or layers:
        made = generic(params or 0, layers or 0, hidden or 0) if model is None else named(model)
        whole = predict.estimate(
            made, found.deepspeed, ranks if found.distributed_type != "NO" else 1, precision, micro_batch, accumulation,
            sequence, attention, checkpointing, device=device,
        )  # fmt: skip
        params = whole["parameters"]
    if params is None:
        raise Stop("there is nothing to estimate", "give --model, or --params")
    states = states_bytes(params, found.stage or 0, ranks, recipe or OF_PRECISION[precision])
    if as_json:
        told = {"arm": arm, "ranks": ranks, "parameters": params, "published_states_bytes": states, "estimate": whole}
        sys.stdout.write(json.dumps(told, indent=1) + "\n")
        return
    show_estimate(states, whole)


def show_estimate(states: dict, whole: dict | None) -> None:
    show([{"the ZeRO paper's model states": name, "GB per rank": size / 1e9}
          for name, size in (states | {"total": sum(states.values())}).items()])  # fmt: skip
    if whole:
        at_peak = whole["memory"]["at_peak"] | {"total": whole["memory"]["peak_bytes"]}
        sys.stdout.write(
            f"\npredicted at the peak ({whole['memory']['peak_when']}), buffers and temporaries included:\n"
        )
        show([{"component": name, "GB per rank": size / 1e9} for name, size in at_peak.items()])
        moved = ", ".join(f"{kind} {size / 1e9:.3g} GB" for kind, size in whole["traffic"].items()) or "nothing"
        sys.stdout.write(f"\nhost: {whole['host_bytes'] / 1e9:.3g} GB; collectives of a step: {moved}\n")


@app.command
def virtual(settings: Annotated[Settings, tyro.conf.arg(name="")], *, arm: str = "zero3", ranks: int = 8) -> None:
    """See rank 0 of a group alone: what it holds and sends, from the real engine, on any machine.

    Args:
        settings: As the trainer's. Without --init the tensors have no values, so that no memory is needed.
        arm: A file in accelerate_configs/.
        ranks: How many there would be.
    """
    if arm not in all_paths():
        raise Stop(f"there is no arm {arm}", f"give one of {', '.join(all_paths())}")
    settings = replace(settings, virtual_ranks=ranks, init=settings.init or "none", run_dir=None)
    if settings.steps is None:
        settings = replace(settings, steps=2, warmup_steps=1)
    asked = {name: value for name, value in vars(settings).items() if value != getattr(Settings, name)}
    with tempfile.TemporaryDirectory() as folder:
        cell = protocol.Cell("", "virtual", "tiny", arm, None, asked)
        words = sweeping.command(cell, Path(folder) / "run", settings.nvme_dir)
        if subprocess.run(words, cwd=ROOT, check=False).returncode != 0:
            sys.exit(1)  # it has said why
        made = record.load(Path(folder) / "run")
    held = made["memory"]["components"]["per_rank"][0]
    roles = held["at_peak"] | held["after_step"]
    show([{"virtual, rank 0 of " + str(ranks): role, "GB at the peak": held["at_peak"].get(role, 0) / 1e9,
           "GB after a step": held["after_step"].get(role, 0) / 1e9} for role in roles])  # fmt: skip
    sys.stdout.write(f"at the peak in all: {held['tracked_peak_bytes'] / 1e9:.4g} GB\n")
    show([{"collective": kind, "calls": it["calls"], "GB of a step": it["bytes"] / 1e9}
          for kind, it in made["traffic"]["per_rank"][0].items()])  # fmt: skip


@app.command
def advise(
    *, model: str, gpus: int, gpu: str, link: str | None = None, host_memory: str, sequence: int, batch: int,
    precision: Literal["fp32", "bf16", "bf16_cast"] = "bf16_cast", checkpointing: bool = False, disk: str | None = None,
    gpus_per_node: int = 8, write: Path | None = None, nvme_dir: Path | None = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Say which arms fit, how fast they should be, and which to take. All of it is predicted: nothing is run.

    Args:
        model: A built-in shape, or a folder with a config.json.
        gpus: How many there are, over all nodes.
        gpu: Which: A100-80GB, H100-80GB, L4 and others.
        link: Between them, the slowest on the way: nvswitch, pcie4, ib-hdr and others. One GPU needs none.
        host_memory: Of a node, such as 1TB.
        sequence: Tokens per row.
        batch: Rows per optimizer step, over all GPUs.
        precision: As in the trainer.
        checkpointing: Recompute activations.
        disk: What a node's disk reads and writes, such as 6GB/s. Without one nothing is offloaded to disk.
        gpus_per_node: They share a host.
        write: A new file for an Accelerate config, with a DeepSpeed json beside it where one is needed.
        nvme_dir: The folder on the disk, for that config.
        as_json: Print it as JSON.
    """
    asked = advising.Question(
        named(model), gpus, gpu, link, advising.size_bytes(host_memory), sequence, batch, precision, checkpointing,
        disk_bytes_per_s=disk and advising.size_bytes(disk), gpus_per_node=gpus_per_node,
    )  # fmt: skip
    advice = advising.advise(asked)
    words = [advising.in_words(advice), advising.agreement(advice), "Assumed:", *advising.assumptions(asked)]
    if as_json:
        sys.stdout.write(json.dumps(dataclasses.asdict(advice) | {"in_words": words}, indent=1) + "\n")
    else:
        sizes = {"peak": "peak_bytes", "spare": "headroom_bytes", "host": "host_bytes", "sent": "sent_bytes"}
        show([{"predicted": row.arm, "fits": "yes" if row.fits else "no", "limit": row.limit,
               "rows/pass": row.micro_batch, "passes": row.accumulation,
               "largest part": max(row.components, key=row.components.get, default=None),
               **{f"{name} GB": getattr(row, key) and getattr(row, key) / 1e9 for name, key in sizes.items()},
               "s/step": row.step_s and "{:.3g} to {:.3g}".format(*row.step_s),
               "tokens/s": row.tokens_per_s and "{1:.0f} to {0:.0f}".format(*row.tokens_per_s)}
              for row in advice.rows])  # fmt: skip
        sys.stdout.write("\n".join(["", *words]) + "\n")
    for path in configure.write(write, advice, nvme_dir=nvme_dir) if write else []:
        sys.stderr.write(f"written: {path}\n")


@app.command
def explain(run_a: tyro.conf.Positional[Path], run_b: tyro.conf.Positional[Path], /) -> None:
    """Why did ZeRO not save memory? What the second run holds at its peak and the first does not, by component."""
    a, b = record.load(run_a), record.load(run_b)
    columns = {"a_bytes": "first MB", "b_bytes": "second MB", "difference_bytes": "difference MB"}
    show([{"component": row["component"], "of": row["kind"]}
          | {name: None if row[key] is None else row[key] / 1e6 for key, name in columns.items()}
          | {"share": row["share"]} for row in explaining.explain(a, b)])  # fmt: skip
    sys.stdout.write("\n".join(["", *explaining.in_words(a, b)]) + "\n")


@app.command
def doctor(*, nvme_dir: Path = Path("runs")) -> None:
    """Say what this machine has and lacks, and what to do about it. Exit code 1 if anything is lacking.

    Args:
        nvme_dir: Where arms that offload to disk would write: its speed is measured.
    """
    findings = examining.examine(nvme_dir)
    show([{"": "ok" if one.fine else "NO", "what": one.what, "found": one.found} for one in findings])
    for one in findings:
        if not one.fine:
            sys.stdout.write(f"{one.what}: {one.remedy}\n")
    sys.exit(0 if all(one.fine for one in findings) else 1)


@app.command
def runs(folder: tyro.conf.Positional[Path], /, *, as_json: AsJson = False) -> None:
    """List the runs below a folder.

    Args:
        folder: Any folder with runs in it, at any depth.
        as_json: Print the rows as JSON instead of a table.
    """
    paths = sorted(folder.glob("**/record.json"))
    rows = [row(path.parent) for path in paths]
    if not rows:
        raise Stop(f"there is no run below {folder}", "name a folder that holds run folders")
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return
    show(rows)
    for path, values in zip(paths, rows, strict=True):
        if values["status"] != "done":
            sys.stdout.write(f"{values['run']}: {why(path.parent)}\n")


@app.command
def compare(folders: tyro.conf.Positional[tuple[Path, ...]], /, *, as_json: AsJson = False) -> None:
    """Hold time and memory of equal cells side by side, over folders and machines; unlike ones are never pooled.

    Args:
        folders: Folders with runs in them, at any depth.
        as_json: Print what was found as JSON instead of a table.
    """
    found = comparing.compare(list(folders))
    text = json.dumps(dataclasses.asdict(found), indent=1) if as_json else "\n".join(comparing.lines(found))
    sys.stdout.write(text + "\n")


@app.command
def claims(
    claim: tyro.conf.Positional[str | None] = None, /, *, runs: tuple[Path, ...] = (), document: str | None = None,
    verdict: str | None = None, by: str | None = None, kind: str | None = None, file: Path = judging.claim.FOLDER,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Say of every published claim whether it holds, and by what; or of one claim all there is to it.

    Args:
        claim: Its id, such as S000-13.
        runs: Folders with runs in them, at any depth. Default: runs/, and the runs/ of every folder in reports/.
        document: 000 to 003, or libraries.
        verdict: supported, refuted, inconclusive, or "not tested here".
        by: computed, measured, tried or cited.
        kind: memory, bytes, time, capacity, convergence or configuration.
        file: A claims file, or a folder of them.
        as_json: Print all of it as JSON.
    """
    judging.tell(claim, list(runs), as_json, file, document=document, verdict=verdict, by=by, kind=kind)


@app.command
def report(*, runs: tuple[Path, ...], out: Path = Path("reports/build"), readme: Path | None = None) -> None:
    """Execute the notebooks over some runs, and write what they show as a site that opens from disk.

    Args:
        runs: Folders with runs in them, at any depth.
        out: Where the site goes. A report that is there is replaced.
        readme: A file whose part between the markers of the verdicts is made anew.
    """
    from study.report import command  # what draws is not loaded for every other command

    sys.exit(command(runs, out, readme))


@app.command
def sweep(
    name: tyro.conf.Positional[str],
    /,
    *,
    scale: Literal["paper", "one_gpu", "tiny"] = "tiny",
    runs: Path = Path("runs"),
    only: tuple[str, ...] = (),
    repeat: int = 1,
    timeout_s: float = 3600,
    nvme_dir: Path | None = None,
    dry_run: bool = False,
) -> None:
    """Run a declared experiment: each cell a fresh launch, each outcome a record. Start it again to go on.

    Args:
        name: A protocol in study/protocols/, or a .toml file.
        scale: paper: as published. one_gpu: the most that one GPU can do. tiny: minutes on two CPU cores.
        runs: Where the run folders go. What is done there is not done again.
        only: Filters, as in 'arm=zero3*' 'seed=42'. All must hold.
        repeat: How often each cell is run, interleaved.
        timeout_s: Seconds after which a run is ended.
        nvme_dir: Where arms that offload to disk may write.
        dry_run: Show the cells and what each needs, and run nothing.
    """
    cells = sweeping.chosen(protocol.cells(protocol.read(name), scale), only)
    turns = sweeping.plan(cells, repeat)
    if dry_run:
        plan(cells)
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # SIGINT too: in the background it starts ignored
        signal.signal(number, signal.default_int_handler)
    tell = Progress(len(turns))
    try:
        made = sweeping.sweep(turns, runs, timeout_s, nvme_dir, tell)
    except KeyboardInterrupt:
        sys.exit("stopped; start it again to go on")
    counts = Counter(one["status"] for one in made)
    tell.say(", ".join(f"{count} {status}" for status, count in counts.items()) + f"; study runs {runs} shows them")
    sys.exit(1 if set(counts) & NO_ANSWER else 0)


def plan(cells: list[protocol.Cell]) -> None:
    """The cells as a table: what each needs, and why this machine cannot run it, if so."""
    gpus = sweeping.num_gpus()
    axes = [key for key in cells[0].asked if len({str(cell.asked.get(key)) for cell in cells}) > 1] if cells else []
    rows = []
    for cell in cells:
        stop = sweeping.why_not(cell, gpus)
        rows.append(
            {
                "cell": cell.name,
                "ranks": cell.ranks or (1 if cell.arm == "single" else gpus or 2),
                **{key: cell.asked.get(key) for key in axes},
                "here": "yes" if stop is None else f"no: {stop.what}",
            }
        )
    show(rows)
