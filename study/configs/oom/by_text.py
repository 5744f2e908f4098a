"""Explain an error about memory by what its own text says of the training: model, stage, GPUs, rows and tokens."""

import contextlib
import re

from study.configs.oom import causes
from study.configs.oom.causes import CLUE, Cause, CauseRow
from study.configs.oom.explain import FILLING, STAGES, Described, explain
from study.configs.oom.reading import OomError
from study.configs.pasted.read import Pasted
from study.configs.pasted.told import Told, arm, told
from study.core.errors import Stop
from study.core.text import number_of, size
from study.predict.front import Wanted, papers

HOST_BYTES = (16, 18)  # of a parameter, with the optimizer's states on the host, and with the weights as well
WEIGHT_BYTES = 2  # in bf16 or fp16
NEAR = 0.02  # a size that people round, such as 8B


def described(pasted: Pasted) -> Described:
    numbers = {name: pasted.said[name] for name in ("ranks", "micro_batch", "sequence") if pasted.said.get(name)}
    return Described(arm=arm(pasted), **numbers)


def by_text(pasted: Pasted, error: OomError | None) -> list[Cause]:
    """Return the causes of an error, matched with the model that the text names; or else what the states take.

    Without a line of an error only states that are too large are told.
    """
    about, training = told(pasted.text), described(pasted)
    trains_all = not pasted.said.get("peft")
    if error and about.model and (trains_all or pasted.said.get("lora_rank")):
        wanted = Wanted(model=about.model, lora_rank=pasted.said.get("lora_rank"))
        with contextlib.suppress(Stop):  # a model that has to be traced, without PyTorch
            return explain(error, wanted, training)[0]
    if not about.parameters:
        return []
    rows = causes.rows()
    if not error or (error.where == "GPU" and not error.asked.high):
        return _budget(pasted, about, training, rows)
    if not trains_all:
        return []
    billions = f"{about.parameters / 1e9:g} billion parameters"
    if error.where == "oom-host" and "offload" in pasted.said:
        low, high = (size(each * about.parameters) for each in HOST_BYTES)
        what = f"host memory: the offloaded states of {billions} take {low}, and {high} with the weights, of all ranks"
        return [_cause("oom-host", what, rows)]
    if error.asked.high and training.ranks:
        asked = (error.asked.low + error.asked.high) / 2
        for parts, of_ranks in ((training.ranks, f" / {training.ranks} ranks"), (1, "")):
            for element_bytes in (4, 2):
                if abs(asked / (about.parameters / parts * element_bytes) - 1) < NEAR:
                    factors = f"{error.asked.text} = about {billions}{of_ranks} x {element_bytes} bytes"
                    return [_cause("oom-optimizer", f"{factors}: {rows['oom-optimizer']['sentence']}", rows)]
    return []


def _budget(pasted: Pasted, about: Told, training: Described, rows: dict[str, CauseRow]) -> list[Cause]:
    """Return what a GPU holds before any activation, and whether that leaves room."""
    if not about.gpu_bytes or not training.ranks:
        return []
    parameters, ranks = about.parameters or 0, training.ranks
    billions = f"{parameters / 1e9:g} billion parameters"
    arm = (training.arm or "zero3").removesuffix("_cpu")  # what nobody says is taken as what holds least
    stage = STAGES[arm]
    if pasted.said.get("peft"):
        held = parameters * _frozen_bytes(pasted.text) / (ranks if stage == 3 else 1)
        what = f"the frozen {billions}"
    elif training.arm and training.arm.endswith("_cpu"):
        held = parameters * (WEIGHT_BYTES / (ranks if stage == 3 else 1) + WEIGHT_BYTES / ranks)
        what = f"weights and gradients of {billions}"
    else:
        held = sum(papers.states_bytes(parameters, stage, ranks).values())
        what = f"the model states of {billions} with AdamW"
    on = f"{what} take {size(held)} a GPU with {arm} on {number_of(ranks, 'GPUs')}"
    if held > FILLING * about.gpu_bytes:
        return [_cause("oom-states", f"{on}, which has {size(about.gpu_bytes)}: they do not fit", rows)]
    return [
        _cause(
            "oom-activations", f"{on}, and fit into {size(about.gpu_bytes)}: activations and logits are the rest", rows
        )
    ]


def _frozen_bytes(text: str) -> float:
    """Return the bytes of a frozen parameter."""
    if re.search(r"(?i)4[- ]?bit|int4|nf4|quantization_bit\D{0,4}4|\bq-?lora\b(?![^\n]{0,20}8)", text):
        return 0.55  # with the constants of each block
    return 1 if re.search(r"(?i)8[- ]?bit|int8|quantization_bit\D{0,4}8", text) else WEIGHT_BYTES


def _cause(id: str, what: str, rows: dict[str, CauseRow]) -> Cause:
    return Cause(id, what, CLUE, ("the model and the GPUs that the text names",), rows[id]["remedy"], rows[id]["apart"])
