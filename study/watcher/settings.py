"""Checks that a run is what its script and its files ask for. They know DeepSpeed 0.19.8 and Accelerate 1.15.0."""

from study.io.numbers import short, size
from study.machine.disk import LEAST_SWAPPED_BYTES
from study.records.findings import Finding
from study.watcher.facts import REDUCING, Facts

FEW = 1e-5  # of the weights: enough to average a loss, but less than the gradients of LoRA
ADAMS = ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam")


def deepspeed_is_on(facts: Facts) -> list[Finding] | None:
    if facts.record.is_script:
        return _script(facts)
    promised, seen = facts.promised, facts.observed
    if promised.deepspeed is None or (seen.wrapper is None and seen.stage is None):
        return None
    if promised.deepspeed and seen.stage is None:
        stage = "" if promised.stage is None else f" with ZeRO stage {promised.stage}"
        return [
            Finding(
                f"DeepSpeed is not on: {facts.source} asks for it{stage}, and what trains is a {seen.wrapper}",
                "start the script with `accelerate launch --config_file FILE` and pass model, optimizer and data to "
                "`accelerator.prepare`; with the Trainer give `deepspeed=` when TrainingArguments is created",
                "deepspeed_set_later",
            )
        ]
    if promised.deepspeed and promised.stage is not None and promised.stage != seen.stage:
        sentence = f"ZeRO's stage is {seen.stage} although {facts.source} says {promised.stage}"
        return [Finding(sentence, "look for a second DeepSpeed config: only one of them counts", "L-39")]
    return []


def fsdp_is_on(facts: Facts) -> list[Finding] | None:
    promised, seen = facts.promised, facts.observed
    if promised.fsdp is None or seen.wrapper is None:
        return None
    if not promised.fsdp or (facts.sharded and seen.wrapper != "DistributedDataParallel"):
        return []
    what = f"FSDP is not on: {facts.source} asks for it, and what trains is a {seen.wrapper}, whole on every rank"
    if seen.device != "cpu":
        return [Finding(what, "pass model and optimizer through `accelerator.prepare`, in one call")]
    remedy = (
        "Accelerate shards only on GPUs, and prints nothing elsewhere; on a CPU `study/training/patches.py` engages it"
    )
    return [Finding(what, remedy, "fsdp_on_a_cpu_is_ddp")]


def _script(facts: Facts) -> list[Finding]:
    off = [each for each in facts.observed.runs if each.arguments_say_deepspeed and not each.deepspeed_initialize_calls]
    if not off:
        return []
    names = " and ".join(each.name for each in off)
    sentence = f"DeepSpeed is not on: the arguments of {names} name it, and deepspeed.initialize was never called"
    return [Finding(sentence, "give `deepspeed=` when TrainingArguments is created, not afterwards", "S002-25")]


def ranks_train_together(facts: Facts) -> list[Finding] | None:
    promised, seen = facts.promised, facts.observed
    if seen.ranks is None:
        return None
    launched = promised.ranks or 1
    counted = seen.ranks if seen.ranks_counted is None else seen.ranks_counted
    if launched > counted:
        return [
            Finding(
                f"{launched} processes were started, and each trains alone: {counted} took part in a collective",
                "pass model, optimizer and data through `accelerator.prepare`; without a GPU open "
                "`Accelerator(cpu=True)`, or no process group is made",
                "two_trainings_without_gpu",
            )
        ]
    if seen.ranks == 1 or facts.sharded or None in (facts.traffic, facts.whole_bytes):
        return []
    moved = facts.moved_bytes(*REDUCING)
    if moved > FEW * facts.whole_bytes:
        return []
    sentence = f"The {seen.ranks} ranks do not share their gradients: a step reduces {size(moved)}"
    remedy = "call the prepared model, not the one that it wraps, and leave `no_sync` for the last pass of a step"
    return [Finding(sentence, remedy, "two_trainings_without_gpu")]


def clipping(facts: Facts) -> list[Finding] | None:
    promised, seen = facts.promised.clipping, facts.observed.clipping
    if seen is None or (promised is None and facts.observed.stage is None):
        return None
    if facts.observed.stage is not None and facts.record.watched.clip_grad_norm not in (None, seen):
        called = facts.record.watched.clip_grad_norm
        sentence = f"Clipping is {short(seen)} although the script calls clip_grad_norm_ with {short(called)}"
        remedy = "write `gradient_clipping` into the DeepSpeed config: under DeepSpeed the call clips nothing"
        return [Finding(sentence, remedy, "clip_grad_norm_ignores_its_norm")]
    promised_off, seen_off = not promised or promised < 0, seen <= 0
    if promised == seen or (promised_off and seen_off):
        return []
    remedy = 'to switch it off write `gradient_clipping: -1.0` in the yaml, or `"gradient_clipping": 0.0` in the json'
    if promised is None:
        sentence = (
            f"Gradients are clipped at {short(seen)} although nothing asks for it: DeepSpeed's default is 1.0 since "
            "June 2026, and was 0"
        )
        return [Finding(sentence, remedy, "L-15")]
    sentence = f"Clipping is {short(seen)} although {facts.source} says {short(promised)}"
    if promised_off and facts.observed.stage is not None:
        sentence += ": Accelerate drops a value of 0, and DeepSpeed's default is 1.0 since June 2026"
        return [Finding(sentence, remedy, "clipping_zero_from_yaml")]
    if facts.observed.stage is None:
        return [Finding(sentence, "clip in the loop, with `accelerator.clip_grad_norm_` before the update", "L-56")]
    return [
        Finding(sentence, "write `gradient_clipping` into the DeepSpeed config: it decides", "max_grad_norm_unused")
    ]


def accumulation(facts: Facts) -> list[Finding] | None:
    promised, seen = facts.promised.accumulation, facts.observed.accumulation
    if None in (promised, seen):
        return None
    if promised == seen:
        return []
    sentence = f"Accumulation is set twice: {facts.source} says {promised} passes a step, and {seen} is what counts"
    remedy = "write the same number into both, or `auto` into the DeepSpeed config"
    return [Finding(sentence, remedy, "accumulation_not_from_accelerator")]


def offloading(facts: Facts) -> list[Finding] | None:
    seen, promised = facts.observed, facts.promised
    if seen.stage is None or seen.offload_optimizer is None:
        return None
    config = (seen.deepspeed or {}).get("zero_optimization") or {}

    def wanted(part: str) -> str:
        section = config.get(part)
        return getattr(promised, part) or (section.get("device") if isinstance(section, dict) else None) or "none"

    states, weights, findings = wanted("offload_optimizer"), wanted("offload_param"), []
    if states == "nvme" and seen.offload_optimizer == "cpu" and seen.stage < 3:
        sentence = f"Stage {seen.stage} takes `nvme` for `cpu`: the optimizer states are in host memory, none on a disk"
        findings.append(Finding(sentence, "use stage 3 for a disk, or write cpu", "stage2_nvme_writes_nothing"))
    elif states != seen.offload_optimizer:
        sentence = f"The optimizer states are offloaded to {seen.offload_optimizer} although {states} is asked for"
        findings.append(
            Finding(sentence, "give the offload_optimizer section to the DeepSpeed config that counts", "L-02")
        )
    if weights != "none" and seen.offload_param in (None, "none"):
        why = f": stage {seen.stage} ignores offload_param" if seen.stage < 3 else ""
        sentence = f"The weights are not offloaded although {weights} is asked for{why}"
        findings.append(Finding(sentence, "use stage 3, or remove offload_param", "offload_param_without_stage3"))
    for part in ("offload_optimizer", "offload_param"):
        path = (config.get(part) or {}).get("nvme_path", "none")
        if seen.stage == 3 and getattr(seen, part) == "nvme" and path in ("none", None):
            sentence = f"The files of {part} go to ./none: Accelerate does not pass the yaml's nvme path on"
            findings.append(Finding(sentence, "give nvme_path in a DeepSpeed json", "nvme_path_from_yaml"))
    written = [rank.nvme_written_bytes for rank in facts.record.memory.per_rank]
    if seen.offload_optimizer == "nvme" and written and None not in written and max(written) < LEAST_SWAPPED_BYTES:
        sentence = "Nothing was swapped to the disk: DeepSpeed keeps partitions under 1 MiB in memory"
        findings.append(Finding(sentence, "choose a larger model or fewer ranks, or no offloading to disk", "L-02"))
    return findings


def optimizer(facts: Facts) -> list[Finding] | None:
    promised, seen = facts.promised.optimizer, facts.observed
    if seen.optimizer is None:
        return None
    findings = []
    if promised and promised not in ADAMS and seen.optimizer == "DeepSpeedCPUAdam":
        sentence = f"The optimizer is DeepSpeedCPUAdam although the script creates {promised}: offloading replaces it"
        findings.append(Finding(sentence, 'set "zero_force_ds_cpu_optimizer": false', "sgd_becomes_adam"))
    if ((seen.deepspeed or {}).get("zero_optimization") or {}).get("zenflow") and seen.stage in (1, 2):
        sentence = "ZenFlow is on: in stages 1 and 2 DeepSpeed 0.19.8 overwrites every two-dimensional weight with it"
        findings.append(Finding(sentence, "remove the zenflow section", "zenflow_changes_weights"))
    return findings


def checkpointing(facts: Facts) -> list[Finding] | None:
    promised, seen = facts.promised.checkpointing, facts.observed.checkpointing
    if None in (promised, seen):
        return None
    if promised and not seen:
        sentence = f"Activation checkpointing is not active although {facts.source} asks for it"
        remedy = "call `model.gradient_checkpointing_enable()` before prepare, and leave the model in training mode"
        return [Finding(sentence, remedy, "P1-26")]
    return []
