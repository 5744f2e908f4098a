"""`study keep`: copies the records of runs into a machine's folder, without private paths."""

from pathlib import Path

import tyro

from study.io.tables import say
from study.ledger import files, ledger
from study.probes import answers
from study.records import store
from study.records.keeping import keep


def main(runs: tyro.conf.Positional[tuple[Path, ...]], /, *, into: Path) -> None:
    """Copy the records of runs into a machine's folder. Results of library trials are copied too.

    Args:
        runs: Folders that contain run folders.
        into: The machine's folder, such as reports/cpu-2core.
    """
    kept, left_out = keep(list(runs), into)
    size_bytes = sum(path.stat().st_size for path in into.glob(f"**/{store.RECORD}"))
    say(*(f"left out: {sentence}" for sentence in left_out))
    say(f"{kept} records kept in {into}, which holds {size_bytes / 1e6:.2f} MB of them")
    say(f"{answers.keep_in(into, ledger.trials(files.read_all()))} answers to trials, as study claims made them here")
