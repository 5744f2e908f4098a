"""What a rehearsed rank 0 of two holds, beside a real one: python -m tests.rehearsal.pairs FILE.csv

Each pair of an example and an arm is launched on two gloo ranks under `study.watch`, and rehearsed. The real peak is
without the data set, which on a GPU is the host's. Eight minutes on two cores.
"""

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from study.records import store

ROOT = Path(__file__).resolve().parents[2]

ARMS = ("ddp", "zero1", "zero2", "zero3", "zero3_cpu")
SCRIPTS = ("accelerate_loop", "trainer_glue", "trl_sft")


def pair(script: str, arm: str, folder: Path) -> dict:
    config = ["--config_file", f"accelerate_configs/{arm}.yaml"]
    real = ["accelerate", "launch", *config, "--num_processes", "2", f"examples/{script}.py", "--run_dir", str(folder)]
    subprocess.run(real, cwd=ROOT, check=True, capture_output=True)
    rank = store.load(folder).memory.components.per_rank[0]
    rehearsed = ["study", "virtual", f"examples/{script}.py", *config, "--ranks", "2", "--json"]
    answer = json.loads(subprocess.run(rehearsed, cwd=ROOT, check=True, capture_output=True).stdout)
    real_bytes = rank.tracked_peak_bytes - (rank.at_peak or {}).get("other", 0)
    return {
        "script": script,
        "arm": arm,
        "real_peak_bytes": real_bytes,
        "rehearsed_peak_bytes": answer["all_bytes"],
        "off": f"{answer['all_bytes'] / real_bytes - 1:.5f}",
    }


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for script in SCRIPTS:
            rows += [pair(script, arm, Path(temporary, f"{script}-{arm}")) for arm in ARMS]
    with Path(sys.argv[1]).open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
