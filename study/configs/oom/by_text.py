"""Explain an error about memory by what its own text says of the training: model, stage, GPUs, rows and tokens."""

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from study.configs.oom import causes
from study.configs.oom.causes import CLUE, Cause, Row
from study.configs.oom.explain import FILLING, STAGES, Described, explain
from study.configs.oom.reading import OomError
from study.configs.pasted.read import Pasted
from study.core.errors import Stop
from study.core.gpus import GPUS, gpu_named
from study.core.shapes import letters, models
from study.core.text import number_of, size
from study.predict.front import Wanted, papers

FAMILIES = (
    "llama|qwen|mistral|mixtral|gemma|phi|bert|gpt|opt|bloom|falcon|pythia|deepseek|yi|internlm|baichuan|olmo|glm"
)
MODEL = re.compile(rf"(?ia)(?<![a-z])[\w./-]{{0,80}}(?:{FAMILIES}|starcoder|granite|smollm|t5)[\w./-]{{0,60}}")
BILLIONS = re.compile(r"(?a)(?<![\w.])(?:[\w.-]{0,60}-)?(\d{1,3}(?:\.\d{1,2})?) ?[bB](?![a-zA-Z0-9.])")
GPU = re.compile(
    r"(?ia)\b((?:A|H|B|L|V|T|GH)\d{2,3}S?|RTX ?\d{4}|[345]0[89]0|A6000)\b"
    r"(?:[^\n\d]{0,12}(\d{2,3}) ?G(?:i?B)?(?![a-z]))?"
)
BEFORE = re.compile(r"(?ia)\b(\d{2,3}) ?G(?:i?B)? ?(?:(?:A|H|V)\d{2,3}|GPUs?|\u663e\u5b58|VRAM)")
HOST_BYTES = (16, 18)  # of a parameter, with the optimizer's states on the host, and with the weights as well
WEIGHT_BYTES = 2  # in bf16 or fp16
NEAR = 0.02  # a size that people round, such as 8B


@dataclass(frozen=True)
class Told:
    """What the text says of the model and the GPUs. None: it does not say it, or says two things."""

    model: str | None  # one of `study models`
    parameters: float | None
    gpu_bytes: int | None


def told(text: str) -> Told:
    names = {letters(name): name for name in models()}
    known = {names[each] for each in map(_spelled, MODEL.findall(text)) if each in names}
    sizes = {float(each) for each in BILLIONS.findall(text)}
    return Told(
        model=known.pop() if len(known) == 1 else None,
        parameters=1e9 * sizes.pop() if len(sizes) == 1 else None,
        gpu_bytes=_gpu_bytes(text),
    )


def _spelled(name: str) -> str:
    """Return a model's name without its folder, its maker and the words of a variant."""
    last = letters(re.sub(r"(?i)[-_](?:chat|instruct|it|hf|base|bnb-4bit)(?=[-_]|$)", "", Path(name.strip("./-")).name))
    return last.removeprefix("meta")


def _gpu_bytes(text: str) -> int | None:
    sizes = {int(each) * 2**30 for each in BEFORE.findall(text)}
    for name, gigabytes in GPU.findall(text):
        try:
            meant = gpu_named(f"{name} {gigabytes}GB" if gigabytes else name)
        except Stop:
            continue
        kinds = {gpu.memory_bytes for gpu in GPUS.values() if gpu.kind.startswith(meant.partition("-")[0])}
        if gigabytes or len(kinds) == 1:
            sizes.add(GPUS[meant].memory_bytes)
    return min(sizes) if sizes and max(sizes) < 1.1 * min(sizes) else None


def described(pasted: Pasted) -> Described:
    said = pasted.said
    stage = said.get("stage")
    arm = {"DDP": "ddp", "FSDP1": "fsdp2", "FSDP2": "fsdp2", 0: "ddp"}.get(stage)
    if isinstance(stage, int) and stage:
        arm = f"zero{stage}" + ("_cpu" if said.get("offload", "none") != "none" else "")
    numbers = {name: said[name] for name in ("ranks", "micro_batch", "sequence") if said.get(name)}
    return Described(arm=arm, **numbers)


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


def _budget(pasted: Pasted, about: Told, training: Described, rows: dict[str, Row]) -> list[Cause]:
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


def _cause(id: str, what: str, rows: dict[str, Row]) -> Cause:
    return Cause(id, what, CLUE, ("the model and the GPUs that the text names",), rows[id]["remedy"], rows[id]["apart"])
