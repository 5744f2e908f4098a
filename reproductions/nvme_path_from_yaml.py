# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0"]
# ///
"""Claimed: `offload_optimizer_nvme_path` in an Accelerate yaml is where optimizer states go
(Accelerate's DeepSpeed guide, list of settings; `accelerate launch --help`).

What happens (accelerate 1.15.0): the launcher reads the key and does not hand it on to the processes it starts, so the
plugin's own default, the text "none", becomes the folder: the files land in ./none.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
mixed_precision: "no"
num_machines: 1
num_processes: 1
main_process_port: 0
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: nvme
  offload_optimizer_nvme_path: /fast_disk
"""
SCRIPT = """
from accelerate.utils import DeepSpeedPlugin
print("path:", DeepSpeedPlugin().deepspeed_config["zero_optimization"]["offload_optimizer"]["nvme_path"])
"""

with tempfile.TemporaryDirectory() as folder:
    yaml, script = Path(folder, "nvme.yaml"), Path(folder, "script.py")
    yaml.write_text(YAML)
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(yaml), str(script)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    said = subprocess.run(launch, env=environment, capture_output=True, text=True, check=True).stdout
print(json.dumps({"found": said.split("path:")[1].split()[0]}))
