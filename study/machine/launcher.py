"""The `accelerate launch` above this process, as far as its command line tells of it."""

import argparse
import contextlib
import sys
from pathlib import Path

import psutil

OPTIONS = argparse.ArgumentParser(allow_abbrev=False, add_help=False)  # of the launcher, those that matter here
OPTIONS.add_argument("--config_file", "--config-file", nargs="?")
OPTIONS.add_argument("--num_processes", "--num-processes", nargs="?")


def find() -> tuple[psutil.Process, argparse.Namespace] | None:
    """The nearest process above this one that names a --config_file before this script, in whatever spelling."""
    script = Path(sys.argv[0])
    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            places = [i for i, word in enumerate(words) if Path(word).name in (script.name, f"study.{script.stem}")]
            options, _ = OPTIONS.parse_known_args(words[: places[0]] if places else [])
            if options.config_file:
                return process, options
    return None


def config_file() -> Path | None:
    """The yaml that the launcher was given; None where it was given none, or is not seen."""
    launch = find()
    return Path(launch[1].config_file) if launch else None
