"""All that others may use of the predictor: `estimate()`, `step_time()`, `advise()`, and what they take and return."""

from study.predictor import nodes, papers
from study.predictor.advice import settled
from study.predictor.advice.advise import MISS, MOST_GPUS, Advice, Row, advise, fewest, fills
from study.predictor.advice.question import SEQUENCE, Given, Precision, Question, default_sequence
from study.predictor.advice.settled import BUCKET_ELEMENTS, BUCKETS, settled_arm, usual_precision, with_zero, zero_of
from study.predictor.architecture import generic, named
from study.predictor.estimate import Estimate, estimate, inputs_bytes
from study.predictor.memory.loading import HOST_PROCESS_BYTES, VIRTUAL_PROCESS_BYTES, Load, Way, peaks
from study.predictor.memory.memory_kinds import FRAGMENTATION, OUTSIDE_AT_MOST_BYTES, memory_kinds, reserve_bytes
from study.predictor.outside import published, scores
from study.predictor.papers import recipe_of, states_bytes
from study.predictor.setup import ADAMW, Setup, distribution
from study.predictor.step_time import Machine, StepTime, peak_flops_per_s, step_time
from study.predictor.tracing.transformer import Transformer
from study.predictor.wanted import Wanted, asked_for, count_of, refuse_long_rows

__all__ = [
    "ADAMW",
    "BUCKETS",
    "BUCKET_ELEMENTS",
    "FRAGMENTATION",
    "HOST_PROCESS_BYTES",
    "MISS",
    "MOST_GPUS",
    "OUTSIDE_AT_MOST_BYTES",
    "SEQUENCE",
    "VIRTUAL_PROCESS_BYTES",
    "Advice",
    "Estimate",
    "Given",
    "Load",
    "Machine",
    "Precision",
    "Question",
    "Row",
    "Setup",
    "StepTime",
    "Transformer",
    "Wanted",
    "Way",
    "advise",
    "asked_for",
    "count_of",
    "default_sequence",
    "distribution",
    "estimate",
    "fewest",
    "fills",
    "generic",
    "inputs_bytes",
    "memory_kinds",
    "named",
    "nodes",
    "papers",
    "peak_flops_per_s",
    "peaks",
    "published",
    "recipe_of",
    "refuse_long_rows",
    "reserve_bytes",
    "scores",
    "settled",
    "settled_arm",
    "states_bytes",
    "step_time",
    "usual_precision",
    "with_zero",
    "zero_of",
]
