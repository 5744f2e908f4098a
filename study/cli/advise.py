"""`study advise`: which arm to use on given GPUs, or how many GPUs are enough."""

import shlex
from contextlib import suppress
from dataclasses import replace

from study.core import arms
from study.core.errors import Stop
from study.core.text import say, say_wrapped, show
from study.predict.front import (
    MOST_GPUS,
    Advice,
    PlaceFlags,
    Question,
    Row,
    StepFlags,
    TrainingFlags,
    Transformer,
    Wanted,
    asked_for,
    fewest,
    training_of,
)
from study.predict.front import advise as recommend
from study.report import accuracy, rows
from study.report import advice as answer
from study.sweeps import launches

# Options that an advice chooses.
OF_ROW = ("arm", "precision", "micro_batch", "accumulation", "checkpointing", "sync_each_batch")


def advise(
    model: Wanted, training: TrainingFlags, place: PlaceFlags, step: StepFlags, *, details: bool = False
) -> dict:
    """Recommend an arm for a model on your GPUs. Nothing is run.

    Without --gpus, the fewest GPUs of this kind are looked for that hold the training with room. Each number of a node
    is tried, then whole nodes, up to 64 GPUs.

    With --json: all that was compared, to the byte. Example: `study advise --model gpt2-xl --gpus 8 --gpu H100`

    Args:
        model: The model.
        training: The training.
        place: The machine.
        step: What is asked for of a step and of the host.
        details: Also show what was assumed, how accurate predictions were, and the command that explains the choice.
    """
    shape = asked_for(model, training.sequence or 1)
    precision = training.precision
    if precision is None and shape.is_partly_frozen:  # arms that differ in precision would be compared by it
        training = replace(training, precision="bf16_cast")
    advice = advice_on(shape, training, place, step)
    first = [answer.enough(advice, step.batch)] if training.gpus is None else []
    lines = [*first, *answer.in_words(advice), *rows.widest(advice), *instead(advice, training, place, step)]
    detail = ""
    if advice.choice:
        given = vars(model) | vars(training) | vars(place)
        detail = in_detail(advice.choice, given | {"gpus": advice.question.gpus})
    say_wrapped(*lines, "")
    show(rows.table(advice))
    notes = [*answer.shape_note(shape, model.params), *answer.attention_note(shape, place.attention_kernel)]
    named = [row for row in advice.rows if row.arm == "fsdp2" or row in (advice.choice, advice.alternative)]
    of_experts = [note for row in named for note in answer.experts_note(training_of(advice.question, row))]
    notes += dict.fromkeys(of_experts)
    say_wrapped("", rows.below_table(advice), *rows.synced(advice), *notes)
    if details:
        show_details(advice, detail, step.batch is None)
    else:
        given = {
            "--sequence": training.sequence,
            "--batch": step.batch,
            "--link": place.link,
            "--host-memory": step.host_memory,
            "--precision": precision,
        }
        say_wrapped(*accuracy.in_short(advice, given))
    return answer.in_json(advice) | {
        "in_words": lines,
        "detail": detail,
        "parameters_asked": model.params,
        "assumed": accuracy.assumptions(advice.question),
        "accuracy": accuracy.accuracy(),
    }


def advice_on(shape: Transformer, training: TrainingFlags, place: PlaceFlags, step: StepFlags) -> Advice:
    """Return the advice for so many GPUs, or for the fewest that hold the training with room."""
    if training.gpus is not None:
        return recommend(Question.of(shape, training, place, step))
    if advice := fewest(shape, training, place, step):
        return advice
    remedy = "give --lora-rank, a shorter --sequence, or a larger --gpu"
    with suppress(Stop):  # a loss in pieces is not traced of every model where PyTorch is missing
        if advice := None if place.chunked_loss else fewest(shape, training, replace(place, chunked_loss=True), step):
            remedy = f"give --chunked-loss. {answer.enough(advice, step.batch)}".rstrip(".")
    raise Stop(f"no 1 to {MOST_GPUS} {place.gpu} hold {shape.name}", remedy)


def instead(advice: Advice, training: TrainingFlags, place: PlaceFlags, step: StepFlags) -> list[str]:
    """Return what recomputing would change; where nothing fits, how many GPUs would be enough."""
    shape = advice.question.model
    if choice := advice.choice:
        return answer.recompute_note(choice.checkpointing, shape, arms.load_arm(choice.arm).stage)
    if larger := fewest(shape, training, place, step, beyond=advice.question.gpus):
        return [answer.enough(larger, step.batch)]
    return answer.no_way_out(advice)


def show_details(advice: Advice, detail: str, is_default_batch: bool) -> None:
    say_wrapped(*rows.stage_3_holds_no_less(advice))
    say_wrapped(*rows.throughputs(advice))
    if detail:
        say_wrapped("", f"In detail: `{detail}`")
    if advice.with_offloading or advice.only_just:
        say_wrapped("", f"Tried: each number of GPUs of a node, then whole nodes, up to {MOST_GPUS} GPUs.", indent="  ")
    say("", "Predicted for:")
    say_wrapped(*accuracy.assumptions(advice.question), indent="  ", first="- ")
    say_wrapped("", *accuracy.of_steps(advice, is_default_batch), "", *accuracy.accuracy(), indent="  ")


def in_detail(choice: Row, options: dict) -> str:
    """Return the command that shows a choice in detail, without options that have their defaults."""
    options |= {name: getattr(choice, name) for name in OF_ROW} | {"buckets": choice.bucket_elements}
    usual = (None, False, PlaceFlags.attention_kernel)
    chosen = {name: value for name, value in options.items() if value not in usual}
    return shlex.join(["study", "estimate", *launches.options(chosen)])
