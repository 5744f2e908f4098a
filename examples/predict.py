"""Asks the predictor from Python: which arm to use for a model on some GPUs, and what one arm would need instead."""

import sys

from study.core.arms import load_arm
from study.predict import PlaceFlags, Question, TrainingFlags, advise, estimate, memory_kinds, named, step_time

model, gpu, gpus = sys.argv[1:] or ("llama3-8b", "H100", "8")
question = Question.of(named(model), TrainingFlags(gpus=int(gpus)), PlaceFlags(gpu=gpu))

# --- the arm to use. None: nothing fits
choice = advise(question).choice
if choice:
    print(
        f"use {choice.arm}: {choice.micro_batch} rows per pass, {choice.peak_bytes / 1e9:.1f} GB, {choice.step_s:.2g} s"
    )

# --- another arm, with one row in a pass
training = question.training(load_arm("zero3_cpu"), rows=1, passes=question.batch // question.gpus)
whole = estimate(training)
shown = memory_kinds(training, question.gpu).driver
step = step_time(training, question.machine)
print(f"zero3_cpu: {whole.peak_bytes / 1e9:.1f} GB at the peak ({whole.peak_when}), nvidia-smi shows {shown / 1e9:.1f}")
print(f"and {whole.host_bytes / 1e9:.1f} GB of host memory a rank; {step.seconds:.2g} s, limited by {step.limit}")
for role, size_bytes in whole.at_peak.items():
    print(f"  {role}: {size_bytes / 1e9:.2f} GB")
