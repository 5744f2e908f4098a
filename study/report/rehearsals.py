"""A rehearsal in words: the verdict, the parts of the peak, evaluation and saving, and what the script decided."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

from study.configs.oom.said import kept_output
from study.configs.pasted import own_loops
from study.configs.pasted.one_rank import that_may_hang
from study.configs.pasted.read import read
from study.core.gpus import GPUS
from study.core.text import UNKNOWN, binary_size, number_of, size
from study.known.findings import finding
from study.predict.front import reserve_bytes
from study.records.schema import Record
from study.records.sections import Observed
from study.rehearsal.on_gpu import OnGpu, on_gpu
from study.rehearsal.request import Answer, Failure, Moment, Request
from study.rehearsal.start import Tried

FITS = {"yes": "it fits", "only just": "it fits only just", "no": "it does not fit"}
GIB = 2**30
ALONE = "one process"
OUTPUTS = 0.05  # of a peak: what a script keeps from a step is told from there on


@dataclass(frozen=True)
class Peak:
    """Where a rank holds most, and what that consists of."""

    when: str
    parts: dict[str, int]

    @classmethod
    def of(cls, answer: Answer, device: OnGpu, parts_of_update: dict[str, int] | None) -> Self:
        """Return the peak: in the update that holds most, unless saving or evaluating holds more than all updates."""
        others = {"saving": device.saving, "evaluation": max(device.whole_evaluation or 0, device.evaluation or 0)}
        for kind, highest in others.items():
            if highest == device.peak > device.training:
                return cls(kind, largest([each for each in answer.moments if each.kind == kind]))
        return cls(f"step {answer.peaks.index(max(answer.peaks)) + 1}", parts_of_update or {})


def largest(moments: list[Moment]) -> dict[str, int]:
    """Return the parts of the moment that holds most."""
    return max((each.parts or {} for each in moments), key=lambda parts: sum(parts.values()))


@dataclass(frozen=True)
class Rehearsed:
    """What rank 0 of a script was seen to hold, and what that means on a GPU."""

    request: Request
    answer: Answer
    record: Record
    device: OnGpu
    peak: Peak

    @property
    def batch_of_peak(self) -> list[int]:
        """The largest micro-batch of the update that holds most. Where none was seen, the last that a loader gave."""
        answer = self.answer
        read = dict(enumerate(answer.batches_read)).get(answer.peaks.index(max(answer.peaks)), [])
        return read or answer.batch

    @classmethod
    def of(cls, request: Request, answer: Answer, record: Record) -> Self:
        gpu = GPUS[request.gpu] if request.gpu else None
        device = on_gpu(answer, request.ranks, record.observed.stage, gpu)
        peak = Peak.of(answer, device, record.memory.components.per_rank[0].at_peak)
        return cls(request, answer, record, device, peak)


def text_of(request: Request) -> str:
    return Path(request.script).read_text(encoding="utf-8", errors="replace")


# Packages that need a GPU to be installed, and how to rehearse without one.
WITHOUT = {
    "flash_?att": 'ask for attn_implementation="sdpa", which keeps as much',
    "xformers": "ask for PyTorch's own attention, which keeps as much",
    "bitsandbytes": 'take AdamW (optim="adamw_torch"), whose moments take 8 bytes of a parameter and not 2',
    "apex": "ask for PyTorch's fused AdamW",
    "transformer_?engine": "ask for bf16 in place of fp8",
    "liger": "leave Liger out; the logits that it never makes are counted then",
}


def lacking(message: str, yours: str) -> str:
    """Return that a package needs a GPU, and how to rehearse without. Empty for other packages."""
    plain = message.lower().replace("-", "_")
    remedy = next((remedy for name, remedy in WITHOUT.items() if re.search(name, plain)), None)
    if remedy is None:
        return ""
    end = "" if message.endswith(".") else "."
    return f"{end} It needs a GPU: it is not here, and {yours} may have it. To rehearse, {remedy}."


def ending(failure: Failure, request: Request) -> str:
    """Return how a script ended that did not reach its steps."""
    place = f" at {failure.where}" if failure.where else ""
    gpus = number_of(request.ranks, "GPUs")
    if failure.kind == "hang":
        return f"It hangs{place}, as it would on {gpus}: {failure.message}"
    if failure.kind != "script":
        more = lacking(failure.message, f"the machine of the {gpus}") if failure.kind == "missing" else ""
        return f"A rehearsal cannot go on{place}: {failure.message}{more}"
    if request.skips:  # what is left out may be what the script misses
        return f"It ends{place}, with --skip: {failure.message}"
    return f"It ends{place}, as it would on {gpus}: {failure.message}"


def verdict(of: Rehearsed) -> str:
    """Return what the rank holds at its peak, and whether that fits."""
    device, when, fits = of.device, of.peak.when, of.device.fits
    holds = f"Rank 0 of {of.request.ranks}, run alone (virtual), peaks at {size(device.peak)}"
    if of.request.gpu is None or fits is None:
        return f"{holds} in {when}.{on_cpu(of.answer)}"
    holds += f" ({binary_size(device.peak)}) in {when}"  # the units of a GPU
    gpu_bytes = GPUS[of.request.gpu].memory_bytes
    total = f"{gpu_bytes / GIB:.0f} GiB"
    if device.driver > gpu_bytes:
        reserved, outside = (f"{each / GIB:.1f} GiB" for each in (device.reserved, device.driver - device.reserved))
        more = f"PyTorch would reserve {reserved}, and the CUDA context and NCCL take {outside}."
        return f"{holds}, and needs more than {total}: {FITS[fits]}. {more}"
    shown = f"nvidia-smi would show {device.driver / GIB:.1f} of {total}"
    how = "as its tensors leave less than the" if fits == "no" else "with"
    kept = f", {how} {reserve_bytes(GPUS[of.request.gpu]) / GIB:.1f} GiB {KEPT}"
    return f"{holds}, and {shown}: {FITS[fits]}{kept}."


def one_update(of: Rehearsed) -> list[str]:
    """Return what the peak lacks if the script made one update: the optimizer had no moments before it."""
    moments = (of.record.memory.components.per_rank[0].after_step or {}).get("moments", 0)
    if of.answer.updates > 1:
        return []
    return [
        "The script ended after 1 update, before which its optimizer had no moments: a second one holds "
        f"{size(moments)} more. Its parts and mistakes are seen from the second on: give it more data."
    ]


# What no count of tensors has, as `advise` and `oom` keep it.
KEPT = "kept for context, NCCL and fragmentation"


def in_fp32(seen: Observed, script: str) -> list[str]:
    """Say so if no part of a step has 16 bits: most people do not mean it."""
    # FSDP computes in the type that it gathers: FSDP2's is in the record, FSDP1's is not.
    by_fsdp = (seen.fsdp or {}).get("gather_dtype") or "FullySharded" in (seen.wrapper or "")
    if seen.dtypes.get("weights") != "float32" or seen.autocast or by_fsdp:
        return []
    remedy = "`accelerate launch --mixed_precision bf16`, or bf16=True of a Trainer, asks for 16 bits"
    if ".backward(" in script and not re.search("(?i)accelerat|Trainer", script):  # nobody reads these
        remedy = '`torch.autocast("cuda", dtype=torch.bfloat16)` around the forward pass computes in 16 bits'
        if seen.stage is not None:
            remedy = '`"bf16": {"enabled": true}` in the DeepSpeed config asks for 16 bits'
    return [f"Your script trains in fp32: {remedy}."]


SEEN_AS = {"divided_again": "loss_divided_twice"}  # one mistake: its id in the text, and in the steps


def in_script(request: Request, seen: Observed, found: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the ids and remarks of what the script's text shows, beside what was `found` in its steps."""
    script = text_of(request)
    scripts = {Path(request.script): script}
    remarks = [("In the script", each) for each in own_loops.mistakes(read(script), scripts)]
    if request.ranks > 1:
        stage = seen.stage if seen.stage is not None else sharding(seen)
        may_hang = that_may_hang(scripts, None if stage == ALONE else stage)
        remarks += [("This line may hang when it is reached", each) for each in may_hang]
    for begins, each in remarks:
        if SEEN_AS.get(each.id, each.id) not in found:
            yield each.id, each.noted(begins)


def short(of: Rehearsed) -> list[str]:
    """Return that the sequences of the peak are far shorter than the script asks for, and how to rehearse full ones."""
    seen, most = of.answer.lengthened_to or of.answer.row_tokens, of.answer.max_length
    if not (seen and most and seen < SHORT * most):
        return []
    what = f"This peak is of sequences of at most {seen:,} tokens, and the script's max_length is {most:,}."
    return [f"{what} If you train on longer ones, --tokens {most} rehearses them."]


SHORT = 0.5  # of the script's own max_length: a choice


def longest_seen(of: Rehearsed) -> list[str]:
    """Return the largest micro-batch of the updates, as longer ones hold more, and whether it was lengthened."""
    if not of.answer.batches_read:
        return []
    shape = " x ".join(f"{size:,}" for size in largest_of(of.answer.batches_read))
    if of.answer.lengthened_to:
        why = "--tokens" if of.request.tokens else "the data set's longest row"
        so = f"from {of.answer.row_tokens:,} tokens to {of.answer.lengthened_to:,}, {why}"
        return [f"The largest micro-batch is {shape}: its sequences were lengthened {so}."]
    line = f"The largest micro-batch that it saw is {shape}: a larger one holds more."
    if of.answer.row_tokens < (of.request.tokens or 0):
        line += " --tokens lengthened none: it needs batches of input_ids."
    longest = of.answer.longest_row
    if longest and longest > max(largest_of(of.answer.batches_read)):
        line += f" The data set has a row of {longest:,} tokens. Give more --steps."
    return [line]


def largest_of(shapes: list[list[int]]) -> list[int]:
    return max(shapes, key=prod)


def ran_with(of: Rehearsed) -> list[str]:
    """Return which releases ran, and which default of theirs holds less than that of older ones."""
    answer = of.answer
    lines = [f"It ran {', '.join(f'{name} {release}' for name, release in answer.releases.items())}."]
    if answer.generates:
        lines.append("`generate` was not run: each answer has the most tokens, and its cache is not counted.")
    if answer.left_out:
        lines.append(f"Not installed here, and left out: {', '.join(answer.left_out)}.")
    for name, known in answer.built_in.items():
        what = f"The config of {name} could not be read here: it is that of the built-in {known}"
        lines.append(f"{what}, in fp32 unless the script gives a dtype.")
    if answer.loss_in_chunks:
        older = "an older TRL, for SFT before 1.7, makes whole ones unless asked (huggingface/trl#5846)"
        copies = prod(largest_of(answer.batches_read)) * (answer.vocabulary or 0) * 4
        each = f": {size(copies)} for each copy in fp32" if copies else ""
        lines.append(f"TRL computed the loss in chunks, and made no whole logits; {older}{each}.")
    return lines


def on_cpu(answer: Answer) -> str:
    """Return what a CPU holds and a GPU does not, where no kind of GPU is named."""
    if not answer.keeps_scores:
        return ""
    return " A CPU's kernels give that; its attention has dropout, and a CPU keeps the scores: --gpu leaves them out."


def parts_of_peak(of: Rehearsed) -> list[str]:
    parts = sorted(of.peak.parts.items(), key=lambda part: -part[1])
    is_early = of.answer.updates > of.request.steps  # parts of evaluation and saving are looked at after the updates
    if not parts and is_early and of.peak.when in ("evaluation", "saving"):
        return [f"What the peak consists of was not seen: this {of.peak.when} came before the last update."]
    if not parts and of.answer.updates > 1:
        updates = number_of(of.answer.updates, "updates")
        return [f"What the peak consists of was not seen: the script made {updates}, and another one shows it."]
    if not parts:
        return []
    lines = ["At the peak: " + ", ".join(f"{name.replace('_', ' ')} {size(held)}" for name, held in parts) + "."]
    if of.device.host:
        lines.append(f"The host keeps {size(of.device.host)} of these for this rank.")
    if of.record.observed.wrapper == "DistributedDataParallel" and of.peak.parts.get("buckets"):
        lines.append(finding("ddp_buckets_beside").said)
    batches = 2 * of.answer.batch_bytes  # Accelerate's loader is one ahead
    kept = of.record.memory.components.per_rank[0].after_step.get("activations", 0) - batches
    if kept > OUTPUTS * of.device.peak:
        line = kept_output(text_of(of.request))
        what = f"what `{line.strip()}` gives" if line else "a model's outputs"
        lines.append(
            f"When the optimizer steps, {size(kept)} of activations are still held, such as {what}. Unless "
            "the script deletes them, the next forward pass holds them too. `study estimate` does not count them."
        )
    return lines


def evaluation(of: Rehearsed) -> list[str]:
    """Return what evaluating holds, or that the script did not come there."""
    if of.device.whole_evaluation:
        whole = size(of.device.whole_evaluation)
        left = max(each.batches_left or 0 for each in of.answer.moments)
        return [f"Evaluation peaks at {whole} if its last {left} batches leave as much behind as the first."]
    if of.device.evaluation is not None:
        # study/rehearsal/moments.py ends loaders after 4.
        not_counted = "predictions that are kept over more batches are not counted"
        peak = f"Evaluation peaks at {size(of.device.evaluation)}."
        return [f"{peak} At most 4 batches of a loader are run: {not_counted}."]
    if of.request.evaluate and not of.answer.batches:
        return ["Whether it evaluated is not known: that is seen by the batches of a DataLoader, and it has none."]
    if of.request.evaluate:
        return [f"It did not evaluate in its first {number_of(of.answer.updates, 'updates')}. {LATER}"]
    return []


LATER = "If it does later, give more --steps."


def saving(of: Rehearsed) -> list[str]:
    """Return what saving holds, or that the script did not come there."""
    if of.device.saving is not None:
        return [f"Saving peaks at {size(of.device.saving)}."]
    if of.request.save:
        return [f"It did not save in its first {number_of(of.answer.updates, 'updates')}. {LATER}"]
    return []


# --- the script with other arms


def other_arm(fits: str | None, rows: list[Tried]) -> list[str]:
    """Return which other arm would fit, or how to hear that, if the script's own does not."""
    if fits != "no":
        return []
    if not rows:
        return ["`--try zero2,zero3,zero3_cpu,fsdp2` rehearses it with other arms."]
    fitting = [row for row in rows if row.fits in ("yes", "only just")]
    if not fitting:
        return []
    least = min(fitting, key=lambda row: row.peak_bytes or 0)
    return [f"With {least.arm} {FITS[least.fits or '']}: it peaks at {size(least.peak_bytes or 0)}."]


def row_of(tried: Tried) -> dict[str, str]:
    return {
        "with": tried.arm,
        "peak": size(tried.peak_bytes) if tried.peak_bytes else UNKNOWN,
        "nvidia-smi": f"{tried.driver_bytes / GIB:.1f} GiB" if tried.driver_bytes and tried.fits else UNKNOWN,
        "": tried.error or FITS.get(tried.fits or "", ""),
    }


# --- what the prepared objects are, which no flag has said


def decided(of: Rehearsed) -> str:
    seen = of.record.observed
    words = [sharding(seen), *offloading(seen), *arithmetic(seen), *training(seen), *step(of)]
    return f"Your script decided: {'; '.join(words)}."


def sharding(seen: Observed) -> str:
    if seen.stage is not None:
        return f"ZeRO stage {seen.stage}"
    if seen.fsdp:
        return "FSDP2"
    if "FullySharded" in (seen.wrapper or ""):
        return "FSDP1"
    return seen.wrapper or ALONE


def offloading(seen: Observed) -> list[str]:
    return [f"{what} offloaded to {home}" for what, home in seen.offloads.items()]


def arithmetic(seen: Observed) -> list[str]:
    """Return the types of numbers, and the optimizer."""
    dtypes = {name: (kinds or "").replace(" ", " and ") for name, kinds in seen.dtypes.items()}
    kinds = [f"{name} in {dtypes[name]}" for name in ("weights", "master") if dtypes.get(name)]
    words = [", ".join(kinds)]
    if seen.autocast:
        words.append(f"autocast {seen.autocast}")
    if gathered := (seen.fsdp or {}).get("gather_dtype"):
        words.append(f"gathered in {gathered}")
    fused = ", fused" if (seen.optimizer_settings or {}).get("fused") else ""
    return [*words, f"{seen.optimizer}{fused}"]


def training(seen: Observed) -> list[str]:
    """Return what trains, and how the model computes."""
    words = []
    if seen.parameters and seen.trained_parameters not in (None, seen.parameters):
        words.append(f"{seen.trained_parameters:,} of {seen.parameters:,} parameters train")
    if seen.checkpointing:
        words.append("activations are recomputed")
    if seen.attention:
        stand_in = ", by PyTorch's in its place" if seen.attention.startswith("flash") else ""
        words.append(f"attention {seen.attention}{stand_in}")
    return words


def step(of: Rehearsed) -> list[str]:
    """Return the sequences of a step, and the clipping."""
    seen, words = of.record.observed, []
    if batch := of.batch_of_peak:
        shape = " x ".join(map(str, batch))
        passes = number_of(seen.accumulation or 1, "micro-batches")
        words.append(f"batch {shape}, {passes}, {number_of(of.request.ranks, 'ranks')}")
    if seen.clipping is not None:
        words.append(f"clipping {seen.clipping:g}" if seen.clipping else "no clipping by the library")
    return words
