"""Whether the loss of the model that a script names is divided by the labels of all micro-batches of an update."""

import re

from packaging.version import Version

from study.configs.pasted.told import told
from study.core.shapes import models
from study.known.which_apply import Stack

HANDED = "Does the forward pass of the model take **kwargs, as those of Llama and Qwen"
OWN_LOSS = (
    "Has the trainer a loss of its own (TRL before 0.14, ORPO before 0.20), or does the model ignore num_items_in_batch"
)
# Types of models, with the last release of transformers whose causal head takes no num_items_in_batch, and the first
# that hands it to its loss: by the sources of 4.46.2, 4.47.1, 4.48.0, 4.48.3 and 5.23.0.
HAND = {
    "llama qwen2 qwen2_moe mixtral gemma gemma2 phi phi3 glm olmo": (None, "4.46.2"),
    "starcoder2": ("4.46.2", "4.47.1"),
    "mistral granite": ("4.47.1", "4.48.0"),
    "gpt2 gpt_neo gptj gpt_bigcode opt falcon stablelm": ("4.48.0", "4.48.3"),
}
CAUSAL = re.compile(r"ForCausalLM|LMHeadModel|\bSFTTrainer\b")
# Another loss than the model's, another head, or a trainer that computes its own.
OTHER = re.compile(
    r"compute_loss|label_smooth|liger|trust_remote_code|nn\.Module|(?<!Collator)For(?!CausalLM\b)[A-Z]"
    r"|\b(?!(?:SFT|Seq2Seq)?Trainer\b)\w+Trainer\b"
)


def answers(code: str, given: str, stack: Stack) -> dict[str, bool]:
    """Return the answers to what is asked of a model, of a whole script and all that is given beside it."""
    trainer = stack.said.get("trainer")
    if trainer not in ("trainer", "trl") or OTHER.search(code) or not CAUSAL.search(code):
        return {}
    model, release = told(given).model, stack.releases.get("transformers")
    if model is None or not isinstance(release, Version):
        return {}
    for types, (last_without, first) in HAND.items():
        if models()[model].get("model_type") not in types.split():
            continue
        if release >= Version(first):
            return {HANDED: True} | ({OWN_LOSS: False} if trainer == "trainer" else {})  # trl's: scripts.toml
        if last_without and release <= Version(last_without):
            return {HANDED: False}
    return {}
