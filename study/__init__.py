"""A replication study of DeepSpeed ZeRO that anyone can run."""

import os

from study.core.machine import operators_folder

# PyTorch reads this variable, and every child process inherits it. A user's own choice is kept.
CHOSEN_HERE = "TORCH_EXTENSIONS_DIR" not in os.environ
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(operators_folder()))
