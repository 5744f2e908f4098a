"""Converts a run's last good DeepSpeed checkpoint into a universal one, which loads on any number of ranks.

python -m study.training.universal runs/first

DeepSpeed's own converter does the work (`deepspeed.checkpoint.ds_to_universal`). The files that Accelerate wrote beside
the checkpoint are copied. The result lies in the checkpoint's folder and is sealed in the same way.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from study.errors import Stop, exit_on_stop
from study.records import checkpoints
from study.records.checkpoints import PART
from study.training.checkpoints import UNIVERSAL

TAG = "pytorch_model"  # Accelerate's name for what DeepSpeed writes


def convert(run_folder: Path) -> Path:
    """Convert and seal the checkpoint, and return its folder. If the converter refuses it, that is a Stop."""
    checkpoint, passed_over = checkpoints.last_good(run_folder)
    if checkpoint is None:
        what = f"{run_folder} has no good checkpoint ({'; '.join(passed_over) or 'there is none'})"
        raise Stop(what, "name the folder of a run with --checkpoint-every")
    if not (checkpoint / TAG).is_dir():
        what = f"{checkpoint} is not a DeepSpeed checkpoint"
        raise Stop(what, "resume it as it is: checkpoints of PyTorch load on any number of ranks")
    if (checkpoint / UNIVERSAL).is_dir():
        return checkpoint / UNIVERSAL
    part = checkpoint / (UNIVERSAL + PART)
    shutil.rmtree(part, ignore_errors=True)  # of a conversion that was cut off
    part.mkdir()
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(checkpoint / TAG), "--output_folder", str(part / TAG)]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    env = os.environ | {"DS_ACCELERATOR": "cpu"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if run.returncode:
        last = run.stderr.strip().rpartition("\n")[2]
        raise Stop(f"DeepSpeed's converter refuses {checkpoint} ({last})", "resume it as it is", "unavailable")
    for pattern in ("random_states_*.pkl", "custom_checkpoint_*.pkl"):
        for path in checkpoint.glob(pattern):
            shutil.copy2(path, part)
    return checkpoints.seal(part)[0]


def main(words: list[str]) -> None:
    with exit_on_stop():
        if len(words) != 1:
            raise Stop(f"give the folder of one run (got {len(words)})", "type: study.training.universal runs/first")
        folder = convert(Path(words[0]))
    sys.stdout.write(f"{folder}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
