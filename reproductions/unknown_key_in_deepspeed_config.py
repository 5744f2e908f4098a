"""Claimed: a config file with an unknown key is refused (Accelerate, accelerate/commands/config/config_args.py).

What happens (accelerate 1.15.0): at the top of the file it is. Inside deepspeed_config it is taken without a word.
"""

import json
import tempfile
from pathlib import Path

from accelerate.commands.config.config_args import load_config_from_file

TOP = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\n"
places = {"top": "reduce_bucket_size: 1000\n", "deepspeed_config": "deepspeed_config: {reduce_bucket_size: 1000}\n"}
found = {}
with tempfile.TemporaryDirectory() as folder:
    for place, line in places.items():
        file = Path(folder) / f"{place}.yaml"
        file.write_text(TOP + line)
        try:
            load_config_from_file(str(file))
            found[place] = "accepted"
        except ValueError:
            found[place] = "rejected"
print(json.dumps({"found": found["deepspeed_config"]} | found))
