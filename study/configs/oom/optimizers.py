"""Which implementation of AdamW a training has. What an update makes beside the states depends on it.

PyTorch's own updates all tensors at once on a GPU (foreach), and makes a root of each second moment: a parameter's 4
bytes more. Its fused kernel, DeepSpeed's and bitsandbytes' make none.
"""

import re
from typing import Any, NamedTuple

from packaging.version import Version

from study.configs.pasted.read import Pasted
from study.configs.pasted.words import only
from study.configs.settings import OFF, ON
from study.core.files import section_at
from study.core.ignored_keys import OFFLOADS
from study.predict.front import ADAM, Optimizer

# Names of the Trainer's optim (transformers 5.23, trainer_optimizer.py; two are of 4), and of axolotl's optimizer.
NAMED: dict[str, Optimizer] = {
    "adamw_torch": "foreach",
    "adamw_torch_fused": "adamw",
    "adamw_apex_fused": "adamw",
    "adamw_hf": "single_tensor",
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
    "paged_adamw_32bit": "adamw",
}
OPTIM = "the Trainer's optim"
OF_SCRIPT = "the script's AdamW"
OF_FRAME = "the update in the traceback"
BY_DEFAULT = "the Trainer's default"
DS_LOG = "DeepSpeed's log"
IN_TEXT = re.compile(
    rf"(?i)\boptim(?:izer)?[\"']?\s*[:= ]\s*[\"']?(?:OptimizerNames\.)?({'|'.join(NAMED)})(?![\w.])(?!\s*\()"
)
FRAMES: dict[str, Optimizer] = {"multi_tensor": "foreach", "fused": "adamw", "single_tensor": "single_tensor"}
FRAME = re.compile(r"(?m)\bin _(multi_tensor|fused|single_tensor)_adamw?\b")
# What a script makes, outside of comments; of PyTorch's with its arguments.
MADE = re.compile(
    r"(?m)^[^#\n]*?(?<!Dummy)\b(?P<kind>(?:Paged)?AdamW?8bit|DeepSpeedCPUAdam|FusedAdam|AdamW?)"
    r"\((?P<given>(?:[^()]|\((?:[^()]|\([^()]*\))*\)){0,800})\)"
)
OWN_OF_TRANSFORMERS = re.compile(r"\bfrom transformers(?:\.optimization)? import [^\n]*\bAdamW\b")
BY_DEEPSPEED = re.compile(r"DeepSpeed Basic Optimizer = (?:FusedAdam|DeepSpeedCPUAdam)\b")
# `default_optim` in training_args.py of transformers: adamw_hf in 4.31.0, adamw_torch in 4.32.0 and 4.53.3 (its pull
# request 25109), and from 4.54.0 on adamw_torch_fused with torch 2.8 or later (37358).
FUSED_SINCE, FUSED_WITH_TORCH, TORCH_SINCE = Version("4.54.0"), Version("2.8"), Version("4.32.0")
UNSAID = "--optimizer adamw (nobody says it; PyTorch's AdamW without fused=True is foreach)"
TRAINERS = ("trainer", "trl", "llamafactory")  # whose default is the Trainer's


class Taken(NamedTuple):
    """An optimizer as it is predicted, and why, in words."""

    optimizer: Optimizer
    why: str


def optimizer_of(values: dict[str, Any]) -> Taken | None:
    """Return the optimizer of a training of which configs and texts say this, by our names. None: nobody says it."""
    if values.get(OF_FRAME):
        return Taken(values[OF_FRAME], OF_FRAME)
    config, arm = values.get("deepspeed") or {}, str(values.get("arm"))
    is_deepspeed = arm.startswith("zero") or (bool(config) and not arm.startswith(("fsdp", "hsdp")))
    offload = str(values.get(OFFLOADS[0])).lower() not in OFF or arm.endswith(("_cpu", "_nvme"))
    asked = _asked(values)
    if is_deepspeed:
        if values.get(DS_LOG):
            return Taken("adamw", "DeepSpeed's own Adam, as its log says")
        if section := section_at(config, "optimizer"):
            return _of_section(section, offload)
        if offload and config.get("zero_force_ds_cpu_optimizer") is not False:  # Accelerate and the Trainer make it
            return asked and Taken("adamw", f"DeepSpeedCPUAdam, as it is offloaded, in place of {asked.why}")
    if asked and asked.optimizer == "foreach" and offload:  # PyTorch's default on a CPU (torch/optim/optimizer.py)
        return Taken("single_tensor", f"{asked.why}, on the host")
    return asked


def _asked(values: dict[str, Any]) -> Taken | None:
    """Return what a Trainer's setting or a script asks of PyTorch or of others."""
    if optim := values.get(OPTIM):
        name = str(optim).lower()
        return Taken(NAMED[name], f"optim {name}") if name in NAMED else Taken("adamw", f"in place of {optim}")
    if made := values.get(OF_SCRIPT):
        return Taken(made, OF_SCRIPT)
    return values.get(BY_DEFAULT)


def _of_section(section: dict, offload: bool) -> Taken:
    """Return the optimizer of a DeepSpeed config (engine.py, get_optimizer_configuration)."""
    kind = section.get("type")
    if str(kind).lower() not in ADAM:
        return Taken("adamw", f"in place of {kind}")
    params = section_at(section, "params")
    if str(params.get("torch_adam")).lower() not in ON:
        return Taken("adamw", "DeepSpeedCPUAdam" if offload else "DeepSpeed's FusedAdam")
    optimizer = of_torch(params.get("fused") is True, params.get("foreach") is not False and not offload)
    return Taken(optimizer, "torch_adam of the DeepSpeed config")


def of_torch(fused: bool, foreach: bool) -> Optimizer:
    """Return PyTorch's AdamW. On a GPU foreach is its default."""
    if fused:
        return "adamw"
    return "foreach" if foreach else "single_tensor"


def said_of_optimizer(pasted: Pasted) -> dict[str, Any]:
    """Return what a text, or a script in it, says of the optimizer, by our names. None: it does not, or two things."""
    text = pasted.text
    frame = only({FRAMES[each] for each in FRAME.findall(text)})
    return {
        OF_FRAME: frame,
        DS_LOG: bool(BY_DEEPSPEED.search(text)) or None,
        OPTIM: only({each.lower() for each in IN_TEXT.findall(text)}),
        OF_SCRIPT: only({_made(each, text) for each in MADE.finditer(text)}),
        BY_DEFAULT: _default(pasted),
    }


def _made(match: re.Match, text: str) -> Optimizer:
    kind, given = match["kind"], match["given"]
    if kind.endswith("8bit"):
        return "adamw_8bit"
    if kind in ("DeepSpeedCPUAdam", "FusedAdam"):
        return "adamw"
    if kind == "AdamW" and OWN_OF_TRANSFORMERS.search(text):
        return "single_tensor"
    return of_torch(bool(re.search(r"\bfused\s*=\s*True", given)), not re.search(r"\bforeach\s*=\s*False", given))


def _default(pasted: Pasted) -> Taken | None:
    """Return what the Trainer of a text makes where nobody says it."""
    if pasted.said.get("trainer") not in TRAINERS:
        return None
    return of_trainer(*(pasted.releases.get(name) for name in ("transformers", "torch")))


def of_trainer(transformers: object = None, torch: object = None) -> Taken:
    """Return what the Trainer of these releases makes where nobody says it; of today's, if they are not known."""
    release = transformers if isinstance(transformers, Version) else None
    name = "adamw_torch_fused"
    if (release or FUSED_SINCE) < FUSED_SINCE or (isinstance(torch, Version) and torch < FUSED_WITH_TORCH):
        name = "adamw_torch" if (release or TORCH_SINCE) >= TORCH_SINCE else "adamw_hf"
    which = f"in transformers {release}"
    if release is None:
        since = "with" if NAMED[name] == "adamw" else "without"
        which = f"{since} transformers {FUSED_SINCE} and torch {FUSED_WITH_TORCH} or later"
    return Taken(NAMED[name], f"{name}, the Trainer's default {which}")
