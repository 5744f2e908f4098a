"""`study oom` is asked about drawn trainings that fail in a forward pass: what it says is compared with the truth.

What a rank has in use is summed here, from the model's own tape and the states of its arm, and not by the predictor.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from study.configs.oom.by_text import explained
from study.configs.oom.causes import SIZE_FITS
from study.configs.oom.excess import LEAST_TAKEN
from study.configs.oom.fitting import named, predicted
from study.configs.oom.reading import find
from study.configs.oom.training import Described, KnownTraining, predicted_memory, prediction_of
from study.configs.pasted.read import read
from study.predict.front import Wanted, asked_for

GIB = 2**30
DRAWN = 12
MODELS = ("llama-3.1-8b", "qwen2.5-7b", "mistral-7b", "llama-2-13b", "gpt2-xl", "qwen2.5-0.5b")
ARMS = ("zero1", "zero2", "zero2_cpu", "zero3_cpu", "fsdp2")
# By the module that a tensor is made in: the frames below the loop's, and the cause.
FRAMES = {
    "mlp": ("x.py", "down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))", "oom-activations"),
    "norm": ("modeling_x.py", "hidden_states = hidden_states.to(torch.float32)", "oom-activations"),
    "lm_head": ("modeling_x.py", "logits = self.lm_head(hidden_states[:, slice_indices, :])", "oom-logits"),
    "loss": ("loss_utils.py", "logits = logits.float()", "oom-logits"),
}
MESSAGE = """Traceback (most recent call last):
  File "train.py", line 9, in main
    trainer.train()
  File "{file}", line 3, in forward
    {code}
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of {total} of which \
{free} is free. Including non-PyTorch memory, this process has {used} memory in use. Of the allocated memory {held} is \
allocated by PyTorch, and {unused} is reserved by PyTorch but unallocated.
"""


@dataclass(frozen=True)
class Failure:
    """A training, the tensor that has no room, and what is allocated then."""

    wanted: Wanted
    given: Described
    total_bytes: int
    made_in: str
    asked_bytes: int
    held_bytes: float

    @property
    def had_bytes(self) -> float:
        return self.held_bytes + self.asked_bytes

    @property
    def log(self) -> str:
        outside, unused = GIB, 0.01 * self.total_bytes
        sizes = {
            "asked": -(-self.asked_bytes // 2**21) * 2**21,
            "total": self.total_bytes,
            "free": max(0, self.total_bytes - outside - unused - self.held_bytes),
            "used": outside + unused + self.held_bytes,
            "held": self.held_bytes,
            "unused": unused,
        }
        file, code, _ = FRAMES[self.made_in]
        return "--bf16 True\n" + MESSAGE.format(file=file, code=code, **{name: shown(sizes[name]) for name in sizes})


def shown(size_bytes: float) -> str:
    """As c10's format_size."""
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB else f"{size_bytes / 2**20:.2f} MiB"


def states_bytes(training, given: Described) -> float:
    """What a rank holds before its first pass: ZeRO's section 3 of weights in 16 bits, and FSDP's in fp32."""
    tensors = training.model.tensors
    parameters, largest = sum(each.elements for each in tensors), max(each.elements for each in tensors)
    match given.arm:
        case "fsdp2":
            return 4 * parameters / given.ranks + 2 * largest
        case "zero3_cpu":
            return 2 * largest
        case "zero2_cpu":
            return 2 * parameters + 2 * largest
    return 2 * parameters + 4 * parameters / given.ranks


def failures() -> Iterator[Failure]:
    chance = random.Random(20261130)
    while True:
        wanted = Wanted(model=chance.choice(MODELS))
        given = Described(
            arm=chance.choice(ARMS),
            ranks=chance.choice((2, 4, 8, 16)),
            micro_batch=chance.choice((2, 3, 4, 6, 8, 12)),
            sequence=chance.choice((1024, 2048, 4096, 8192)),
            checkpointing=chance.choice((True, False)),
        )
        total_bytes = chance.choice((24, 40, 48, 80)) * GIB
        given = replace(given, sequence=min(given.sequence, asked_for(wanted, 1).positions))
        if failure := fails_at(wanted, given, total_bytes):
            yield failure


def fails_at(wanted: Wanted, given: Described, total_bytes: int) -> Failure | None:
    """Return where the first forward pass of a training has no room. None: it has, or no traceback is known here."""
    training = prediction_of(wanted, given).training
    held_bytes = states_bytes(training, given)
    logits = given.micro_batch * given.sequence * training.model.look.vocabulary
    module, made, has_ended = "", [], False
    for kind, what, *_ in training.model.tape(training.trace_options, training.batch.rows):
        if kind == "event":
            module, has_ended = what.split(".")[-2] if "." in what else "", what == "end of forward"
        elif kind == "freed":
            held_bytes -= made[what]
        elif kind == "made" and held_bytes + what > 0.97 * total_bytes - GIB:
            made_in = {2 * logits: "lm_head", 4 * logits: "loss"}.get(what) or ("norm" if "norm" in module else "mlp")
            is_known = made_in != "mlp" or module in ("gate_proj", "up_proj", "down_proj", "c_fc", "c_proj")
            return Failure(wanted, given, total_bytes, made_in, what, held_bytes) if is_known else None
        elif kind == "made":
            made.append(what)
            held_bytes += what
        if has_ended:
            return None
    return None


DIFFERENT = {
    "nothing": lambda given: given,
    "fewer rows": lambda given: replace(given, micro_batch=given.micro_batch // 2),
    "one row": lambda given: replace(given, micro_batch=1),
    "shorter rows": lambda given: replace(given, sequence=given.sequence // 2),
    "recomputing": lambda given: replace(given, checkpointing=not given.checkpointing),
}


@pytest.fixture(scope="module")
def drawn() -> list[Failure]:
    found = failures()
    return [next(found) for _ in range(DRAWN)]


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_is_said_of_a_drawn_failure_is_true(what, drawn):
    """Where something was given wrongly: what the log contradicts is said, and then no change is said to fit."""
    for failure in drawn:
        given = DIFFERENT[what](failure.given)
        error = find(failure.log)
        causes, training = explained(read(failure.log), error, failure.wanted, given)
        cause = named([each for each in causes if each.id != "oom-states"])
        says = predicted(error, training, cause)
        *_, truth = FRAMES[failure.made_in]
        assert not cause.is_likely or cause.id == truth, (failure, cause)
        assert_size_is_true(failure, cause)
        needs_bytes = predicted_memory(failure.wanted, training.described).peak_bytes
        is_contradicted = failure.had_bytes > needs_bytes + 1.1 * LEAST_TAKEN
        assert not is_contradicted or says.differs, (failure, says)
        assert not (says.differs and "would fit" in says.words), (failure, says)
        taken = replace(training.described, optimizer=given.optimizer)  # a traceback may name the Trainer's default
        assert not (what == "nothing" and (says.differs or training.conflicts or taken != given))
        assert_logits_tell_recomputing(failure, given, training)


def assert_size_is_true(failure: Failure, cause) -> None:
    size = re.search(r"([\d,]+) tokens(?:, not [\d,]+,)? x ([\d,]+) x (\d) bytes", cause.what)
    if size and cause.is_likely and SIZE_FITS in cause.reasons:
        tokens, width, element_bytes = (int(each.replace(",", "")) for each in size.groups())
        assert tokens == failure.given.micro_batch * failure.given.sequence, (failure, cause)
        assert tokens * width * element_bytes == failure.asked_bytes, (failure, cause)


def assert_logits_tell_recomputing(failure: Failure, given: Described, training: KnownTraining) -> None:
    """They come after all layers, which would have kept far more."""
    if given.checkpointing is not False or failure.made_in not in ("lm_head", "loss"):
        return
    kept, recomputed = (
        predicted_memory(failure.wanted, replace(given, checkpointing=each)).peak_bytes for each in (False, True)
    )
    if kept - recomputed > 2 * failure.held_bytes and not training.unfitting:
        assert "it is false: activations recomputed (as the log's" in str(training.conflicts), failure
