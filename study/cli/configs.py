"""Writes an advice as a config: a yaml for `accelerate launch`, and a DeepSpeed json beside it."""

import json
from pathlib import Path

import yaml

from study.errors import Stop
from study.predictor.advice.advise import Row
from study.predictor.advice.question import Question
from study.predictor.advice.settled import settled_arm, zero_of
from study.predictor.setup import ADAMW, trainers_name
from study.report.advice import use
from study.spec import arms
from study.spec.arms import Arm
from study.spec.settings import AUTOCAST

# Why a line differs from the default of Accelerate or DeepSpeed. Lines that are not here are defaults, or required.
# Some reasons depend on the value.
WHY_YAML = {
    "num_processes": "one for each GPU",
    "num_machines": "run this on each of them, with --machine_rank and --main_process_ip of the first",
    "mixed_precision": "autocast; the weights stay fp32",
    arms.REPLICAS: "one copy of everything for each node",
    arms.SHARDS: "GPUs of a node",
    "deepspeed_multinode_launcher": "each machine starts its own processes; the default is pdsh",
}
DEFAULTS = (("num_machines", 1), ("mixed_precision", "no"))
WHY_VALUE: dict[tuple[str, object], str] = {
    ("distributed_type", "DEEPSPEED"): "ZeRO",
    ("distributed_type", "MULTI_GPU"): "DDP",
    ("distributed_type", "NO"): "one process",
    ("main_process_port", 0): "any free port",
    ("main_process_port", 29500): "the same on all machines",
}
WHY_JSON = {
    "train_micro_batch_size_per_gpu": "rows per pass of the advice",
    "gradient_accumulation_steps": "passes of the advice",
    "gradient_clipping": "not clipped, as without DeepSpeed; its default is 1.0",
    "bf16": "bf16 weights; master copies and optimizer states in fp32, unless this section says bf16",
    "zero_allow_untested_optimizer": "DeepSpeed has not tested this optimizer",
    "fp16": "fp16 weights with fp32 master copies and loss scaling: this GPU has no bf16, or you chose fp16",
    "torch_autocast": "weights stay fp32, products are computed in 16 bits",
    "stage": "default 0",
    "zero_hpz_partition_size": "GPUs of a node, which keep a second copy of the weights for the backward pass",
    "overlap_comm": "gradients are reduced while others are computed; the default depends on the stage",
    "reduce_bucket_size": "elements of gradients reduced at once; the default of 5e8 takes gigabytes",
    "allgather_bucket_size": "elements of weights gathered at once; the default of 5e8 takes gigabytes",
    "stage3_prefetch_bucket_size": "elements of weights fetched ahead; default 5e7",
    "stage3_gather_16bit_weights_on_model_save": "saves whole weights; default false",
    "use_multi_rank_bucket_allreduce": "each gradient is reduced to its owner only; default true",
    "offload_optimizer": "optimizer states leave the GPU; nvme_path is a folder on a fast disk",
    "offload_param": "weights leave the GPU, too",
}


NVME_DIR = Path("nvme")  # below the folder of the config, until you name another


def config(row: Row, question: Question, nvme_dir: Path = NVME_DIR) -> tuple[dict, dict | None]:
    """Return the yaml and the DeepSpeed json of an advised row, with batch and precision.

    With DeepSpeed the precision is in the json, and `study/train.py` accepts the file with the same --precision.
    Without DeepSpeed it is `mixed_precision` in the yaml. The trainer refuses that, because every arm takes its
    precision from --precision. Accelerate cannot express `bf16_cast` without DeepSpeed: your script has to load the
    weights in bf16 and to keep the master copy.
    """
    ours = arms.read(arms.all_paths()[row.arm])
    ours = settled_arm(ours, question.gpus, question.local, row.bucket_elements)
    accelerate = _accelerate(ours, question)
    precision = precision_of(row, question)
    if ours.deepspeed is None:
        return accelerate | {"mixed_precision": precision if precision in AUTOCAST else "no"}, None
    deepspeed = ours.deepspeed | _precision_settings(precision)
    deepspeed |= {
        "train_micro_batch_size_per_gpu": row.micro_batch,
        "gradient_accumulation_steps": row.accumulation,
        "zero_optimization": dict(zero_of(ours)),
    }
    if question.optimizer not in ADAMW:
        deepspeed["zero_allow_untested_optimizer"] = True
    if ours.uses_nvme:
        on_disk = deepspeed["zero_optimization"]["offload_optimizer"] | {"nvme_path": str(nvme_dir.resolve())}
        deepspeed["zero_optimization"]["offload_optimizer"] = on_disk
    return accelerate, deepspeed


def _accelerate(arm: Arm, question: Question) -> dict:
    """Return the yaml of an arm with the processes and groups of a question."""
    nodes = question.gpus // question.local
    config = yaml.safe_load(arm.path.read_text()) | {"num_processes": question.gpus, "num_machines": nodes}
    if nodes > 1:  # a port that is free on one machine may not be free on another
        config["main_process_port"] = 29500
    if nodes > 1 and arm.deepspeed:
        config["deepspeed_config"] |= {"deepspeed_multinode_launcher": "standard"}
    if arm.replicas > 1:
        config["parallelism_config"] = {arms.REPLICAS: arm.replicas, arms.SHARDS: question.gpus // arm.replicas}
    return config


def _precision_settings(precision: str) -> dict:
    """Return the sections of a DeepSpeed config for a precision."""
    if precision == "fp32":
        return {}
    if precision in AUTOCAST:
        autocast = {"enabled": True, "dtype": AUTOCAST[precision], "lower_precision_safe_modules": []}
        return {"torch_autocast": autocast}
    if precision == "bf16_pure":
        return {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    return {precision.removesuffix("_cast").removesuffix("_pure"): {"enabled": True}}


def precision_of(row: Row, question: Question) -> str:
    """Return the precision of a row, with fp16 if the GPU has no bf16. (The trainer has no `fp16_cast`.)"""
    return row.precision if question.has_bf16 else row.precision.replace("bf16", "fp16")


def write(path: Path, row: Row, question: Question, nvme_dir: Path | None = None) -> list[Path]:
    """Write the config, and the json beside it if there is one. Returns the paths. Nothing is overwritten.

    The yaml names the json by its absolute path, so that it can be launched from any folder. JSON has no comments, so
    the yaml has the comments for both.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise Stop(f"{path} is not the name of a yaml file", "give a name that ends in .yaml")
    accelerate, deepspeed = config(row, question, nvme_dir or path.parent / NVME_DIR)
    json_path = path.with_suffix(".json")
    lines = [f"# {line}" for line in script_notes(question, row, deepspeed)]
    texts = {}
    if deepspeed:
        accelerate["deepspeed_config"] |= {"deepspeed_config_file": str(json_path.resolve())}
        texts[json_path] = json.dumps(deepspeed, indent=2) + "\n"
        lines += [f"# In {json_path.name}:", *(f"#   {line}" for line in json_notes(deepspeed))]
    return _write({path: "\n".join([*lines, *commented(accelerate)]) + "\n"} | texts)


def _write(texts: dict[Path, str]) -> list[Path]:
    if existing := next((target for target in texts if target.exists()), None):
        raise Stop(f"{existing} exists already", "give another name, or remove it")
    try:
        for target, text in texts.items():
            target.write_text(text)
    except OSError as error:
        raise Stop(f"{target} cannot be written ({error.strerror})", "give a file in a folder that exists") from None
    return list(texts)


def commented(config: dict, indent: str = "") -> list[str]:
    """Return a mapping as lines of yaml. Values that are not defaults have their reason as a comment."""
    lines = []
    for name, value in config.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}:", *commented(value, indent + "  ")]
            continue
        why = None if (name, value) in DEFAULTS else WHY_YAML.get(name) or WHY_VALUE.get((name, value))
        line = indent + yaml.safe_dump({name: value}, width=1000).strip()
        lines.append(f"{line}  # {why}" if why else line)
    return lines


def json_notes(deepspeed: dict) -> list[str]:
    """Each setting of a DeepSpeed config with the reason for it."""
    settings = {name: value for name, value in deepspeed.items() if name != "zero_optimization"}
    settings |= deepspeed["zero_optimization"]
    return [f"{name} {json.dumps(value)}: {WHY_JSON.get(name, 'as in the arm')}" for name, value in settings.items()]


def script_notes(question: Question, row: Row, deepspeed: dict | None) -> list[str]:
    """Return what the user's own script has to do, because Accelerate does not do it."""
    precision = precision_of(row, question)
    lines = [
        f"{use(row, question)}.",
        f"Predicted for {question.gpus} x {question.gpu}, {question.sequence} tokens per row "
        f"and {question.batch} rows per step.",
        f"In your script: {row.micro_batch} row{'s' * (row.micro_batch > 1)} per process and pass, "
        f"Accelerator(gradient_accumulation_steps={row.accumulation}).",
    ]
    if row.checkpointing:
        lines.append("In your script also: model.gradient_checkpointing_enable().")
    if deepspeed:
        if precision == "fp16":
            fix = "study/training/patches.py has a fix"
            lines.append(f"DeepSpeed 0.19 never lowers this loss scale of 65536 ({fix}).")
    elif row.precision == "bf16_cast":
        lines.append("In your script also: 16-bit weights, and fp32 master copies for the optimizer.")
    trains_alike = (deepspeed or precision not in AUTOCAST) and precision != "fp16_cast"
    if trains_alike:
        flags = f"--precision {precision} --micro-batch {row.micro_batch} --accumulation {row.accumulation}"
        flags += f" --sequence {question.sequence}" + (" --checkpointing" if row.checkpointing else "")
        if (optimizer := trainers_name(question.optimizer)) != "adamw":
            flags += f" --optimizer {optimizer}"
        lines.append(f"With study/train.py: {flags}")
    return lines
