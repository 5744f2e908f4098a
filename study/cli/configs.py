"""Writes an advice as a config: a yaml for `accelerate launch`, and a DeepSpeed json beside it."""

import json
from pathlib import Path

import yaml

from study.core import arms
from study.core.arms import Arm
from study.core.errors import Stop
from study.core.settings import AUTOCAST
from study.predict.front import ADAMW, Question, Row, settled_arm, zero_of
from study.report.advice import use

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
    zero = dict(zero_of(ours))
    if ours.uses_nvme:
        zero["offload_optimizer"] = zero["offload_optimizer"] | {"nvme_path": str(nvme_dir.resolve())}
    untested = {} if question.optimizer in ADAMW else {"zero_allow_untested_optimizer": True}
    sizes = {"train_micro_batch_size_per_gpu": row.micro_batch, "gradient_accumulation_steps": row.accumulation}
    return accelerate, ours.deepspeed | _precision_settings(precision) | sizes | {"zero_optimization": zero} | untested


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
    if precision in AUTOCAST:
        return {"torch_autocast": {"enabled": True, "dtype": AUTOCAST[precision], "lower_precision_safe_modules": []}}
    pure = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    half = {"enabled": True} | (pure if precision == "bf16_pure" else {})
    return {} if precision == "fp32" else {precision.partition("_")[0]: half}


def precision_of(row: Row, question: Question) -> str:
    """Return the precision of a row, with fp16 if the GPU has no bf16. (The trainer has no `fp16_cast`.)"""
    return row.precision if question.has_bf16 else row.precision.replace("bf16", "fp16")


def write(path: Path, row: Row, question: Question, nvme_dir: Path | None = None) -> list[Path]:
    """Write the config, and the json beside it if there is one. Returns the paths. Nothing is overwritten.

    The yaml names the json by its absolute path, so that it can be launched from any folder. JSON has no comments, so
    those for your script are in the yaml.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise Stop(f"{path} is not the name of a yaml file", "give a name that ends in .yaml")
    accelerate, deepspeed = config(row, question, nvme_dir or path.parent / NVME_DIR)
    texts = {}
    if deepspeed:
        json_path = path.with_suffix(".json")
        accelerate["deepspeed_config"] |= {"deepspeed_config_file": str(json_path.resolve())}
        texts[json_path] = json.dumps(deepspeed, indent=2) + "\n"
    notes = "".join(f"# {line}\n" for line in script_notes(question, row, deepspeed))
    texts[path] = notes + yaml.safe_dump(accelerate, sort_keys=False)
    if existing := next((target for target in texts if target.exists()), None):
        raise Stop(f"{existing} exists already", "give another name, or remove it")
    try:
        for target, text in texts.items():
            target.write_text(text)
    except OSError as error:
        raise Stop(f"{target} cannot be written ({error.strerror})", "give a file in a folder that exists") from None
    return [*texts][::-1]


def script_notes(question: Question, row: Row, deepspeed: dict | None) -> list[str]:
    """Return what the user's own script has to do, because Accelerate does not do it."""
    lines = [
        f"{use(row, question)}.",
        f"Predicted for {question.gpus} x {question.gpu}, {question.batch} rows of {question.sequence} tokens.",
        f"In your script: {row.micro_batch} per process and pass, "
        f"Accelerator(gradient_accumulation_steps={row.accumulation}).",
    ]
    if row.checkpointing:
        lines.append("In your script also: model.gradient_checkpointing_enable().")
    if deepspeed and precision_of(row, question) == "fp16":
        lines.append("DeepSpeed 0.19 never lowers this loss scale of 65536 (study/training/patches.py has a fix).")
    if deepspeed is None and row.precision == "bf16_cast":
        lines.append("In your script also: 16-bit weights, and fp32 master copies for the optimizer.")
    return lines
