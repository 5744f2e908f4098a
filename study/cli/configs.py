"""Writes an advice as a config: a yaml for `accelerate launch`, and a DeepSpeed json beside it."""

import json
from pathlib import Path

import yaml

from study.core import arms
from study.core.errors import Stop
from study.core.settings import AUTOCAST
from study.predict.front import ADAMW, Question, Row, settled_arm
from study.report.advice import use

MASTER_PORT = 29500  # with several nodes: a port that is free on one machine may not be free on another
PURE = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
# DeepSpeed's sections for a precision that is no autocast. (The trainer has no `fp16_cast`.)
SECTIONS = {
    "fp32": {},
    "bf16_cast": {"bf16": {"enabled": True}},
    "fp16_cast": {"fp16": {"enabled": True}},
    "bf16_pure": {"bf16": {"enabled": True} | PURE},
    "fp16_pure": {"fp16": {"enabled": True}},
}


def config(row: Row, question: Question, nvme_dir: Path) -> tuple[dict, dict | None]:
    """Return the yaml and the DeepSpeed json of an advised row, with batch and precision.

    With DeepSpeed the precision is in the json, and `study/train.py` accepts the file with the same --precision.
    Without DeepSpeed it is `mixed_precision` in the yaml. The trainer refuses that, because every arm takes its
    precision from --precision. Accelerate cannot express `bf16_cast` without DeepSpeed: your script has to load the
    weights in bf16 and to keep the master copy.
    """
    arm = settled_arm(arms.read(arms.all_paths()[row.arm]), question.gpus, question.local, row.bucket_elements)
    nodes = question.gpus // question.local
    accelerate = yaml.safe_load(arm.path.read_text()) | {"num_processes": question.gpus, "num_machines": nodes}
    if nodes > 1:
        accelerate["main_process_port"] = MASTER_PORT
    if arm.replicas > 1:
        accelerate["parallelism_config"] = {arms.REPLICAS: arm.replicas, arms.SHARDS: question.gpus // arm.replicas}
    precision = row.precision if question.has_bf16 else row.precision.replace("bf16", "fp16")
    dtype = AUTOCAST.get(precision)
    if arm.deepspeed is None:
        return accelerate | {"mixed_precision": precision if dtype else "no"}, None
    accelerate["deepspeed_config"]["deepspeed_multinode_launcher"] = "standard"
    filled = arm.deepspeed | {"train_micro_batch_size_per_gpu": row.micro_batch}
    filled |= {"gradient_accumulation_steps": row.accumulation}
    if dtype:
        filled["torch_autocast"] = {"enabled": True, "dtype": dtype, "lower_precision_safe_modules": []}
    else:
        filled |= SECTIONS[precision]
    if question.optimizer not in ADAMW:
        filled["zero_allow_untested_optimizer"] = True
    if arm.uses_nvme:
        zero = filled["zero_optimization"]
        offload = zero["offload_optimizer"] | {"nvme_path": str(nvme_dir.resolve())}
        filled["zero_optimization"] = zero | {"offload_optimizer": offload}
    return accelerate, filled


def write(path: Path, row: Row | None, question: Question) -> list[Path]:
    """Write the config, and the json beside it if there is one. Returns the paths. Nothing is overwritten.

    The yaml names the json by its absolute path, so that it can be launched from any folder. JSON has no comments, so
    those for your script are in the yaml. What goes to a disk goes to nvme/ beside them, until you name another folder.
    """
    if row is None:
        raise Stop("nothing is predicted to fit", "give more GPUs, or a shorter sequence")
    if path.suffix not in (".yaml", ".yml"):
        raise Stop(f"{path} is not the name of a yaml file", "give a name that ends in .yaml")
    accelerate, deepspeed = config(row, question, path.parent / "nvme")
    texts = {}
    if deepspeed:
        json_path = path.with_suffix(".json")
        accelerate["deepspeed_config"]["deepspeed_config_file"] = str(json_path.resolve())
        texts[json_path] = json.dumps(deepspeed, indent=2) + "\n"
    texts[path] = notes(row, question) + yaml.safe_dump(accelerate, sort_keys=False)
    try:
        for target, text in texts.items():
            with target.open("x") as file:
                file.write(text)
    except OSError as error:
        what = f"{target} cannot be written ({error.strerror})"
        raise Stop(what, "give a new file in a folder that exists") from None
    return [*texts][::-1]


def notes(row: Row, question: Question) -> str:
    """Return as comments what the user's own script has to do, because Accelerate does not do it."""
    lines = [
        f"{use(row, question)}.",
        f"Predicted for {question.gpus} x {question.gpu}, {question.batch} rows of {question.sequence} tokens.",
        f"In your script: {row.micro_batch} per process and pass, "
        f"Accelerator(gradient_accumulation_steps={row.accumulation}).",
    ]
    if row.checkpointing:
        lines.append("In your script also: model.gradient_checkpointing_enable().")
    if row.precision == "bf16_cast" and row.bucket_elements is None:  # without DeepSpeed
        lines.append("In your script also: 16-bit weights, and fp32 master copies for the optimizer.")
    return "".join(f"# {line}\n" for line in lines)
