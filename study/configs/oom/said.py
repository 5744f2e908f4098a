"""What a config and a text say of a training whose memory was full, by our names of settings."""

import re
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from study.configs import sources
from study.configs.mistakes import recognised
from study.configs.oom.optimizers import BY_DEFAULT, OPTIM, of_trainer, said_of_optimizer
from study.configs.pasted.in_use import advised
from study.configs.pasted.read import Pasted
from study.configs.pasted.resumed import counted
from study.configs.pasted.told import printed_shapes, told
from study.configs.pasted.words import only
from study.configs.settings import AUTO, OF_FSDP, OFF, UNKNOWN, EffectiveSettings, effective_settings
from study.core.files import value_at
from study.core.fsdp_keys import LAYERS, POLICY, nearest_arm
from study.core.ignored_keys import OFFLOADS
from study.core.recipes import Precision
from study.core.refused_values import SHARE_ROWS
from study.core.settings import flag
from study.core.shapes import model_of_name
from study.known.faults import named
from study.predict.front import AttentionKernel

NUMBERS = ("ranks", "micro_batch", "accumulation", "sequence", "vocabulary", "lora_rank", "reduce_bucket_size")
COMPARED = ("arm", "ranks", "micro_batch", "sequence", "checkpointing", "model", "lora_rank", "gpu")
OUR_NAMES = {"sequences per micro-batch and rank": "micro_batch", "rank of the adapters": "lora_rank"}  # of settings
# Of a config, in its words. A cast to fp16 takes as many bytes as one to bf16.
PRECISIONS: dict[str, Precision] = {
    "fp32": "fp32",
    "cast to bfloat16": "bf16_cast",
    "cast to float16": "bf16_cast",
    "autocast to bfloat16": "bf16",
    "autocast to float16": "fp16",
    "cast in passes to bfloat16": "bf16",
    "cast in passes to float16": "fp16",
}
HALF = ("bf16", "fp16")  # as a text says it
# Accelerate reduces in each micro-batch: of its GradientAccumulationPlugin, or of the Trainer's accelerator_config.
SYNCED = re.compile(r"\bsync_each_batch[\"']?\s*[=:]\s*[Tt]rue\b")
# DDP's own argument, which Accelerate's DistributedDataParallelKwargs has as well.
IN_BUCKETS = re.compile(r"\bgradient_as_bucket_view[\"']?\s*[=:]\s*[Tt]rue\b")
REDUCES_EACH = "the release that reduces in each micro-batch with FSDP2"
# A model whose weights are loaded in 16 bits. An argument of autocast has the same name.
LOADED = re.compile(
    r"\bfrom_(?:pretrained|config)\((?:[^()]|\((?:[^()]|\([^()]*\))*\)){0,600}?\b(?:torch_)?dtype\s*=\s*[\"']?"
    r"(?:torch\.)?b(?:float16|f16)\b|--(?:torch_)?dtype[= ]b(?:float16|f16)\b"
)
RECOMPUTING = ("checkpointing", OF_FSDP)
IN_ONE_PIECE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"  # of the allocator
# By the words of transformers, LLaMA-Factory (flash_attn) and ms-swift (attn_impl).
ATTENTION = re.compile(r"(?<!\w)_?(?:attn_impl(?:ementation)?|flash_attn)[\"']?\s*[=: ]\s*[\"']?(\w+)\b")
KERNELS: dict[str, AttentionKernel] = {
    "eager": "eager",
    "sdpa": "sdpa",
    "fa2": "flash2",
    "flash_attn": "flash2",
    "flash_attention_2": "flash2",
    "fa3": "flash3",
    "flash_attention_3": "flash3",
}
CHUNKING = "fused kernels (Liger)"  # with the Trainer's default kernels: one is the loss of chunks
# Guesses at what took more than was predicted, and the words of a text that rule each out.
NOT_RECOMPUTED = "activations, if recomputing is not in effect"
IN_FP32 = "a model that was loaded in fp32"
CACHE = "the cache of keys and values (`use_cache`)"
RULED_OUT = {
    NOT_RECOMPUTED: r"torch/utils/checkpoint\.py",
    IN_FP32: r"(?i)(?<!\w)(?:torch_)?dtype[\"']?\s*[=:]\s*[\"']?(?:torch\.)?(?:bfloat16|float16|bf16|fp16)\b",
    CACHE: r"(?i)\buse_cache[\"']?\s*[=:]\s*[\"']?false\b",
}
# A line of a script that makes another model, or puts a whole one on a GPU.
SECOND_MODEL = re.compile(
    r"(?m)^[ \t]*(?![ \t#])([^#\n]*(?:\bpipeline\((?=(?:[^()]|\((?:[^()]|\([^()]*\))*\)){0,400}?\bdevice)"
    r"|\bdeepcopy\([^()\n]*(?:model|net|module)|\bref(?:erence)?_model *=(?! *None)|\b(?:AveragedModel|EMAModel)\("
    r"|\bvllm_gpu_memory_utilization *=|Model\w*\.from_pretrained\([^#\n]*(?:device_map|\)\.(?:to|cuda)\())[^#\n]*)"
)
# Trainers of preferences load a reference model (trl 1.16.0, dpo_trainer.py:908, kto_trainer.py:919).
REFERENCE = re.compile(
    r"(?m)(?<![A-Za-z])(?:DPO|KTO)Trainer\(|\btrl (?:dpo|kto)\b"
    r"|\btrl[./](?:scripts|trainer)[./](?:dpo|kto)(?:_trainer)?\b"
    r"|^[ \t]*(?:stage|rl|rlhf_type): *(?:dpo|kto)\b|--(?:stage|rlhf_type)[ =](?:dpo|kto)\b"
)
# Trainers by rewards load one unless beta is 0, which is the default of GRPO (trl 1.16.0, grpo_trainer.py:984).
BY_REWARDS = re.compile(
    r"\b(?:GRPO|RLOO)Trainer\(|\btrl (?:grpo|rloo)\b|\btrl[./](?:scripts|trainer)[./](?:grpo|rloo)(?:_trainer)?\b"
)
HAS_BETA = re.compile(r"\bbeta[\"']?\s*[=: ]\s*(?:0?\.0*[1-9]|[1-9])")
NO_REFERENCE = re.compile(r"\bprecompute_ref_log_probs[\"']?\s*[=: ]\s*[Tt]rue\b")  # a given one stays
GIVEN_REFERENCE = re.compile(r"[(,]\s*ref_model\s*=\s*(?!None\b)\w")
# The first that a script loads, as most load the one that they train.
TRAINED_MODEL = re.compile(r"(?m)^[ \t]*(?!ref|[ \t#])([^#\n]*Model\w*\.from_pretrained\([^#\n]*)")
# A line after which a name holds the logits. A loss alone holds none.
OUTPUT = re.compile(
    r"(?m)^([ \t]*)((?!loss\b)(\w+) *= *(?:self\.)?(?:model|ddp_model|model_engine|engine|net)\([^\n#]*\))[ \t]*$"
)
LONGEST_LOOP = 4000  # characters
# How bitsandbytes keeps frozen layers. LLaMA-Factory and axolotl quantize the scales as well where nobody says it.
QUANTIZED = {
    "int8": r"(?i)\b(?:load_in_8bit[\"']?\s*[:= ]\s*[\"']?true|quantization_bit[\"']?\s*[:= ]\s*[\"']?8)\b",
    "nf4": r"(?i)\b(?:load_in_4bit[\"']?\s*[:= ]\s*[\"']?true|quantization_bit[\"']?\s*[:= ]\s*[\"']?4)\b"
    r"|(?<![\w./-])qlora\b(?!\.\w)",
}
DOUBLE = re.compile(
    r"(?i)double_quant(?:ization)?[\"']?\s*[:= ]\s*[\"']?true\b|\bquantization_bit\b|\badapter: *qlora\b"
)
# As the Trainer prints it: "Number of trainable parameters = 8,030,261,248".
TRAINABLE = re.compile(r"(?i)\btrainable param(?:eter)?s ?[:=] ?(\d{1,3}(?:,\d{3})+|\d{4,12})\b")
# DeepSpeed has one file for two stages. The second is more usual: examples of transformers and Accelerate have it.
STAGE_1_OR_2 = "as the text names stage_1_and_2.py; stage 1 holds all gradients as well"
# Our names of settings, and what a text is read for.
OF_TEXT = {
    "stage": "stage",
    "machines": "machines",
    "accumulation": "passes",
    "checkpointing": "checkpointing",
    "mixed": "precision",
    "adapters": "peft",
    "FSDP1's sharding": "sharding",
    CHUNKING: "chunked_loss",
}
# Of Megatron, and NeMo. An inference engine divides its tensors among its own ranks.
DIVIDED = re.compile(
    r"(?<!\w)(?:(?:tensor|pipeline|expert)[-_]model|context)[-_]parallel[-_]size[\"']?\s*[:= ]\s*[\"']?"
    r"(?:[2-9]|[1-9]\d)\b"
)
LAYERS_DIVIDED = "layers or tokens divided"


def stated(pasted: Pasted) -> dict[str, Any]:
    """Return what a text says of its training, by our names of settings."""
    text = pasted.text
    said = {name: pasted.said.get(called) for name, called in OF_TEXT.items()}
    said |= {name: pasted.said.get(name) or None for name in ("sequence", "lora_rank")}
    said |= {"micro_batch": pasted.sequences, "pairs": pasted.has_pairs or None, "quantized": quantized(text)}
    said["ranks"] = pasted.ranks
    if pasted.said.get("offload", "none") != "none":
        said["offload_optimizer"] = pasted.said["offload"]
    said["loaded"] = bool(LOADED.search(text)) or None
    said["plain"] = (pasted.said.get("stage") == "FSDP2" and pasted.said.get("plain")) or None
    said["sync_each_batch"] = bool(SYNCED.search(text)) or None
    said["bucket_view"] = bool(IN_BUCKETS.search(text)) or None
    accelerate = pasted.releases.get("accelerate")
    is_early = isinstance(accelerate, Version) and named("fsdp2-no-sync-syncs").contains(accelerate)
    said[REDUCES_EACH] = f"accelerate {accelerate}" if is_early else None
    said["attention"] = only({*ATTENTION.findall(text)} & KERNELS.keys())
    said["deepspeed"] = pasted.config.content if pasted.config else None
    zero = pasted.config.content["zero_optimization"] if pasted.config else None
    if isinstance(zero, dict):
        said["reduce_bucket_size"] = _whole(zero.get("reduce_bucket_size"))
        if "offload_optimizer" in said:
            said |= {part: str(value_at(zero, f"{part}.device") or "none") for part in OFFLOADS}
    said |= said_of_optimizer(pasted)
    if pasted.is_stage_1_or_2:
        said |= {"stage": 2, "assumed": STAGE_1_OR_2}
    said["trainable"] = only({int(each.replace(",", "")) for each in TRAINABLE.findall(text)})
    said[IN_ONE_PIECE] = advised(IN_ONE_PIECE, pasted) != IN_ONE_PIECE or None
    said["ruled_out"] = {name for name, words in RULED_OUT.items() if re.search(words, text)} or None
    is_precomputed = NO_REFERENCE.search(text) and not GIVEN_REFERENCE.search(text)
    is_by_rewards = BY_REWARDS.search(text) and HAS_BETA.search(text)
    said["reference"] = bool((REFERENCE.search(text) and not is_precomputed) or is_by_rewards) or None
    trained = TRAINED_MODEL.search(text)
    said["trained_model"] = trained[1].strip(" \t,") if trained else None
    said["other_models"] = [each[1].strip(" \t,") for each in SECOND_MODEL.finditer(text)] or None
    said["output"] = kept_output(text)
    about = told(text)
    said |= {"model": about.model, "altered": about.altered or None}
    if about.model is None:  # of an unknown one at least the logits have their size
        said["vocabulary"] = only({shape.get("vocab_size") for shape in printed_shapes(text)})
    said["counted"] = counted(pasted.log) or None
    said[LAYERS_DIVIDED] = bool(DIVIDED.search(text)) or None
    said["gpu"] = about.gpu if about.gpu_bytes else None  # of which there is one size
    return {name: value for name, value in said.items() if value is not None}


def kept_output(text: str) -> str | None:
    """Return the line of a loop whose output is there in its backward pass. None: there is none, or it is deleted."""
    for match in OUTPUT.finditer(text):
        indent, line, name = match.groups()
        below, *_ = re.split(rf"(?m)^(?!{indent}|[ \t]*$)", text[match.end() : match.end() + LONGEST_LOOP])
        before, backward, _ = below.partition(".backward(")
        if backward and not re.search(rf"\bdel {name}\b|\b{name} *= *None\b", before):
            return line
    return None


def quantized(text: str) -> str | None:
    """Return how a text says that frozen layers are quantized. None: it does not, or says two ways."""
    kind = only({kind for kind, words in QUANTIZED.items() if re.search(words, text)})
    return "nf4_double" if kind == "nf4" and DOUBLE.search(text) else kind


class Conflict(NamedTuple):
    """A setting of which a text, or the numbers of its error, say something else than what counts."""

    name: str
    at_work: Any  # as the text has it
    sentence: str
    by_numbers: bool = False  # what counts cannot be so, if all else is


def conflicts(given: dict[str, Any], written: dict[str, Any], stated: dict[str, Any]) -> tuple[Conflict, ...]:
    """Return the settings of which a text says something else than a flag, or than the config."""
    of_config = understood(written)
    if "assumed" in stated:
        stated = {name: value for name, value in stated.items() if name != "stage"}
    # What a text says of offloading alone is of the config's stage, and of a stage alone with the config's offloading.
    of_text = understood({name: written.get(name) for name in ("engine", "stage", *OFFLOADS)} | stated)
    found = []
    for name in COMPARED:
        whose, counts = ("", given.get(name)) if given.get(name) is not None else ("The config's ", of_config.get(name))
        text_has = of_text.get(name)
        if counts is None or text_has is None or counts == text_has or is_fsdp(counts, text_has):
            continue
        sentence = f"{whose}{typed(name, counts)} counts, and not the text's {typed(name, text_has)}."
        found.append(Conflict(name, text_has, sentence))
    return tuple(found)


def is_fsdp(*arms: Any) -> bool:
    """Whether all are arms of FSDP: no text says which."""
    return all("sdp" in str(arm) for arm in arms)


def typed(name: str, value: Any) -> str:
    """Return a setting as its flag is typed."""
    if isinstance(value, bool):
        return flag(name if value else f"no_{name}")
    return f"{flag(name)} {value}"


def config_settings(path: Path | None, ranks: int | None = None) -> EffectiveSettings:
    """Return the settings of a config by our names, without those that something else decides.

    A script may recompute activations where the config has no such key. `ranks` are those that train, if known.
    """
    known = {}
    source = recognised(path, ranks) if path else None
    for name, setting in (effective_settings(source) if source else {}).items():
        if name == "precision" and setting.value == "fp32" and source and "mixed_precision" not in source.content:
            continue  # a flag of the launcher may say it
        is_unsaid = name in RECOMPUTING and setting.is_default and str(setting.value).lower() in OFF
        if name == OPTIM and setting.is_default:  # it changed with releases
            name, setting = BY_DEFAULT, replace(setting, value=of_trainer())
        if setting.value not in (AUTO, UNKNOWN) and not is_unsaid:
            known[OUR_NAMES.get(name, name)] = setting
    return known


def of_deepspeed(path: Path | None) -> dict[str, Any]:
    """Return the DeepSpeed config that a file is, or that it names. Empty: there is none."""
    source = sources.read(path) if path else None
    if source and source.kind != sources.DEEPSPEED:
        source = source.named
    return source.content if source else {}


def understood(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with numbers as numbers, the model as we call it, and the arm that is nearest to them."""
    values = dict(settings)
    for name in NUMBERS:
        values[name] = _whole(values.get(name))
    values |= _of_rows(values)
    values["checkpointing"] = _recomputes(values)
    values["chunked_loss"] = str(values.get(CHUNKING)).lower() not in OFF or None
    values["attention_kernel"] = KERNELS.get(str(values.get("attention")))
    values["model"] = model_of_name(str(values.get("model")))
    values["arm"] = _nearest_arm(values)
    values["homes"] = _homes(values)
    values["products"] = PRECISIONS.get(str(values.get("precision")))
    values["precision"] = _unusual_precision(values)
    return values


def _of_rows(values: dict[str, Any]) -> dict[str, int]:
    """Return what DeepSpeed derives from the rows of a step that its config has (runtime/config.py:620)."""
    rows, parts = _whole(values.get("sequences per step")), ("micro_batch", "accumulation", "ranks")
    unsaid = [name for name in parts if values[name] is None]
    factors = prod(values[name] for name in parts if values[name])
    is_shared = any(key in SHARE_ROWS for key in values.get("deepspeed") or ())
    if not rows or rows % factors or is_shared or values.get("pairs"):
        return {}
    if unsaid == ["micro_batch", "accumulation"]:
        return {"micro_batch": rows // factors, "accumulation": 1}
    return {unsaid[0]: rows // factors} if len(unsaid) == 1 else {}


def _whole(value: Any) -> int | None:
    """Return a whole number, which JSON and YAML may have in quotes, or as 5e8."""
    if re.fullmatch(r"[1-9][0-9]?(?:\.[0-9]+)?e\+?[0-9]|[1-9][0-9]{0,9}\.0", str(value)):
        value = round(float(value))
    return int(value) if re.fullmatch("[1-9][0-9]{0,9}", str(value)) else None


def _recomputes(values: dict[str, Any]) -> bool | None:
    """Return whether activations are recomputed. None: nobody says it."""
    # Of axolotl it may be a word, such as unsloth.
    if any(str(values.get(name)).lower() not in OFF for name in RECOMPUTING):
        return True
    return None if values.get("checkpointing") is None else False


def _nearest_arm(values: dict[str, Any]) -> str | None:
    engine, stage = values.get("engine"), str(values.get("stage"))
    if engine == "FSDP" or stage.startswith("FSDP"):
        return _nearest_of_fsdp(values)
    if engine in (None, "DeepSpeed") and stage == "None":  # a file that is not here says it
        return None
    if stage not in ("1", "2", "3") or engine == "DDP":
        return "single" if values["ranks"] == 1 else "ddp"
    is_offloaded = any(values.get(part) not in (None, "none") for part in OFFLOADS)
    if stage == "3" and values.get("offload_optimizer") == "nvme":
        return "zero3_nvme"
    return f"zero{stage}_cpu" if is_offloaded else f"zero{stage}"


def _homes(values: dict[str, Any]) -> tuple[str, str] | None:
    """Return where stage 3 keeps the optimizer's states and the weights, if a config writes both. Else the arm says it.

    Weights on a disk are counted on the host, through which they go.
    """
    optimizer, weights = (values.get(part) for part in OFFLOADS)
    if values["arm"] not in ("zero3_cpu", "zero3_nvme") or optimizer not in ("cpu", "nvme") or weights is None:
        return None
    return optimizer, "none" if weights == "none" else "cpu"


def _nearest_of_fsdp(values: dict[str, Any]) -> str | None:
    of_trainer = str(values.get("the Trainer's fsdp"))
    is_one_unit = "shard" in of_trainer and "auto_wrap" not in of_trainer
    if is_one_unit or str(values.get(POLICY, LAYERS)).upper() != LAYERS:
        return None
    sharding = " ".join((str(values.get("FSDP1's sharding")), of_trainer))
    if str(values.get("sharding")).lower() in ("false", "0"):  # of FSDP2
        sharding = "SHARD_GRAD_OP"
    places = ("FSDP's offloading", *OFFLOADS)
    return nearest_arm(
        sharding,
        groups=_whole(values.get("groups of ranks")),
        machines=_whole(values.get("machines")),
        offloads=any(str(values.get(each)).lower() not in OFF for each in places),
    )


def _unusual_precision(values: dict[str, Any]) -> Precision | None:
    """Return the precision of weights and states. None: it is the arm's usual one, or nobody says it."""
    written, arm = PRECISIONS.get(str(values.get("precision"))), str(values["arm"])
    is_mixed = written in HALF or values.get("mixed") in HALF
    if written == "fp32" and is_mixed:  # an argument in a script wins
        written = None
    if arm.startswith("zero"):
        return written if written != "bf16_cast" else None
    # With mixed precision Accelerate makes them fp32 again for FSDP, and not for DDP.
    stays = arm in ("ddp", "single") or (not is_mixed and (written == "fp32" or values.get("plain")))
    if values.get("loaded") and stays and not values.get("adapters"):
        return "bf16_pure"
    return written if written != "bf16" else None
