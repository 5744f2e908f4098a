"""An advice in words."""

import json
from contextlib import suppress
from dataclasses import asdict, replace
from math import ceil

from study.core import arms
from study.core.errors import Stop
from study.core.gpus import GPUS
from study.core.recipes import RECIPES
from study.core.text import binary_size, count, number_of, size, times
from study.known.findings import finding
from study.predict.front import (
    ANY_GPU,
    MISS,
    MORE_ROWS,
    SHARING,
    Advice,
    Prediction,
    Question,
    Row,
    Training,
    Transformer,
    experts,
    headroom_bytes,
    loading_bytes,
    node_size,
    training_of,
    with_buckets,
    with_more_rows,
    zero_of,
)
from study.predict.front import advise as recommend
from study.report.reasons import by_precision, reason_for, why_second
from study.report.rows import Unit, amount, computes_in, of_card, only_just, seconds, unit_of, use, way, why_tight

NF4 = 'load_in_4bit=True, bnb_4bit_quant_type="nf4"'
OF_BITS = {"nf4": NF4, "nf4_double": f"{NF4}, bnb_4bit_use_double_quant=True", "int8": "load_in_8bit=True"}
ALIKE = 0.05  # of a peak: less apart is less than predictions can tell


def enough(advice: Advice, batch: int | None) -> str:
    """`Enough: 4 x A6000. Without offloading 3 fit only just. With offloading 2 are enough.`"""
    question, found = advice.question, advice.question.gpus
    text = f"Enough: {found} x {question.gpu.kind}"
    offloads = bool(advice.choice and advice.choice.offloads and not advice.keeps_with_room)
    if offloads:
        text += " with offloading"
    if batch not in (None, question.batch):
        text += f", with --batch {question.batch}"
    if advice.only_just and (offloads or advice.only_just != found):
        text += f". Without offloading {advice.only_just} {'fits' if advice.only_just == 1 else 'fit'} only just"
    if advice.with_offloading and advice.with_offloading < found:
        text += f". With offloading {advice.with_offloading} {'is' if advice.with_offloading == 1 else 'are'} enough"
    return f"{text}."


def in_words(advice: Advice) -> list[str]:
    """Return which arm to use, one alternative, and why; and what it warns of."""
    question = advice.question
    choice, unit = advice.choice, unit_of(advice)
    if choice is None:
        closest = _closest(advice)
        nothing = f"Nothing fits on {question.gpus} x {question.gpu.kind}: {_lacks(question, closest)}."
        long = _of_sequences(question, closest)
        return [nothing, *long, *_cast(question, unit), *spared(advice), *([] if long else _smaller(question))]
    # --- what to use
    lines = [f"Use {use(choice, question, unit)}."]
    if choice.is_tight:
        lines.append(only_just(choice.gpu, choice.peak_bytes, choice.driver_bytes or 0))
    if other := advice.alternative:
        lines.append(f"Alternative: {use(other, question, unit)}; {why_second(other, choice)}.")
    in_ddp = [row for row in (choice, advice.alternative) if row and row.arm == "ddp"]
    lines += [note for row in in_ddp for note in bucket_note(training_of(question, row))]
    lines += spared(advice)
    all_offload = all(row.offloads for row in advice.rows if row.fits)
    if all_offload and question.gpus > 1 and not advice.ways_out:
        lines.append(finding("parallelism_not_tried").said)
    # --- why, how to train so, what would need less, and what comes before the first step
    lines += [
        reason_for(advice, choice) + by_precision(advice, choice),
        start(choice, question),
    ]
    if question.model.is_partly_frozen and choice.offloads:
        lines += _smaller(question)
    if choice.limit == "launching":
        longer = times(with_more_rows(question, choice).seconds / choice.seconds)
        batch = MORE_ROWS * question.batch
        lines.append(finding("launch_bound", more=MORE_ROWS, batch=batch, longer=longer).said)
    # Published weights have 16 bits, and recipes with fp32 weights widen them.
    needed_bytes = loading_bytes(question.model, question.local, RECIPES[choice.precision].weight_bytes)
    if needed_bytes > question.host_memory_bytes:
        has = amount(question.host_memory_bytes)
        lines.append(finding("loading_fills_the_host", needed=amount(needed_bytes), has=has).said)
    return [*lines, *_cast(question, unit)]


def _cast(question: Question, unit: Unit) -> list[str]:
    """Return the choice with the 16-bit weights that DeepSpeed usually has, if autocast was asked for."""
    if question.precision is None or not RECIPES[question.precision].autocast:
        return []
    asked = replace(question, precision="bf16_cast")
    choice = recommend(asked).choice
    then = f"The choice would be {use(choice, asked, unit)}." if choice else "Nothing fits with it either."
    return [f"{finding('autocast_keeps_fp32_weights', precision=question.precision).said} {then}"]


def start(choice: Row, question: Question) -> str:
    """Return the command that starts a script as it was predicted, and what the script has to say besides.

    The files of arms leave the precision to the command.
    """
    launch = f"accelerate launch --config_file {arms.load_arm(choice.arm).path.relative_to(arms.ROOT)}"
    nodes = question.gpus // question.local
    if nodes > 1:
        launch += f" --num_machines {nodes} --machine_rank 0"
    if question.gpus > 1:
        launch += f" --num_processes {question.gpus}"
    if nodes > 1:
        launch += " --rdzv_backend c10d --main_process_ip FIRST_MACHINE --main_process_port 29500"
        launch += " --deepspeed_multinode_launcher standard" if arms.load_arm(choice.arm).deepspeed else ""
    rows = number_of(choice.micro_batch, question.model.row_names)
    batch = f"a batch of {rows} and gradient_accumulation_steps={choice.accumulation}"
    if question.quantized:
        batch += f", and `BitsAndBytesConfig({OF_BITS[question.quantized]})`"
    precision, more = mixed_precision(choice), ""
    if precision != "no":
        launch += f" --mixed_precision {precision}"
        more = " Without --mixed_precision a model in fp32 trains in fp32." + of_trainer(choice, question, precision)
    elif autocast := RECIPES[choice.precision].autocast:
        dtype = autocast if choice.gpu.has_bf16 else "float16"
        section = json.dumps({"torch_autocast": {"enabled": True, "dtype": dtype}})[1:-1]
        more = f" Its DeepSpeed JSON has `{section}`."
    elif choice.precision != "fp32" and not question.quantized:
        batch += ", and weights in 16 bits"
    if nodes > 1:
        more += f" Start it on each of {nodes} machines, with the address of the first for FIRST_MACHINE, and its own"
        more += ' --machine_rank: GUIDE.md, "Several machines".'
    return f"Start it: `{launch} train.py`, with {batch} in your script.{more}{besides(choice, question)}"


# As a script makes them, by the names of `--optimizer`.
OPTIMIZERS = {
    "adamw": "`AdamW(fused=True)`",
    "foreach": "`AdamW(foreach=True)`",
    "single_tensor": "`AdamW(foreach=False)`",
    "adamw_8bit": "`AdamW8bit` of bitsandbytes",
    "sgd": "SGD with momentum",
    "adafactor": "Adafactor",
    "muon": "Muon",
}


def besides(choice: Row, question: Question) -> str:
    """Return what was predicted and is said by neither the command nor the batch."""
    arm = arms.load_arm(choice.arm)
    # With offloading Accelerate and the Trainer make DeepSpeedCPUAdam of it.
    is_made = choice.offloads and arm.deepspeed and question.optimizer in ("adamw", "foreach", "single_tensor")
    synced = f"GradientAccumulationPlugin(num_steps={choice.accumulation}, sync_each_batch=True)"
    parts = {
        "activation checkpointing": choice.checkpointing,
        f"`{synced}`": choice.sync_each_batch,
        OPTIMIZERS[question.optimizer]: not is_made,
        "its steps within the backward pass": question.optimizer_in_backward,
        "a loss in pieces, as Liger's": question.chunked_loss,
        f"{question.attention_kernel} attention": question.attention_kernel != "sdpa",
        "`torch.compile`": question.compiled,
    }
    counted = ", ".join(part for part, is_on in parts.items() if is_on)
    said = f" Counted so, and yours to set: {counted}." if counted else ""
    predicted = _zero(choice, question)
    if changed := {name: value for name, value in predicted.items() if zero_of(arm)[name] != value}:
        said += f" The arm's JSON is for small models on few ranks. Write there `{json.dumps(changed)[1:-1]}`."
    if arm.replicas > 1:
        groups = {"replicate": question.gpus // question.local, "shard": question.local}
        keys = " and ".join(f"`parallelism_config_dp_{part}_size: {ranks}`" for part, ranks in groups.items())
        said += f" Write in the arm's yaml {keys}."
    return said


def _zero(choice: Row, question: Question) -> dict:
    """Return the section `zero_optimization` that was predicted: with such buckets, and groups as large as nodes."""
    zero = zero_of(with_buckets(arms.load_arm(choice.arm), choice.bucket_elements))
    return zero | ({"zero_hpz_partition_size": question.local} if "zero_hpz_partition_size" in zero else {})


def of_trainer(choice: Row, question: Question, precision: str) -> str:
    """Return what the DeepSpeed JSON of a Trainer says of this arm; empty for an arm without DeepSpeed."""
    if arms.load_arm(choice.arm).deepspeed is None:
        return ""
    config = json.dumps({"zero_optimization": _zero(choice, question), precision: {"enabled": True}})
    return f" A Trainer's DeepSpeed JSON has `{config[1:-1]}` instead."


def mixed_precision(row: Row) -> str:
    """Return the precision of a row as Accelerate names it."""
    arm = arms.load_arm(row.arm)
    casts = arm.deepspeed is not None or arm.fsdp is not None  # others get bf16 weights from the script alone
    is_autocast = RECIPES[row.precision].autocast and not arm.deepspeed  # with DeepSpeed it casts the weights
    if is_autocast or (row.precision == "bf16_cast" and casts):
        return computes_in(row.precision, row.gpu)
    return "no"


PRICES = {
    "chunked_loss": "it takes a kernel such as Liger's",
    "adamw_8bit": "moments of 8 bits, by bitsandbytes, are coarser",
    SHARING: "pairs of ranks share each sequence (DeepSpeed Ulysses), and its seconds were never compared with others'",
    "bf16_pure": "weights in bf16 throughout round small updates away",
}


def spared(advice: Advice) -> list[str]:
    """What keeps all on the GPUs, or fits at all, and the price."""
    lines, unit = [], unit_of(advice)
    for option, row in advice.ways_out:
        price = [words for name, words in PRICES.items() if name in f"{option} {row.arm}".replace("-", "_")]
        just = f", only just ({why_tight(row)})" if row.is_tight else ""
        parts = [*filter(None, [option]), way(row), of_card(row.peak_bytes, row.gpu) + just]
        if row.offloads:
            parts.append(f"{amount(row.host_bytes)} of a node's host memory")
        if row.arm != SHARING:
            parts.append(f"{seconds(row, unit)} per step")
        said = "With" if row.offloads else "Without"
        lines.append(f"{said} offloading: {', '.join(parts)}{''.join(f'; {each}' for each in price)}.")
    return lines


def in_json(advice: Advice) -> dict:
    """All that was compared. A GPU is its name, and `computes_in` what a precision is there."""
    said = asdict(advice)
    others = [row for _, row in said["ways_out"]]
    for each in (said["question"], said["choice"], said["alternative"], *said["rows"], *others):
        if each:
            each["gpu"] = advice.question.gpu.kind
            if precision := each["precision"]:
                each["computes_in"] = computes_in(precision, advice.question.gpu)
    return said


def shape_note(model: Transformer, params: float | None) -> list[str]:
    """Return which shape was taken for a number of parameters: much of the memory is its vocabulary's."""
    if params is None:
        return []
    vocabulary = f"with a vocabulary of {model.look.vocabulary:,} tokens"
    shape = f"{model.name} ({count(model.parameters)})"
    asked = f"Shape taken for {count(params)} parameters: {shape}, {vocabulary}"
    return [f"{asked}. Every number is of this shape. Yours: --model and a folder with its config.json."]


def _smaller(question: Question) -> list[str]:
    if not question.model.is_partly_frozen:
        return [finding("adapters_need_less").said]
    return [] if question.quantized else [finding("four_bits_need_less").said]


def recompute_note(checkpointing: object, model: Transformer, stage: int | None) -> list[str]:
    if not checkpointing or not model.is_partly_frozen:
        return []
    return [finding("recompute_frozen_stage_3" if stage == 3 else "recompute_frozen").said]


def bucket_note(training: Training) -> list[str]:
    """Return what a script of its own needs, whose DDP keeps gradients beside its buckets. Empty: no more."""
    beside = Prediction.of(replace(training, loop=replace(training.loop, bucket_view=False))).memory.peak_bytes
    if not training.placement.in_ddp or size(beside) == size(Prediction.of(training).memory.peak_bytes):
        return []
    return [finding("ddp_keeps_gradients_twice", needs=f"{size(beside)} ({binary_size(beside)})").said]


def gradients_note(training: Training) -> list[str]:
    """Return that whole gradients of FSDP2 stay between micro-batches, and what is needed if they do not."""
    fsdp = training.placement.fsdp
    if fsdp is None or fsdp.sync_each_batch or training.batch.passes == 1:
        return []
    placement = replace(training.placement, fsdp=fsdp._replace(sync_each_batch=True))
    synced_bytes = Prediction.of(replace(training, placement=placement)).memory.peak_bytes
    with_it = f" With --sync-each-batch it needs {size(synced_bytes)} ({binary_size(synced_bytes)})."
    return [finding("fsdp2_whole_gradients").said + with_it]


def stages_note(training: Training) -> list[str]:
    """Return that one rank divides nothing, that stages 1 and 2 need about as much, or stage 3 no less than stage 2.

    Stages 1 and 2 are alike if the update decides.
    """
    placement = training.placement
    if placement.ranks == 1 and (placement.deepspeed or placement.fsdp):
        return [finding("one_rank_divides_nothing").said]
    if placement.stage not in (1, 2, 3) or placement.ranks == 1 or placement.deepspeed is None:
        return []
    estimates = {}
    for stage in {2, 3} if placement.stage == 3 else {1, 2}:
        config = placement.deepspeed | {"zero_optimization": placement.zero | {"stage": stage}}
        of_stage = replace(training, placement=replace(placement, deepspeed=config))
        estimates[stage] = Prediction.of(of_stage).memory
    if placement.stage == 3:
        two, three = estimates[2].peak_bytes, estimates[3].peak_bytes
        # In an update nothing is gathered. Of what is offloaded each stage divides something else.
        no_less = three >= two and estimates[3].peak_when != "update" and not estimates[3].on_host
        return [finding("stage_3_holds_no_less").said + f" With zero2 a rank needs {size(two)}."] if no_less else []
    one, two = estimates[1].peak_bytes, estimates[2].peak_bytes
    if estimates[2].peak_when != "update" or abs(one / two - 1) > ALIKE:
        return []
    other = 3 - placement.stage
    return [finding("stages_1_and_2_alike", other=other, needs=size(estimates[other].peak_bytes)).said]


def attention_note(model: Transformer, kernel: str) -> list[str]:
    """Return that eager attention is taken, if somebody may expect another."""
    note = model.attention_note(kernel)
    return [f"Taken: --attention-kernel eager ({note})."] if note else []


def experts_note(training: Training) -> list[str]:
    """Return what experts need with stage 3; how unequally FSDP2 divides them, if that is much of the model."""
    if training.placement.stage == 3 and experts(training.model):
        return [finding("experts_are_leaf_modules").said]
    fsdp, ranks = training.placement.fsdp, training.placement.sharing_ranks
    if fsdp is None or not fsdp.by_accelerate:
        return []
    padded = {
        each: (ceil(each.shape[0] / ranks) * ranks / each.shape[0] - 1) * each.elements for each in training.tensors
    }
    if sum(padded.values()) < MISS * sum(each.elements for each in padded):
        return []
    rows = max(padded, key=padded.__getitem__).shape[0]
    most = ceil(rows / ranks)
    idle = ranks - ceil(rows / most)
    return [
        finding("fsdp2_divides_experts", experts=rows, most=number_of(most, "experts"), idle=idle, ranks=ranks).said
    ]


def nodes_note(arm: arms.Arm, ranks: int) -> list[str]:
    """Return how large nodes are taken, if an arm's groups are nodes and nobody says it."""
    per_node = node_size(ranks, GPUS[ANY_GPU], None)
    if not arm.divides_ranks or ranks == per_node:
        return []
    return [f"Taken: nodes of {per_node} GPUs (study estimate --gpus-per-node takes others)."]


def _closest(advice: Advice) -> Row:
    """Return the arm that comes closest to fitting."""
    # Arms that fit on the GPUs lack host memory alone: the one with the least comes closest.
    if on_host := [row for row in advice.rows if row.limit == "host memory"]:
        return min(on_host, key=lambda row: row.host_bytes)
    return max(advice.rows, key=lambda row: row.headroom_bytes)


def _lacks(question: Question, row: Row) -> str:
    """Name an arm, and the memory that it lacks."""
    lacks_bytes, where = -row.headroom_bytes, "on each GPU"
    if row.limit == "host memory":
        has_bytes = question.host_memory_bytes
        lacks_bytes = row.host_bytes - has_bytes
        where = f"of host memory, if a node has {amount(has_bytes)} (--host-memory)"
    return f"{row.arm} comes closest, and needs {amount(lacks_bytes)} more {where}"


def _of_sequences(question: Question, row: Row) -> list[str]:
    """Say so if the sequences of one micro-batch do not fit, whatever is done with the model states."""
    needs_bytes = _sequence_bytes(question, row)
    if needs_bytes <= headroom_bytes(row.gpu, 0):
        return []
    logits = ""
    with suppress(Stop):  # a loss in pieces is not traced of every model where PyTorch is missing
        in_pieces = Prediction.of(training_of(replace(question, chunked_loss=True), row)).memory
        if not question.chunked_loss:
            logits = f", and {amount(row.peak_bytes - in_pieces.peak_bytes)} of these are whole logits and their loss"
    rows = number_of(row.micro_batch, question.model.row_names)
    return [finding("sequences_fill_the_gpu", rows=rows, needs=amount(needs_bytes), logits=logits).said]


def _sequence_bytes(question: Question, row: Row) -> int:
    parts = Prediction.of(training_of(question, row)).memory.at_peak
    return parts.get("activations", 0) + parts.get("temporaries", 0)


def no_way_out(advice: Advice) -> list[str]:
    """Return which parallelism is left where nothing else fits."""
    if advice.ways_out:
        return []
    row = _closest(advice)
    of_sequence, room = _sequence_bytes(advice.question, row), headroom_bytes(row.gpu, 0)
    fits = {"needs_sequence_parallelism": of_sequence, "needs_other_parallelism": row.peak_bytes - of_sequence}
    needed = [id for id, needs_bytes in fits.items() if needs_bytes > room]
    return [finding(id).said for id in needed or ["needs_other_parallelism"]]
