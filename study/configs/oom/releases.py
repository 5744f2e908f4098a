"""Which releases of the libraries a prediction follows, and what others allocate more."""

import re

from packaging.version import Version

from study.configs.oom.training import KnownTraining
from study.configs.pasted.read import Pasted
from study.core.text import binary_size
from study.predict.front import FOLLOWED, default_sequence

TRANSFORMERS = "5.23.0"  # whose models were traced
# Until then ForCausalLMLoss, and the models before it, copied the logits in fp32 without the last token of each
# sequence (loss/loss_utils.py of 4.48.3 and 4.49.0). One sequence alone is no copy. On a CPU two sequences peaked at
# 13.97 bytes a token and word of 16-bit logits, and at 12 without the copy; logits in fp32 at 12 with both.
SHIFTED_BEFORE = Version("4.49.0")
SHIFTS = re.compile(r"\bshift_logits\b")  # in a frame, or a loss of one's own
HALF_BYTES = 2


def of_other_releases(pasted: Pasted, training: KnownTraining) -> list[str]:
    """Say which releases are predicted, if a text names others, and what these make more."""
    followed = {"deepspeed": FOLLOWED} if training.arm.startswith("zero") else {}
    followed |= {"transformers": TRANSFORMERS}
    releases = {name: pasted.releases.get(name) for name in followed}
    others = [
        f"{name} {each}" for name, each in releases.items() if isinstance(each, Version) and str(each) != followed[name]
    ]
    said = []
    if others:
        ours = " and ".join(f"{name} {release}" for name, release in followed.items())
        said.append(f"Predicted is what {ours} allocate; yours has {' and '.join(others)}.")
    return said + _shifted_logits(pasted, training, releases["transformers"])


def _shifted_logits(pasted: Pasted, training: KnownTraining, release: object) -> list[str]:
    """Say that a loss copies the logits once more than is predicted."""
    is_old = isinstance(release, Version) and release < SHIFTED_BEFORE
    is_whole = not training.described.chunked_loss and training.products != "fp32"
    if not (is_old or SHIFTS.search(pasted.text)) or not is_whole or training.rows < 2 or training.model is None:
        return []
    tokens = training.rows * (training.sequence or default_sequence(training.model))
    size = binary_size(HALF_BYTES * tokens * training.vocabulary)
    product = f"{tokens:,} tokens x {training.vocabulary:,} x {HALF_BYTES} bytes"
    return [
        f"Not counted: before transformers {SHIFTED_BEFORE} the loss copies the shifted logits, "
        f"which makes up to {size} more ({product})."
    ]
