"""Explain an error about memory: match its size with what a training allocates, and rank the causes."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from study.configs.oom.causes import WIDTHS, Cause, causes, hinted_causes, makes_moments, rows
from study.configs.oom.reading import SMALL, Asked, OomError
from study.configs.oom.said import HALF, LAYERS_DIVIDED
from study.configs.oom.training import Described, KnownTraining
from study.core.text import binary_size, number_of
from study.predict.front import Transformer, Wanted, papers

FILLING = 0.7  # of a GPU: activations, buckets and the CUDA context want the rest
MOST_POWER = 11  # of two: 1,024 ranks
EXACT = 1.02  # between the largest and the smallest size that a message may mean
# Frames that tell how wide an element is: the head makes logits in the type of its weights, and losses cast them.
FROM_THE_HEAD = re.compile(r"\blm_head\(")
IN_FP32 = re.compile(r"logits\.float\(\)")
IN_AN_MLP = re.compile(r"mlp\.|down_proj|up_proj|act_fn|F\.gelu|F\.silu")
# What configs call the dropout of attention, and the families that have one by transformers' defaults.
DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout_rate")
DROP_BY_DEFAULT = ("bert", "deberta-v2", "gpt2", "gpt_bigcode", "t5")


@dataclass(frozen=True)
class Allocation:
    """What a training may ask for in one piece. One with something that nobody says has no elements."""

    cause: str  # that it means
    elements: float
    words: str  # the elements, as a person writes them
    widths: Sequence[float] = ()  # bytes that an element may have, if the cause does not say it


def explain(
    error: OomError, wanted: Wanted, given: Described, stated: dict[str, Any] | None = None
) -> tuple[list[Cause], KnownTraining]:
    """Return the causes of an error, and what is known of the training. Raise Stop if a flag is wrong.

    `stated` is what the text of the error says of its training.
    """
    training = KnownTraining.of(wanted, given, stated)
    sizes = _sizes(error, training)
    states = _filling(error, training)
    return causes(error, sizes, training.shards_weights, states, training.has_adapters), training


def fits_no_tensor(error: OomError, training: KnownTraining) -> str:
    """Say so if a size is that of nothing that is known of a training. Empty: it is, or too little is known."""
    is_known = training.arm and training.ranks and training.rows * training.sequence
    if (
        not training.model
        or not is_known
        or LAYERS_DIVIDED in training.settings
        or error.asked.high <= SMALL
        or _sizes(error, training)
    ):
        return ""
    return (
        f"{error.asked.text} is the size of no tensor of {training.model.name} that is known here with what was given."
    )


def _filling(error: OomError, training: KnownTraining) -> str:
    """Return what the model states of a rank take, if that is most of the GPU; empty if not, or if it is not known."""
    stage, given = papers.STAGES.get(training.arm), training.described
    total_bytes = error.total or training.gpu_bytes
    if stage is None or not (total_bytes and training.ranks) or training.has_adapters:
        return ""
    precision, optimizer = given.precision or "bf16_cast", given.optimizer or "adamw"
    held = sum(papers.states_bytes(training.trained, stage, training.ranks, precision, optimizer).values())
    # Where a frame names another cause, it is none of them: ZeRO makes all states before any pass.
    hinted = {*hinted_causes(error)}
    is_of_states = hinted <= {"oom-optimizer", "oom-weights"} and (hinted or error.frames == [error.context])
    is_too_large = held > total_bytes and is_of_states and not steps_ran(error, training)
    # Where less is allocated, they are not there yet, or are others than predicted.
    if is_too_large or FILLING * total_bytes < held <= (error.allocated or held):
        kind = f"in {given.precision or 'mixed precision'} with {given.optimizer or 'AdamW'}"
        return f"{training.arm} on {training.ranks} ranks holds {binary_size(held)} before any activation, {kind}"
    return ""


def steps_ran(error: OomError, training: KnownTraining) -> bool:
    """Whether the log counts more than the micro-batches of one step, so that the peak of a step had room."""
    passes = training.described.accumulation or 1
    return training.settings.get("counted", 0) > passes and not makes_moments(error)


def _sizes(error: OomError, training: KnownTraining) -> dict[str, str]:
    """Return by cause what has the asked size, as a sentence begins."""
    sizes: dict[str, str] = {}
    if LAYERS_DIVIDED in training.settings:  # no size is that of a whole tensor
        return sizes
    if moment := _moment(error, training):
        return {moment.cause: f"{error.asked.text} = {moment.words}: "}
    for each in _allocations(training, error):
        for element_bytes in each.widths or widths(each.cause, error, training):
            if error.asked.fits(each.elements * element_bytes):
                is_open = element_bytes == 4 and _is_in_an_mlp(each.cause, error) and not training.products
                half = ", or twice as many tokens in 16 bits" if is_open else ""
                sizes.setdefault(each.cause, f"{error.asked.text} = {each.words} x {element_bytes} bytes{half}: ")
    # The guess is for what nothing else explains. But 8,192 is a usual length, and twice the width of many 7B models.
    has_tokens = training.rows * training.sequence > 0
    if {*sizes} - {"oom-padded", *(() if has_tokens else ("oom-embeddings",))}:
        sizes.pop("oom-padded", None)
    if other := ranks_that_share(error, training):
        alone = f"{number_of(other, 'ranks')}, and not by {training.ranks}"
        factors = f"{training.trained:,} parameters x 4 bytes, shared by {alone}"
        sizes["oom-other-ranks"] = f"{error.asked.text} = {factors}: "
    return sizes


def _moment(error: OomError, training: KnownTraining) -> Allocation | None:
    """Return what PyTorch's optimizer makes for one weight, of this rank's part of it. None: the size is no such."""
    ranks = training.ranks if training.arm.startswith("fsdp") else 1
    is_in_update = "oom-optimizer" in hinted_causes(error)
    is_of_one = training.arm in ("ddp", "single") or training.arm.startswith("fsdp")
    if not (is_in_update and is_of_one and training.model and training.ranks):
        return None
    of_ranks = f" / {ranks} ranks" if ranks > 1 else ""
    # FSDP2 divides the rows of each weight, and FSDP1 a unit as one vector.
    parts = [
        (ceil(each.shape[0] / ranks) * prod(each.shape[1:]), f"{_sides(each.shape)} of {each.name}")
        for each in training.model.tensors
        if each.trains
    ]
    parts += [(ceil(each.elements / ranks), each.words) for each in _of_units(training, training.model)]
    for width in WIDTHS:
        for elements, words in parts:
            if error.asked.fits(elements * width):
                return Allocation("oom-optimizer", elements, f"{words} x {width} bytes{of_ranks}")
    return _whole_moment(error, training.model, ranks) if ranks > 1 and makes_moments(error) else None


def _whole_moment(error: OomError, model: Transformer, ranks: int) -> Allocation | None:
    """Return which whole weight a moment of the first update is of, where FSDP should divide it."""
    trained = [tensor for tensor in model.tensors if tensor.trains]
    blocks = Counter[str]()
    for tensor in trained:
        blocks[tensor.block] += tensor.elements
    for tensor in trained:
        # FSDP1 divides a unit as one vector: a rank's part of it may hold a small weight whole.
        if tensor.elements * ranks <= blocks[tensor.block]:
            continue
        for width in WIDTHS:
            if error.asked.fits(tensor.elements * width):
                words = f"{_sides(tensor.shape)} of {tensor.name} x {width} bytes, and not divided by {ranks}"
                return Allocation("oom-not-divided", tensor.elements, words)
    return None


def widths(cause: str, error: OomError, training: KnownTraining) -> Sequence[float]:
    """Return the bytes that an element may have: fewer where the text says how they are computed."""
    if training.products in HALF and _is_in_an_mlp(cause, error):
        return (2,)
    if cause in ("oom-logits", "oom-padded"):
        if FROM_THE_HEAD.search(error.traceback) and training.products != "fp32":
            return (2,)
        if IN_FP32.search(error.traceback):
            return (4,)
    if training.products == "fp32" and cause in ("oom-logits", "oom-padded", "oom-activations"):
        return (4,)
    return rows()[cause].get("widths", WIDTHS)


def _is_in_an_mlp(cause: str, error: OomError) -> bool:
    return cause == "oom-activations" and bool(IN_AN_MLP.search(error.traceback))


def ranks_that_share(error: OomError, training: KnownTraining) -> int | None:
    """Return by how many ranks an fp32 state of ZeRO with the asked size is shared, if not by those that were given.

    None: by that number, or by no power of two. A state of 16 bits that is shared by half as many is as large. A size
    that the message rounds much is near some share of almost any model.
    """
    if not training.arm.startswith("zero") or not training.ranks or error.asked.high > EXACT * error.asked.low:
        return None
    # A whole weight of 32 or 16 bits is as large as what one or two ranks share.
    for power in range(0 if "oom-optimizer" in hinted_causes(error) else 2, MOST_POWER):
        number = 2**power
        if error.asked.fits(4 * training.trained / number) and number not in (training.ranks, 2 * training.ranks):
            return number
    return None


def _allocations(training: KnownTraining, error: OomError) -> Iterator[Allocation]:
    yield from _of_tokens(training)
    yield from _of_attention(training, error)
    yield from _of_other_tokens(training, error)
    for name, elements in training.buckets.items():
        yield Allocation("oom-buckets", elements, f"{elements:,.0f} elements of {name}")
    if training.model:
        yield from _of_optimizer(training)
        yield from _of_words(training, training.model)
        yield from _of_units(training, training.model)
        yield from _of_weights(training, training.model)


def _of_tokens(training: KnownTraining) -> Iterator[Allocation]:
    tokens = training.rows * training.sequence
    yield Allocation("oom-logits", tokens * training.vocabulary, f"{tokens:,} tokens x {training.vocabulary:,}")
    for width in (training.intermediate, training.hidden):
        yield Allocation("oom-activations", tokens * width, f"{tokens:,} tokens x {width:,}")


def _of_attention(training: KnownTraining, error: OomError) -> Iterator[Allocation]:
    """Yield a mask, which has no heads, and what attention that is written out makes for each head.

    A mask may be of bools. Scores are of no byte, but one remembers which were dropped, if the model drops any.
    """
    kernel, model = training.described.attention_kernel or "sdpa", training.model
    is_written_out = "oom-attention" in hinted_causes(error) or (model and model.attention_taken(kernel) == "eager")
    sequences, pairs = number_of(training.rows, "sequences"), f"{training.sequence:,} x {training.sequence:,} tokens"
    elements, scores = training.rows * training.sequence**2, (4,) if training.products == "fp32" else WIDTHS
    if is_written_out or not kernel.startswith("flash"):  # it reads which tokens are padding, and no pairs
        yield Allocation("oom-attention", elements, f"{sequences} x {pairs}", (*scores, 1))
    if model and is_written_out:
        heads = training.side("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads")
        words = f"{sequences} x {number_of(heads, 'heads')} x {pairs}"
        yield Allocation("oom-attention", elements * heads, words, (*scores, 1) if _drops_attention(model) else scores)


def _drops_attention(model: Transformer) -> bool:
    """Whether a training drops some of what tokens attend to, as far as the config or its family says it."""
    if model.dropout is not None:
        return model.dropout > 0
    said = [model.dimensions[name] for name in DROPOUTS if name in model.dimensions]
    return any(said) if said else model.dimensions.get("model_type") in DROP_BY_DEFAULT


def tokens_of_logits(error: OomError, training: KnownTraining) -> int | None:
    """Return the number of tokens whose logits have the asked size, if it is another than was given.

    They are in fp32 unless the head's own product makes them.

    Only thousands count, as almost any size is some number of tokens. None: there is no such number, or nobody gave
    the micro-batch.
    """
    given = training.rows * training.sequence
    token_bytes = max(widths("oom-logits", error, training)) * training.vocabulary
    tokens = _thousands(error.asked, token_bytes) if training.rows and token_bytes else 0
    return tokens if tokens not in (0, given) and error.asked.fits(tokens * token_bytes) else None


def _thousands(asked: Asked, token_bytes: float) -> int:
    return 1024 * round(asked.middle / token_bytes / 1024)


def _of_other_tokens(training: KnownTraining, error: OomError) -> Iterator[Allocation]:
    """Yield logits of as many tokens as the asked size would be of, if a batch may have so many."""
    if not training.vocabulary:
        return
    if training.rows * training.sequence:
        yield from _of_more_tokens(training, error)
        yield from _of_shorter_rows(training, error)
        return
    # Almost any size is some number of tokens, but few are thousands: with the two digits of a message and a
    # vocabulary of 128,256 one in 25.
    for element_bytes in WIDTHS:
        thousands = _thousands(error.asked, element_bytes * training.vocabulary)
        words = f"{thousands:,} tokens x {training.vocabulary:,}"
        yield Allocation("oom-padded", thousands * training.vocabulary, words)


def _of_more_tokens(training: KnownTraining, error: OomError) -> Iterator[Allocation]:
    tokens = tokens_of_logits(error, training) or 0
    if tokens > training.rows * training.sequence:
        words = f"{tokens:,} tokens, not {training.rows * training.sequence:,}, x {training.vocabulary:,}"
        yield Allocation("oom-padded", tokens * training.vocabulary, words)


def _of_shorter_rows(training: KnownTraining, error: OomError) -> Iterator[Allocation]:
    # A batch is padded to its longest row. With 4 and 2 bytes, any size from a quarter of the full logits up is
    # some such length. Little else in a pass is as large: a vocabulary is several times as wide as an MLP.
    rows, sequence, vocabulary = training.rows, training.sequence, training.vocabulary
    for element_bytes in widths("oom-padded", error, training):
        longest = round(error.asked.middle / vocabulary / element_bytes / rows)
        if sequence / 2 < longest < sequence:
            words = f"{number_of(rows, 'sequences')} x about {longest:,} of {sequence:,} tokens x {vocabulary:,}"
            yield Allocation("oom-padded", rows * longest * vocabulary, words)


def _of_optimizer(training: KnownTraining) -> Iterator[Allocation]:
    trained = training.trained
    if training.shards_states or not training.arm:
        # FSDP1 makes one vector of a model without units.
        # ZeRO makes a rank's part of each state as one flat vector, in fp32 even for 16-bit weights. It is cloned from
        # the flat weights of that part (zero/stage_1_and_2.py:560), while deepspeed.initialize runs.
        ranks = training.ranks or 1
        yield Allocation("oom-optimizer", trained / ranks, f"{trained:,} parameters / {ranks} ranks")
    if not training.arm:  # DDP's optimizer has a tensor for each weight
        yield Allocation("oom-optimizer", trained, f"{trained:,} parameters")
    elif training.shards_states and not training.has_adapters:  # they are no whole weight
        yield Allocation("oom-weights", trained, f"{trained:,} parameters")


def _of_words(training: KnownTraining, model: Transformer) -> Iterator[Allocation]:
    """Yield the embedding and the head, reduced together: larger than a bucket, or of FSDP's outermost unit."""
    matrices = [tensor for tensor in model.tensors if len(tensor.shape) == 2]
    of_words = [tensor for tensor in matrices if model.look.vocabulary in tensor.shape]
    if len(of_words) != 2:
        return
    elements = sum(tensor.elements for tensor in of_words)
    # DDP and stages 1 and 2 reduce a bucket at a time, and a weight that is larger than one alone (stage_1_and_2.py).
    if training.arm and not training.shards_weights and elements > training.buckets.get("reduce_bucket_size", 0):
        return
    factors = f"2 x {_sides(of_words[0].shape)}"
    # Frozen ones have no gradient, and only who divides them gathers them.
    if not training.has_adapters:
        yield Allocation("oom-embeddings", elements, factors)
    elif training.shards_weights:
        yield Allocation("oom-gather", elements, factors, WIDTHS)


def _of_units(training: KnownTraining, model: Transformer) -> Iterator[Allocation]:
    """Yield the layers of FSDP: all weights of one are gathered, and all their gradients reduced, in one piece."""
    if not training.arm.startswith(("fsdp", "hsdp")):
        return
    layers = Counter[str]()
    for tensor in model.tensors:
        layers[tensor.block] += tensor.elements if tensor.block.startswith("layer") else 0
    for elements in {*layers.values()} - {0}:
        yield Allocation("oom-unit", elements, f"{elements:,} parameters of a layer")


def _of_weights(training: KnownTraining, model: Transformer) -> Iterator[Allocation]:
    frozen = model.parameters - training.trained
    yield Allocation("oom-frozen", frozen, f"{frozen:,} frozen parameters")
    cause = "oom-frozen-weight" if training.has_adapters else "oom-weights"
    seen: set[int] = set()  # of one size the first tensor is named: further layers have the same
    for tensor in model.tensors:
        if len(tensor.shape) > 1 and tensor.elements not in seen:
            seen.add(tensor.elements)
            widths = WIDTHS if model.look.vocabulary in tensor.shape else ()  # nobody quantizes these
            yield Allocation(cause, tensor.elements, f"{_sides(tensor.shape)} of {tensor.name}", widths)


def _sides(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{side:,}" for side in shape)
