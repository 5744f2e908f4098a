"""What the page of `study stack` looks up: of each fault, in which releases it is and what else it needs.

Ranges, locks and configs are for the command.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from study.known.faults import ANY, Fault, Release, named, releases_of, table
from study.known.stacks import Flags, Stack, answers_of
from study.known.which_apply import which_apply

# What a script answers to the command, which has no flag for it.
ACCUMULATES = str((named("no-sync-refused").when or {})["script"])
PACKAGES = ("deepspeed", "accelerate", "transformers", "torch", "PEFT", "trl")
# What is asked, by condition: labels of check boxes by the words of the command.
BOXES: dict[str, tuple[str, dict[str, str]]] = {
    "stage": (
        "Sharding",
        {"--stage 1": "ZeRO 1", "--stage 2": "ZeRO 2", "--stage 3": "ZeRO 3", "--fsdp2": "FSDP2", "--fsdp1": "FSDP1"}
        | {"--ddp": "DDP", "--stage 0": "DeepSpeed, stage 0"},
    ),
    "family": (
        "The model is a",
        {"--family bert": "BERT", "--family gpt2": "GPT-2", "--family llama": "Llama", "--family qwen2": "Qwen2"}
        | {"--family qwen3": "Qwen3", "--family qwen3-next": "Qwen3-Next", "--family gemma": "Gemma"}
        | {"--family mistral": "Mistral"},
    ),
    "passes": ("Micro-batches of a step", {"--passes 1": "one", "--passes 2": "several"}),
    "precision": (
        "Precision",
        {"--precision fp32": "fp32", "--precision bf16": "bf16, a cast", "--precision fp16": "fp16, a cast"}
        | {"--precision bf16_autocast": "bf16 autocast", "--precision fp16_autocast": "fp16 autocast"},
    ),
    "optimizer": (
        "Optimizer",
        {f"--optimizer {name.lower()}": name for name in ("AdamW", "Adam", "SGD", "Adafactor", "Muon", "Lion")},
    ),
    "peft": ("Frozen weights, as with LoRA", {"--peft": "yes", "--no-peft": "no"}),
    "checkpointing": ("Activations recomputed", {"--checkpointing": "yes", "--no-checkpointing": "no"}),
    "reentrant": ("use_reentrant", {"--reentrant": "yes", "--no-reentrant": "no"}),
    "trainer": (
        "Trained by",
        {"--trainer own": "a loop of one's own", "--trainer trainer": "transformers' Trainer"}
        | {"--trainer trl": "TRL", "--trainer axolotl": "axolotl"}
        | {"--trainer llamafactory": "LLaMA-Factory", "--trainer ms-swift": "ms-swift"},
    ),
    "offload": (
        "Optimizer states in",
        {"--offload none": "GPUs", "--offload cpu": "host memory", "--offload nvme": "NVMe"},
    ),
    "accumulates": (
        "Uses accelerator.accumulate",
        {"accumulates": "yes, and Accelerate counts; or no_sync", "accumulates not": "no"},
    ),
    "ranks": ("Ranks", {"--ranks 2": "several", "--ranks 1": "one"}),
    "cuda": ("Trains on", {"--cuda": "GPUs", "--no-cuda": "CPUs alone"}),
}
TAKEN = {"offload": "--offload none", "ranks": "--ranks 2", "cuda": "--cuda"}  # by the command, if nothing is said
LISTED = {"trl": "--trainer trl"}  # who lists a trainer trains with it, unless another is said


def stack_of(releases: Mapping[str, Release], boxes: list[str]) -> Stack:
    """Return the stack of these releases in a training of which check boxes say something."""
    of_script = BOXES["accumulates"][1]
    answers = [box == "accumulates" for box in boxes if box in of_script]
    flags = _flags_of([box for box in boxes if box not in of_script])
    stack = Stack.of(releases, flags)
    return replace(stack, shown={**stack.shown, ACCUMULATES: answers[0]}) if answers else stack


def _flags_of(boxes: list[str]) -> Flags:
    said: dict = {}
    for box in boxes:
        name, _, value = box.removeprefix("--").partition(" ")
        said[name.removeprefix("no-")] = value or not name.startswith("no-")
        if value.isdigit():
            said[name] = int(value)
    return Flags(**said)


def releases(package: str) -> list[str]:
    """Return those that somebody tested, or that a fault names, from the newest on."""
    return [*map(str, reversed(releases_of(package)))]


@functools.cache
def _fitting(name: str, box: str) -> set[str]:
    """Return the ids of the faults that a check box leaves possible, whatever else is so."""
    stack = stack_of(dict.fromkeys(PACKAGES, ANY), [box])
    # What a trainer that is listed or checked says of other conditions stays open as well.
    trained = {"trainer"}.union(*table().defaults.values())
    open_otherwise = replace(stack, said={**stack.said, **dict.fromkeys((TAKEN.keys() | trained) - {name})})
    return {each.fault.id for each in which_apply(open_otherwise)}


def _needs(fault: Fault) -> dict[str, dict]:
    """Return by condition what is asked, the words that fit, and those with which it is still asked.

    Without words that fit the page cannot say it.
    """
    needs = {}
    for condition, wanted in (fault.when or {}).items():
        name = condition
        fits: list[str] = []
        still: list[str] = []
        if wanted == ACCUMULATES:
            name = "accumulates"
        elif str(wanted) in table().families:
            name = "family"
            still = [box for box in BOXES[name][1] if wanted not in answers_of(box.removeprefix("--family "))]
        if name in PACKAGES:
            inside = SpecifierSet(str(wanted))
            fits = [f"{name}=={release}" for release in releases(name) if release in inside]
        elif name in BOXES:
            fits = [box for box in BOXES[name][1] if fault.id in _fitting(name, box)]
        needs[name] = {"ask": fault.asks[condition], "fits": fits, "still": still}
    return needs


def _forced(fault: Fault) -> dict[str, list[str]]:
    """Return by trainer the releases that make the training reentrant; with its others nobody knows what a no does."""
    return {
        f"--trainer {name}": [f"{name}=={each}" for each in releases(name) if each in SpecifierSet(wanted)]
        for name, wanted in fault.forced.items()
    }


def implied() -> dict[str, dict[str, str]]:
    """Return by trainer the check boxes that it means, unless another says something else."""
    return {
        f"--trainer {trainer}": {name: f"--{name}" for name in defaults}
        for trainer, defaults in table().defaults.items()
    }


def _in_releases(fault: Fault) -> dict[str, str]:
    """Return the releases that have a fault, each with nothing, or what is asked as nobody tested it."""
    questions = {}
    for release in releases(fault.package):
        has = fault.has(Version(release))
        if has is not False:
            questions[f"{fault.package}=={release}"] = "" if has else fault.untested(Version(release))
    return questions


def _between(fault: Fault) -> list[str]:
    """Return the releases that nobody tested, between two that have a fault: they likely have it."""
    here = [each for each in map(Version, releases(fault.package)) if fault.contains(each) and not fault.has(each)]
    return [f"{fault.package}=={release}" for release in here]


def _is_milder(fault: Fault) -> bool:
    return not (fault.symptom.startswith(table().silent) or fault.who)


@functools.cache
def rows() -> list[dict]:
    """Return the faults of the page, the worst first: wrong without a message, or forced on people by a trainer."""
    faults = [fault for fault in table().fault if fault.when is not None and fault.package in PACKAGES]
    faults.sort(key=_is_milder)
    return [
        {
            "id": fault.id,
            "package": fault.package,
            "milder": _is_milder(fault),
            "in": _in_releases(fault),
            "between": _between(fault),
            "needs": _needs(fault),
            "forced": _forced(fault),
        }
        for fault in faults
    ]
