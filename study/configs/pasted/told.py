"""What a text says of a model, of GPUs and of its training, and the flags of our commands that say the same."""

import contextlib
import re
from dataclasses import dataclass
from typing import Any

from study.configs.pasted.config_in_text import configs_with
from study.configs.pasted.read import Pasted
from study.configs.pasted.words import only
from study.core.errors import Stop
from study.core.fsdp_keys import nearest_arm
from study.core.gpus import GPUS, gpu_named
from study.core.shapes import letters, model_of_name, models

FAMILIES = (
    "llama|qwen|mistral|mixtral|gemma|phi|bert|gpt|opt|bloom|falcon|pythia|deepseek|yi|internlm|baichuan|olmo|glm"
)
MODEL = re.compile(rf"(?ia)(?<![a-z])[\w./-]{{0,80}}(?:{FAMILIES}|starcoder|granite|smollm|t5)[\w./-]{{0,60}}")
# Where a launch command or a config names the model. A text may name others, which do not train.
MODEL_KEY = re.compile(
    r"(?i)(?:model_name_or_path|base_model|model_id|from_pretrained|--model|\bmodel(?= *= *[\"']))[\"']?\s*[:= (]\s*"
    r"[\"']?([^\s\"',)]+)"
)
LAYERS = re.compile(r"transformer_layer_cls_to_wrap[\"']?[ \t]*[:= ][ \t]*\[?[\"']?([\w,\"' ]+)")
# As the cache of the hub names the folder of a model.
CACHED = re.compile(r"\bmodels--[\w.-]+?--([\w.-]+)")
# The width, by which a config is known to be that of a model.
WIDTHS = ("hidden_size", "n_embd", "d_model")
# Sizes as a script or a launch command gives them, by the name of configs and by that of GPT-2's or T5's, which both
# take (attribute_map, transformers/configuration_utils.py). `=`: a printed config has `:`, and may be of another model.
OTHER_NAMES = {
    "n_layer": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "n_inner": "intermediate_size",
}
GIVEN_SIZE = re.compile(
    rf"(?<!\w)({'|'.join(OTHER_NAMES)}|num_hidden_layers|hidden_size|intermediate_size|vocab_size) ?= ?(\d+)\b"
)
LEAST_ALIKE = 4  # numbers of a model's config that a printed one must have
BILLIONS = re.compile(r"(?a)(?<![\w.])(?:[\w.-]{0,60}-)?(\d{1,3}(?:\.\d{1,2})?) ?[bB](?![a-zA-Z0-9.])")
# As PEFT, trainers and people print it: "all params: 8,030,261,248", "Total parameters: 6243584000".
COUNTED = re.compile(
    r"(?i)\b(?:all|total|number of|trainable)[\w ]{0,24}param(?:eter)?s?`?\s*[:=|]{1,2}\s*`?"
    r"(\d{1,3}(?:,\d{3}){2,3}|\d{8,12})\b"
)
QUANTIZED = re.compile(r"(?i)[48][- ]?bit|quantiz|\bq-?lora\b|\bint[48]\b")
GPU = re.compile(
    r"(?ia)\b((?:A|H|B|L|V|T|GH)\d{2,3}S?|RTX ?\d{4}|[345]0[89]0|A6000)\b"
    r"(?:[^\n\d]{0,12}(\d{2,3}) ?G(?:i?B)?(?![a-z]))?"
)
BEFORE = re.compile(r"(?ia)\b(\d{2,3}) ?G(?:i?B)? ?(?:(?:A|H|V)\d{2,3}|GPUs?|\u663e\u5b58|VRAM)")
USUAL_RANK = 16  # of LoRA, where nobody says it
ARMS = {"DDP": "ddp", 0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}


@dataclass(frozen=True)
class Told:
    """What the text says of the model and the GPUs. None: it does not say it, or says two things."""

    model: str | None  # one of `study models`
    parameters: float | None
    gpu_bytes: int | None
    gpu: str | None
    altered: str = ""  # the model that a text names, and the sizes that it gives it instead of the model's own

    @property
    def size(self) -> str:
        """The model, as a flag."""
        if self.model:
            return f"--model {self.model}"
        return f"--params {self.parameters / 1e9:g}e9" if self.parameters else ""


def told(text: str) -> Told:
    """Read a model, its size and GPUs out of a text."""
    gpus = _gpus(text)
    with_memory = {each.partition("-")[0] for each in gpus if "-" in each}
    model, altered = _model(text), ""
    if sizes := _other_sizes(model, text):
        model, altered = None, f"{model} with {', '.join(sizes)}"
    return Told(model, _parameters(text, altered), _gpu_bytes(text, gpus), only(gpus - with_memory), altered)


def _model(text: str) -> str | None:
    """Return the one model that launch commands name, or the hub's cache, a printed config, or a person."""
    for named in (MODEL_KEY.findall(text), CACHED.findall(text)):
        if model := only({*filter(None, map(model_of_name, {*named}))}):
            return model
    if model := only({*filter(None, map(_of_shape, printed_shapes(text)))}):
        return model
    return only({*filter(None, (model_of_name(name.strip("./-")) for name in {*MODEL.findall(text)}))})


def _other_sizes(model: str | None, text: str) -> list[str]:
    """Return the sizes that a text gives a model, and that are not those of the model of this name."""
    own = {OTHER_NAMES.get(name, name): size for name, size in models().get(model or "", {}).items()}
    given = dict.fromkeys(GIVEN_SIZE.findall(re.sub(r"#[^\n]*", "", text)))
    return [f"{name}={size}" for name, size in given if own.get(OTHER_NAMES.get(name, name), int(size)) != int(size)]


def printed_shapes(text: str) -> list[dict[str, Any]]:
    """Return the configs of models that a text shows, as transformers prints them."""
    return [config.content for width in WIDTHS for config in configs_with(width, text)]


def _of_shape(printed: dict[str, Any]) -> str | None:
    """Return the model whose numbers a printed config has: of several the one with the most. None: it is none."""
    most, found = LEAST_ALIKE - 1, None
    for name, known in models().items():
        numbers = {key: value for key, value in known.items() if type(value) is int and key != "parameters"}
        if len(numbers) > most and numbers.items() <= printed.items():
            most, found = len(numbers), name
    return found


def _parameters(text: str, altered: str) -> float | None:
    """Return the parameters that are counted in a text, or those that a person writes in billions of an own model."""
    counted = [int(each.replace(",", "")) for each in COUNTED.findall(text)]
    if counted and not QUANTIZED.search(text):  # of which several are in one element
        return max(counted)  # of all, beside those that train
    return None if altered else only({1e9 * float(each) for each in BILLIONS.findall(text)})


def _gpus(text: str) -> set[str]:
    """Return the GPUs that a text names, as `--gpu` takes them: with their memory, if it says that."""
    found = set()
    for name, gigabytes in GPU.findall(text):
        with contextlib.suppress(Stop):
            found.add(gpu_named(f"{name} {gigabytes}GB") if gigabytes else gpu_named(name).partition("-")[0])
    return found


def _gpu_bytes(text: str, gpus: set[str]) -> int | None:
    """Return the memory of the GPUs of a text, if it is nearly the same in all that it may mean."""
    sizes = {int(each) * 2**30 for each in BEFORE.findall(text)}
    for name in gpus:
        of_name = {gpu.memory_bytes for kind, gpu in GPUS.items() if name in (kind, kind.partition("-")[0])}
        if len(of_name) == 1:
            sizes |= of_name
    return min(sizes) if sizes and max(sizes) < 1.1 * min(sizes) else None


def foreign_layer(text: str) -> tuple[str, str] | None:
    """Return a class that FSDP shall wrap and that is of another family than the model, and that model.

    Classes of layers begin with their family: Qwen2DecoderLayer (_no_split_modules of transformers' modeling_*.py).
    """
    model = _model(text)
    if model is None:
        return None
    families = {letters(each["model_type"].removesuffix("_text")) for each in models().values()}
    own = letters(models()[model]["model_type"].removesuffix("_text"))
    for classes in LAYERS.findall(text):
        for name in re.findall(r"\w+", classes):
            of = max((each for each in families if letters(name).startswith(each)), key=len, default=own)
            if of != own:
                return name, model
    return None


def arm(pasted: Pasted) -> str | None:
    """Return the arm that is most like the training of a text, if it says how that is divided."""
    stage, is_offloaded = pasted.said.get("stage", ""), pasted.said.get("offload", "none") != "none"
    if str(stage).startswith("FSDP"):
        machines = pasted.said.get("machines")
        return nearest_arm(pasted.said.get("sharding", ""), machines=machines, offloads=is_offloaded)
    name = ARMS.get(stage)
    return name if name in (None, "ddp") or not is_offloaded else f"{name}_cpu"


def flags(pasted: Pasted) -> str:
    """Return the flags of `study advise` that a text says; "" if it does not name a model and its GPUs."""
    about, said = told(pasted.text), pasted.said
    ranks = said.get("ranks") if said.get("machines", 1) == 1 else None  # of several nodes it may be those of one
    if not about.size or not (ranks or about.gpu):
        return ""
    rank = said.get("lora_rank", USUAL_RANK) if said.get("peft") and about.model else None
    values = {"--gpus": ranks, "--gpu": about.gpu, "--sequence": said.get("sequence"), "--lora-rank": rank}
    return f"{about.size} {_typed(values)}"


def all_flags(pasted: Pasted) -> str:
    """Return these, and those that `study estimate` and `study oom` take besides."""
    first = flags(pasted)
    if not first:
        return ""
    besides = _typed({"--arm": arm(pasted), "--micro-batch": pasted.sequences})
    checkpointing = "--checkpointing" if pasted.said.get("checkpointing") else ""
    return " ".join(filter(None, [first, besides, checkpointing]))


def _typed(flags: dict[str, Any]) -> str:
    """Return flags as somebody types them, without those that have no value."""
    return " ".join(f"{flag} {value}" for flag, value in flags.items() if value)
