"""Resumes from checkpoints under other arms and other numbers of ranks: one launch and one record for each move.

python -m study.sweeps.moves runs/moves

A source trains all its steps and leaves checkpoints. Each move resumes from the last checkpoint and trains the same
last steps, so its losses should be the source's. If a checkpoint does not load directly, the move is repeated with
DeepSpeed's universal checkpoint. There is no dropout, because its masks depend on the rank. Existing runs are skipped.
"""

import math
import subprocess
import sys
from pathlib import Path

from study.errors import Stop, exit_on_stop
from study.io.files import safe_join
from study.io.tables import say
from study.records.schema import Record
from study.spec import arms
from study.sweeps import launches, outcomes
from study.sweeps.launches import Turn
from study.sweeps.protocol import Cell

ROWS = 8  # in a step, however many ranks share them
SETTINGS = {
    **{"task": "imdb", "model": "bert-tiny", "data": "embedded", "steps": 9, "warmup_steps": 2, "sequence": 32},
    **{"train_rows": 64, "eval_rows": 16, "epochs": 9, "dropout": 0.0, "instruments": False},
}
MOVES = {  # from an arm and its ranks, to others
    ("zero2", 2): [("zero2", 4), ("zero2", 1), ("zero3_cpu", 2), ("zero2_cpu", 2), ("ddp", 2)],
    ("zero3", 2): [("zero3", 4), ("zero3", 1), ("ddp", 2), ("zero3_cpu", 2)],
    ("fsdp2", 2): [("fsdp2", 4), ("fsdp2", 1), ("ddp", 2), ("zero3", 2), ("hsdp", 4)],
    ("zero2", 4): [("zero2", 2)],
    ("zero3", 4): [("zero3", 2)],
    ("fsdp2", 4): [("fsdp2", 2)],
    ("ddp", 2): [("ddp", 4), ("single", 1), ("zero2", 2), ("fsdp2", 2)],
}
TIMEOUT_S = 120


def cell(part: str, arm: str, ranks: int, **more) -> Cell:
    settings = SETTINGS | {"micro_batch": ROWS // ranks} | more
    return Cell("resume", part, "tiny", arm, None if arm == "single" else ranks, settings)


def move_all(runs: Path) -> None:
    runs.mkdir(parents=True, exist_ok=True)
    for (arm, ranks), targets in MOVES.items():
        source = safe_join(runs, f"source-{arm}-{ranks}")
        _run(cell("source", arm, ranks, checkpoint_every=3), source)
        refused = []
        for target, target_ranks in targets:  # first all direct moves: a converted checkpoint would be used instead
            name = f"{arm}-{ranks}-to-{target}-{target_ranks}"
            record = _run(cell("moved", target, target_ranks), safe_join(runs, f"moved-{name}"), source)
            if record.status != "done" and all(arms.load_arm(each).deepspeed for each in (arm, target)):
                refused.append((target, target_ranks, name))
        for target, target_ranks, name in refused:
            words = [sys.executable, "-m", "study.training.universal", str(source)]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            say(f"  {(done.stdout + done.stderr).strip()}")
            _run(cell("moved_universal", target, target_ranks), safe_join(runs, f"universal-{name}"), source)


def _run(declared: Cell, folder: Path, source: Path | None = None) -> Record:
    record = outcomes.read(folder) if folder.exists() else None
    if record is None:
        turn = Turn(declared, 1)
        resumed = source and source.resolve()
        record = launches.run(turn, folder, TIMEOUT_S, math.inf, None, lambda *_: None, resumed)
    say(f"{folder.name}: {record.status}{f', {record.error.message}' if record.error else ''}")
    return record


if __name__ == "__main__":
    with exit_on_stop():
        if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
            what = f"one folder for the runs is needed (got {' '.join(sys.argv[1:]) or 'none'})"
            raise Stop(what, "type: python -m study.sweeps.moves runs/moves")
        move_all(Path(sys.argv[1]))
