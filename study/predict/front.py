# ruff: noqa: F401
"""All that others may use of the predictor: `estimate()`, `step_time()`, `advise()`, and what they take and return."""

from study.predict import calibration, deepspeed_keys, papers
from study.predict.advise import (
    FASTER,
    FULL,
    MISS,
    MORE_ROWS,
    MOST_GPUS,
    ORDER,
    SHARING,
    Advice,
    Fits,
    Row,
    advise,
    fewest,
    fits_on,
    held_back,
    training_of,
    with_more_rows,
    with_precision,
)
from study.predict.allocator import (
    CONTEXT_BYTES,
    FRAGMENTATION,
    OUTSIDE_AT_MOST_BYTES,
    Allocator,
    Block,
    MemoryKinds,
    headroom_bytes,
    outside_of_group,
    reserve_bytes,
)
from study.predict.architecture import Wanted, asked_for, named
from study.predict.calibration import CalibratedMachine, Known, MeasuredStep
from study.predict.deepspeed_keys import ADAM, Keys
from study.predict.engines.zero import FOLLOWED
from study.predict.estimate import HOST_PROCESS_BYTES, PUBLISHED_BYTES, Estimate, loading_bytes
from study.predict.optimizer_states import Optimizer
from study.predict.outside import scores
from study.predict.pace import Pace, pace
from study.predict.placement import Fsdp, Placement
from study.predict.prediction import Prediction, estimate, memory_kinds, step_time
from study.predict.question import (
    ANY_GPU,
    BUCKETS,
    MOST_ROWS,
    PlaceFlags,
    Precision,
    Question,
    StepFlags,
    TrainingFlags,
    default_sequence,
    node_size,
    settled_arm,
    usual_precision,
    with_buckets,
    with_homes,
    zero_of,
)
from study.predict.step_time import AttentionKernel, Hardware, StepTime, experts
from study.predict.trace.transformer import Transformer
from study.predict.training import Batch, Quantized, Recomputation, Training
