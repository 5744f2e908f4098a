# ruff: noqa: F401
"""The predictor: memory, traffic and time of a training that is not run. It needs no torch.

    from study.predict import PlaceFlags, Question, TrainingFlags, advise, named

    question = Question.of(named("llama3-8b"), TrainingFlags(gpus=8), PlaceFlags(gpu="H100"))
    print(advise(question).choice)

`advise()` takes a `Question`; `estimate()`, `memory_kinds()` and `step_time()` take a `Training`, which
`question.training(arm, rows, passes)` makes. A mistake in what was asked raises `study.core.errors.Stop`, which says
what to do. `examples/predict.py` is a script. The rooms of this project import `study.predict.front`, which has more.

To read it: `training.py` and `placement.py`, `engines/base.py` and an engine, `estimate.py`, `step_time.py`,
`prediction.py`, then `advise.py`.
"""

from study.predict.advise import Advice, advise
from study.predict.allocator import MemoryKinds
from study.predict.architecture import named
from study.predict.estimate import Estimate
from study.predict.placement import Placement
from study.predict.prediction import estimate, memory_kinds, step_time
from study.predict.question import PlaceFlags, Question, StepFlags, TrainingFlags
from study.predict.step_time import Hardware, StepTime
from study.predict.training import Batch, Training
