"""Explain an error about memory by what its own text says of the training: model, stage, GPUs, rows and tokens."""

import re
from dataclasses import dataclass, replace

from study.configs.oom import causes
from study.configs.oom.causes import CLUE, SIZE_FITS, WIDTHS, Cause, backward_begins, clues
from study.configs.oom.explain import FILLING, explain
from study.configs.oom.fitting import WhatFits, named, predicted, with_activations_first
from study.configs.oom.longer import with_longer_sequences, with_more_sequences
from study.configs.oom.reading import OomError
from study.configs.oom.recomputing import with_recomputing
from study.configs.oom.remedies import first_tried_first, in_accord, with_remedies
from study.configs.oom.said import stated
from study.configs.oom.training import Described, KnownTraining
from study.configs.pasted.read import Pasted
from study.configs.pasted.told import arm as arm_of
from study.configs.pasted.told import told
from study.core.shapes import models, of_size
from study.core.text import binary_size, number_of
from study.predict.front import Wanted, papers

HOST_BYTES = (16, 18)  # of a parameter, with the optimizer's states on the host, and with the weights as well
WEIGHT_BYTES = 2  # in bf16 or fp16
NEAR = 0.02  # a size that people round, such as 8B
# Of a frozen parameter, where the text has such words. Those of 4 bits have constants of each block.
FROZEN_BYTES = {
    r"(?i)4[- ]?bit|int4|nf4|quantization_bit\D{0,4}4|\bq-?lora\b(?![^\n]{0,20}8)": 0.55,
    r"(?i)8[- ]?bit|int8|quantization_bit\D{0,4}8": 1,
}


@dataclass(frozen=True)
class RoundTraining:
    """A training of a model of which a text says no more than its billions of parameters."""

    parameters: float
    gpu_bytes: int | None
    pasted: Pasted

    @property
    def billions(self) -> str:
        return f"{self.parameters / 1e9:.4g} billion parameters"


def by_text(pasted: Pasted, error: OomError | None) -> list[Cause]:
    """Return the causes of an error, as `study oom` names them; without one what fills a GPU that the text names."""
    if error:
        causes, known = explained(pasted, error, Wanted(), Described())
        # Who pastes a text does not wait for a trace.
        which = predicted(error, known, named(causes)) if known.comes_traced else WhatFits()
        return with_remedies(error, known, causes, which, pasted)
    training = _round(pasted)
    if training is None:
        return []
    return [replace(cause, remedy=in_accord(cause, None, pasted)) for cause in _beside_activations(training)]


def explained(pasted: Pasted, error: OomError, wanted: Wanted, given: Described) -> tuple[list[Cause], KnownTraining]:
    """Return the causes of an error, and what is known of its training. Raise Stop if a flag is wrong.

    What its traceback names, and the tensors of a model, say more than a number of parameters in the text.
    """
    causes, known = explain(error, wanted, given, stated(pasted))
    training = _round(pasted)
    if training and known.model is None and not any(clues(error)):
        is_sized = error.where != "GPU" or error.asked.high
        of_text = _states(training, error) or _logits(training, error) if is_sized else _beside_activations(training)
        ids = {cause.id for cause in of_text}
        causes = [*of_text, *(cause for cause in causes if cause.id not in ids)]
        causes.sort(key=lambda cause: -cause.points)
    causes, known = with_longer_sequences(error, known, causes, given)
    causes, known = with_more_sequences(error, known, causes, given)
    known = with_recomputing(error, known, causes)
    causes = with_activations_first(error, known, causes)
    return first_tried_first(error, known, causes), known


def _round(pasted: Pasted) -> RoundTraining | None:
    about = told(pasted.text)
    return RoundTraining(about.parameters, about.gpu_bytes, pasted) if about.parameters else None


def _states(training: RoundTraining, error: OomError) -> list[Cause]:
    """Return the model states, if what the host could not give is theirs, or if they have the asked size."""
    said = training.pasted.said
    ranks = said.get("ranks")
    if said.get("peft"):
        return []
    if error.where == "oom-host" and "offload" in said:
        low, high = (binary_size(each * training.parameters) for each in HOST_BYTES)
        states = f"the offloaded states of {training.billions} take {low}, and {high} with the weights, of all ranks"
        return [_cause("oom-host", f"host memory: {states}")]
    if not ranks:
        return []

    shares = [(ranks, f" / {ranks} ranks")]
    arm, *_ = (arm_of(training.pasted) or "").partition("_cpu")
    if papers.STAGES.get(arm, 0) < 3:  # of stage 3 no rank has a whole state, nor all weights
        shares.append((1, ""))
    for parts, of_ranks in shares:
        for element_bytes in WIDTHS:
            if abs(error.asked.middle / (training.parameters / parts * element_bytes) - 1) < NEAR:
                factors = f"{error.asked.text} = about {training.billions}{of_ranks} x {element_bytes} bytes"
                return [_cause("oom-optimizer", f"{factors}: {causes.rows()['oom-optimizer']['sentence']}")]
    return []


def _logits(training: RoundTraining, error: OomError) -> list[Cause]:
    """Return the logits of a model of so many parameters, if they have the asked size as the backward pass begins."""
    if error.where != "GPU" or not backward_begins(error):
        return []
    for name in of_size(training.parameters):
        if abs(models()[name].get("parameters", 0) / training.parameters - 1) > NEAR:
            continue
        of_model, _ = explain(error, Wanted(model=name), Described())
        for guess in of_model:
            if guess.id == "oom-padded":
                size, *_ = guess.what.partition(": ")
                what = f"{size}, with the vocabulary of {name}: {causes.rows()['oom-logits']['sentence']}"
                reasons = (SIZE_FITS, "the backward pass begins", f"{name} has the parameters that the text names")
                return [replace(_cause("oom-logits", what), reasons=reasons)]
    return []


def _beside_activations(training: RoundTraining) -> list[Cause]:
    """Return what a GPU holds before any activation, and whether that leaves room."""
    gpu_bytes, ranks = training.gpu_bytes, training.pasted.said.get("ranks")
    if not gpu_bytes or not ranks:
        return []
    what, held_bytes, arm = _held(training, ranks)
    on = f"{what} take {binary_size(held_bytes)} a GPU with {arm} on {number_of(ranks, 'GPUs')}"
    if held_bytes > FILLING * gpu_bytes:
        return [_cause("oom-states", f"{on}, which has {binary_size(gpu_bytes)}: they do not fit")]
    return [
        _cause("oom-activations", f"{on}, and fit into {binary_size(gpu_bytes)}: activations and logits are the rest")
    ]


def _held(training: RoundTraining, ranks: int) -> tuple[str, float, str]:
    """Return what a GPU holds of a model, its bytes, and the arm without its offloading."""
    # What nobody says is taken as what holds least.
    arm, offloads, _ = (arm_of(training.pasted) or "zero3").partition("_cpu")
    parameters, stage = training.parameters, papers.STAGES[arm]
    parts = ranks if stage == 3 else 1  # of the weights
    if training.pasted.said.get("peft"):
        return f"the frozen {training.billions}", parameters * _frozen_bytes(training.pasted.text) / parts, arm
    if offloads:
        held_bytes = parameters * WEIGHT_BYTES * (1 / parts + 1 / ranks)
        return f"weights and gradients of {training.billions}", held_bytes, arm
    held_bytes = sum(papers.states_bytes(parameters, stage, ranks).values())
    return f"the model states of {training.billions} with AdamW", held_bytes, arm


def _frozen_bytes(text: str) -> float:
    """Return the bytes of a frozen parameter."""
    for words, each_bytes in FROZEN_BYTES.items():
        if re.search(words, text):
            return each_bytes
    return WEIGHT_BYTES


def _cause(id: str, what: str) -> Cause:
    row = causes.rows()[id]
    return Cause(id, what, CLUE, ("the model and the GPUs that the text names",), row["remedy"], row["apart"])
