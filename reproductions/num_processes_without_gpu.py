"""Claimed: `accelerate launch --num_processes` is the number of processes to start (`accelerate launch --help`).

What happens (accelerate 1.15.0): without a GPU it silently starts one, with --cpu and without.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    script = Path(folder, "script.py")
    script.write_text("print('here', flush=True)")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", str(script)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE")}
    clean |= {"CUDA_VISIBLE_DEVICES": "", "HF_HOME": folder}  # no saved config of the user's
    said = subprocess.run(launch, env=clean, capture_output=True, text=True, check=True).stdout
print(json.dumps({"found": said.count("here")}))
