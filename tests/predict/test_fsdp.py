"""Compares theory of FSDP with PyTorch's own tracker on a fake group of ranks, and with published bytes."""

import json
import warnings

import fsdp_tracker
import pytest
import torch

from study.core.models import config as configs
from study.predict.architecture import named
from study.predict.engines import engine_of
from study.predict.placement import Fsdp
from study.predict.prediction import estimate
from study.predict.trace.transformer import Transformer
from tests.conftest import forked
from tests.predict.families import config_of
from tests.predict.trainings import training_of

pytestmark = pytest.mark.usefixtures("module_without_traces")
SEQUENCE = 32
FOLLOWED = [
    {"precision": "fp32", "fsdp": Fsdp(reshards=True), "micro_batch": 2, "accumulation": 2},
    {"precision": "bf16", "fsdp": Fsdp(reshards=False), "micro_batch": 3, "checkpointing": True},
    {"precision": "bf16_pure", "fsdp": Fsdp(reshards=True), "micro_batch": 1, "checkpointing": True},
]


@pytest.mark.parametrize("how", FOLLOWED, ids=lambda how: how["precision"])
def test_peaks_are_those_of_pytorchs_tracker(how):
    """It follows FSDP2 itself, tensor by tensor. Adam's steps are numbers of four bytes, which theory leaves out."""
    model = Transformer.of(config_of("llama"), "llama")
    predicted = estimate(training_of(model, ranks=8, sequence=SEQUENCE, **how)).peak_bytes
    how = dict(how)
    reshard = None if how.pop("fsdp").reshards else False
    gather_in = torch.bfloat16 if how["precision"] == "bf16" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = configs.of_dict(config_of("llama"), "sdpa")
        options = {"sequence": SEQUENCE, "gather_in": gather_in, "reshard": reshard}
        followed = fsdp_tracker.follow(config, 8, **options, **how)
    assert predicted == pytest.approx(followed, rel=0.005)


MISTRAL = named("mistral-7b")
LLAMA_3 = named("llama3-8b")
# fms-acceleration, scripts/benchmarks/refs/a100_80gb*.csv: torch's allocated bytes after 100 steps, and their peak.
# The Trainer's AdamW is PyTorch's, whose default on CUDA is foreach. Peaks are those of the update.
PUBLISHED = [
    (LLAMA_3, 1, None, "bf16_pure", 48.198, 80.318),
    (LLAMA_3, 2, Fsdp(), "bf16", 64.26, 80.32),
    (MISTRAL, 2, Fsdp(), "bf16_pure", 28.98, 36.23),
    (MISTRAL, 4, Fsdp(), "bf16", 28.98, 36.23),
]


@pytest.mark.parametrize(("model", "ranks", "fsdp", "precision", "after_gb", "peak_gb"), PUBLISHED)
def test_bytes_are_as_published(model, ranks, fsdp, precision, after_gb, peak_gb):
    rows = 2 if fsdp and precision == "bf16_pure" else 4
    values = {"micro_batch": rows, "sequence": 4096, "checkpointing": True, "optimizer": "foreach", "device": "cuda"}
    prediction = estimate(training_of(model, ranks=ranks, fsdp=fsdp, precision=precision, **values))
    assert sum(prediction.after_step.values()) / 1e9 == pytest.approx(after_gb, rel=0.002)
    assert prediction.peak_bytes / 1e9 == pytest.approx(peak_gb, rel=0.002)


def test_reentrant_recomputation_under_fsdp1_keeps_the_inputs_of_frozen_layers(tmp_path):
    """A layer more is one input more, or two, as a real run of PEFT shows."""
    from tests.predict import fsdp1_adapters  # here, and not in each worker of the tests: PEFT takes seconds

    script = forked(tmp_path, config=None, script="tests/predict/fsdp1_adapters.py", flags=())
    seen = json.loads(script.output.splitlines()[-1])
    adapters = {"lora_rank": fsdp1_adapters.RANK, "lora_targets": ("q_proj", "v_proj")}
    how = {"micro_batch": fsdp1_adapters.ROWS, "sequence": fsdp1_adapters.SEQUENCE, "checkpointing": True}
    how |= {"fsdp": Fsdp(), "ranks": fsdp1_adapters.RANKS}
    for reentrant in (True, False):
        peaks = []
        for layers in fsdp1_adapters.LAYERS:
            model = Transformer.of(config_of("llama", num_hidden_layers=layers), "llama", **adapters)
            training = training_of(model, reentrant=reentrant, **how)
            instants = engine_of(training).instants(training.profile)
            peaks.append(max(sum(now.values()) for when, now in instants if when == "backward"))
        few, many = seen[str(reentrant)]
        assert peaks[1] - peaks[0] == pytest.approx(many - few, rel=0.01)
