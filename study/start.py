"""Before the first step: the run folder with its record, the disk folder, and the first words to the user."""

import datetime
import importlib
import os
import sys
from pathlib import Path
from unittest import mock

from study import corpus, hardware, models, nvme, record
from study.arms import Arm
from study.meter import CUDA
from study.process import Launch, log_to, say
from study.record import Stop
from study.settings import Settings, as_dict


def open_folder(settings: Settings, arm: Arm, launch: Launch, rank: int) -> Path:
    """The run folder, with a record that says 'running'. Every rank names it alike; the first one makes it."""
    when = datetime.datetime.fromtimestamp(launch.started, datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")
    name = f"{when}-{arm.name}-{settings.task}-{Path(settings.model).name}-s{settings.seed}-{launch.pid}"
    folder = (settings.run_dir or Path("runs") / name).resolve()
    if rank != 0:
        log_to(None)
        return folder
    if (folder / "record.json").exists():
        raise Stop(f"--run-dir {folder} already holds a run, and runs are not overwritten", "give a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log_to(folder)
        has_disk = settings.nvme_dir is not None and settings.nvme_dir.exists()
        entry = record.new(folder.name, sys.argv) | {
            "requested": as_dict(settings) | {"arm": arm.name, "config_file": launch.config_file},
            "hardware": hardware.describe(settings.nvme_dir if has_disk else folder),
            "software": hardware.software(),
        }
        record.write(folder, entry)
    except OSError as error:
        raise Stop(f"--run-dir {folder} cannot be written ({error.strerror})", "give another folder") from None
    return folder


def claim_disk(settings: Settings, arm: Arm, launch: Launch, folder: Path) -> Path | None:
    """The folder to offload to, for arms that do; what would go wrong there without a word is refused."""
    if not arm.uses_nvme:
        return None
    if arm.stage != 3:
        raise Stop(
            f"{arm.name} is stage {arm.stage} with nvme, which DeepSpeed quietly treats as cpu",
            "use stage 3 for the disk, or write cpu",
        )
    nvme.check_libaio()
    model = models.on_meta(settings, models.model_config(settings, vocabulary=corpus.VOCABULARY))
    nodes = int(os.environ.get("WORLD_SIZE", 1)) / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    needed_bytes = int(sum(p.numel() for p in model.parameters()) * nvme.BYTES_PER_PARAMETER / nodes)
    return nvme.give((settings.nvme_dir or folder.parent / "nvme").resolve(), f"run-{launch.pid}", needed_bytes)


def announce(settings: Settings, arm: Arm, num_ranks: int, folder: Path) -> None:
    """Say what is about to run, and how to get the other of the two default runs."""
    where = hardware.device_name() or "CPU"
    ranks = f"{num_ranks} {'virtual ' * bool(settings.virtual_ranks)}rank{'s' * (num_ranks > 1)}"
    data = "the embedded corpus" if settings.data == "embedded" else f"{settings.task} from {settings.data}"
    say(folder, f"{arm.name}: {settings.model} on {data}, {settings.precision}, {ranks} on {where}")
    if not CUDA and settings.model in ("bert-tiny", "gpt-tiny") and settings.data == "embedded":
        say(
            folder,
            "This is the small run that needs no GPU and no network. "
            "The source document's run: --model bert-large-uncased --data hub",
        )
    elif CUDA and settings.model == "bert-large-uncased" and settings.data == "hub":
        say(
            folder,
            "This is the source document's run. "
            "The small one, which needs no network: --model bert-tiny --data embedded",
        )


def import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon, which no arm uses and every stage asks for, without PyTorch's compiler, which it brings.

    Importing the compiler took an eighth of all that a short run of two ranks costs.
    """
    from deepspeed.runtime import compiler

    with mock.patch.object(compiler, "compile", return_value=compiler.dummy_decorator):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
