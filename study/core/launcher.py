"""Finds the `accelerate launch` above this process, and reads its command line."""

import argparse
import contextlib
import sys
from pathlib import Path

import psutil

OPTIONS = argparse.ArgumentParser(allow_abbrev=False, add_help=False)  # the launcher's options that matter here
OPTIONS.add_argument("--config_file", "--config-file", nargs="?")
OPTIONS.add_argument("--num_processes", "--num-processes", nargs="?")


def find() -> tuple[psutil.Process, argparse.Namespace] | None:
    """Return the nearest process above this one with a --config_file before this script, in either spelling."""
    script = Path(sys.argv[0])
    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            at_script = [i for i, text in enumerate(words) if Path(text).name in (script.name, f"study.{script.stem}")]
            options, _ = OPTIONS.parse_known_args(words[: at_script[0]] if at_script else [])
            if options.config_file:
                return process, options
    return None


def config_file() -> Path | None:
    """Return the launcher's yaml; None if it has none, or if the launcher is not found."""
    launch = find()
    return Path(launch[1].config_file) if launch else None
