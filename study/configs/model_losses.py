"""What the model that a script names answers: how its loss is divided, and whether each pass uses all of it."""

import ast
import re

from packaging.version import Version

from study.configs.pasted.told import told
from study.configs.syntax import nodes_of, parsed
from study.core.shapes import models
from study.known.stacks import Stack

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
# Each pass uses each parameter of these models of text, and none is empty.
DENSE = (
    "llama qwen2 qwen3 mistral gemma gemma2 phi phi3 glm olmo olmo2 starcoder2 granite gpt2 gpt_neo gptj gpt_neox opt"
)
OF_PARTS = (
    "Do ranks use different parameters in a micro-batch, as experts or images in some rows only",
    "Has the model a parameter without elements",
    "Has the model layers that some updates use, and others do not",
    "Has the model trained weights that no pass uses, and the optimizer a weight decay",
)
CAUSAL = re.compile(r"ForCausalLM|LMHeadModel|\b(?:SFT|DPO|KTO|GRPO|RLOO)Trainer\b")
# Another model or head, and another loss than the model's, or a trainer that computes its own.
OTHER_MODEL = re.compile(r"trust_remote_code|nn\.Module|(?<!Collator)For(?!CausalLM\b)[A-Z]")
OTHER_LOSS = re.compile(r"compute_loss|label_smooth|liger|\b(?!(?:SFT|Seq2Seq)?Trainer\b)\w+Trainer\b")
COUNTS = "num_items_in_batch"


def answers(script: str, code: str, given: str, stack: Stack) -> dict[str, bool]:
    """Return the answers to what is asked of a model, of a whole script, of its code, and of all that is given."""
    trainer = stack.said.get("trainer")
    own = _own_loss(script)
    model, release = told(given).model, stack.releases.get("transformers")
    if model is None or OTHER_MODEL.search(code) or not CAUSAL.search(code):
        return {}
    of_parts = dict.fromkeys(OF_PARTS if models()[model].get("model_type") in DENSE.split() else (), False)
    is_other = own is None and OTHER_LOSS.search(code)
    if trainer not in ("trainer", "trl") or is_other or not isinstance(release, Version):
        return of_parts
    return of_parts | _of_loss(model, release, trainer, own)


def _of_loss(model: str, release: Version, trainer: str, own: bool | None) -> dict[str, bool]:
    """Return the answers to what is asked of a model's loss. `own`: whether a Trainer's leaves out what divides it."""
    for types, (last_without, first) in HAND.items():
        if models()[model].get("model_type") not in types.split():
            continue
        if release >= Version(first) and own is not None:
            return {OWN_LOSS: own}
        if release >= Version(first):
            return {HANDED: True} | ({OWN_LOSS: False} if trainer == "trainer" else {})  # trl's: scripts.toml
        if own is None and last_without and release <= Version(last_without):
            return {HANDED: False}
    return {}


def _own_loss(script: str) -> bool | None:
    """Whether a Trainer's compute_loss leaves out what the loss is to be divided by. None: it has none, or calls on."""
    if "model_accepts_loss_kwargs" in script:
        return None
    for function in nodes_of(ast.FunctionDef, parsed(script)):
        if function.name == "compute_loss":
            body = "\n".join(map(ast.unparse, function.body))
            return None if "super()" in body else COUNTS not in body
    return None
