# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate==1.15.0", "torch==2.13.0"]
# ///
"""Claimed: `accelerate estimate-memory` has a column for training with Adam; in float16 it says 8 bytes a parameter,
half of what it says in float32 (Accelerate's guide Model memory estimator; `estimate_training_usage`).

What happens (accelerate 1.15.0): the function itself lists weights of 4 bytes, gradients of 6 and optimizer states of
8, which stand beside each other, and the command prints the largest of the three instead of their sum, 18.
"""

import json

from accelerate.commands.estimate import estimate_training_usage

parameters = 1_000_000
parts = estimate_training_usage(4 * parameters, "float16")
printed = max(parts.values()) / parameters  # what `estimate_command` does
beside_each_other = sum(parts[name] for name in ("model", "gradients", "optimizer")) / parameters
print(json.dumps({"found": beside_each_other, "printed": printed, "bytes_by_part": parts}))
