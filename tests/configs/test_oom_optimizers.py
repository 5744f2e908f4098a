"""Which AdamW a training has, by everything that says it, and that what it makes is predicted."""

import itertools

import pytest

from study.configs.oom.by_text import explained
from study.configs.oom.optimizers import NAMED
from study.configs.oom.training import Described, KnownTraining, prediction_of
from study.configs.pasted.memory import error_in
from study.configs.pasted.read import read
from study.predict.engines import engine_of
from study.predict.front import Wanted
from tests.cases import for_each

ERROR = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
MODEL = Wanted(model="llama3.2-1b")
NUMBERS = {"ranks": 4, "micro_batch": 1, "sequence": 128}
# What says which AdamW PyTorch, or another library, is asked for.
ASKED = {
    "--optim adamw_torch": "foreach",
    'optim="adamw_torch",': "foreach",
    "optim: adamw_torch_fused": "adamw",
    "optim=OptimizerNames.ADAMW_TORCH_FUSED,": "adamw",
    '"optim": "adamw_bnb_8bit"': "adamw_8bit",
    "optimizer: adamw_torch": "foreach",
    "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)": "foreach",
    "optimizer = AdamW(groups(model, 0.1), fused=True)": "adamw",
    "return optim.Adam(self.parameters(), foreach=False)": "single_tensor",
    "opt = bnb.optim.AdamW8bit(model.parameters())": "adamw_8bit",
    "from transformers import AdamW\nopt = AdamW(model.parameters())": "single_tensor",
    "trainer = Trainer(model)": "adamw",
    "trainer = Trainer(model)\ntorch==2.6.0": "foreach",
    "trainer = Trainer(model)\ntransformers==4.53.3": "foreach",
    "trainer = Trainer(model)\ntransformers==4.54.0": "adamw",
    "trainer = Trainer(model)\ntransformers==4.57.0\ntorch==2.6.0": "foreach",
    "trainer = Trainer(model)\ntransformers==4.31.0": "single_tensor",
    "trainer = Trainer(model)\ntransformers==4.32.0": "foreach",
}
NOBODY = (
    "", "# opt = torch.optim.AdamW(model.parameters())", "transformers==4.40.0",
    "--optim adamw_torch\noptim: adamw_torch_fused",
)  # fmt: skip
OFFLOADED = '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}%s}'
HERE = '{"zero_optimization": {"stage": 3}%s}'


def known_of(text: str, **given):
    pasted = read(f"{text}\n{ERROR}")
    return explained(pasted, error_in(pasted.text), MODEL, Described(**NUMBERS | given))[1]


def taken(text: str, **given) -> str | None:
    return known_of(text, **given).described.optimizer


def made_in_update(text: str, **given) -> int:
    """Bytes that are there while the optimizer updates, besides what stands."""
    known = known_of(text, **given)
    training = prediction_of(known.wanted, known.described).engine.training
    updates = [now for when, now in engine_of(training).instants(training.profile) if when == "update"]
    return sum(updates[-1].values()) if updates else 0


@for_each("arm", ["ddp", "fsdp2", "zero1", "zero3"])
@for_each("asked", ASKED)
def test_pytorchs_is_taken_as_asked_in_every_framework(asked, arm):
    assert taken(asked, arm=arm) == ASKED[asked]


@pytest.mark.parametrize("asked", NOBODY)
def test_what_nobody_says_or_two_say_is_not_taken(asked):
    assert taken(asked, arm="fsdp2") is None


def test_a_file_of_the_trainers_arguments_has_its_default_as_a_script_has(tmp_path):
    path = tmp_path / "args.json"
    path.write_text('{"per_device_train_batch_size": 4, "output_dir": "x", "bf16": true}')
    known = KnownTraining.of(MODEL, Described(**NUMBERS, config=path))
    script = known_of("trainer = Trainer(model)", arm="ddp").settings
    assert known.settings["optimizer by"] == script["optimizer by"]
    assert "adamw_torch_fused, the Trainer's default with transformers 4.54.0" in script["optimizer by"]
    path.write_text('{"per_device_train_batch_size": 4, "output_dir": "x", "optim": "adamw_torch"}')
    assert KnownTraining.of(MODEL, Described(**NUMBERS, config=path)).described.optimizer == "foreach"


@for_each("asked", ASKED)
def test_a_flag_and_a_frame_win(asked):
    assert taken(asked, arm="fsdp2", optimizer="sgd") == "sgd"
    assert taken(f"{asked}\n  in _multi_tensor_adamw\n", arm="zero3") == "foreach"


@for_each(("asked", "config", "params"), itertools.product(ASKED, (HERE, OFFLOADED), ("", "lr")))
def test_deepspeeds_config_wins_over_what_a_script_asks(asked, config, params):
    """DeepSpeed makes its own Adam, in one kernel, on the GPU or the host."""
    section = (
        ', "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}' if params else ', "optimizer": {"type": "Adam"}'
    )
    assert taken(f"{asked}\n" + config % section) == "adamw"


@pytest.mark.parametrize(
    ("params", "expected"),
    [("", "foreach"), (', "fused": true', "adamw"), (', "foreach": false', "single_tensor")],
)
def test_deepspeed_makes_pytorchs_if_its_config_asks_for_it(params, expected):
    section = f', "optimizer": {{"type": "AdamW", "params": {{"torch_adam": true{params}}}}}'
    assert taken(HERE % section) == expected
    assert taken(OFFLOADED % section) == ("adamw" if expected == "adamw" else "single_tensor")


@for_each("asked", ASKED)
def test_offloaded_states_are_deepspeeds_unless_the_config_keeps_the_scripts(asked):
    assert taken(f"{asked}\n" + OFFLOADED % "") == taken(asked, arm="zero2_cpu") == "adamw"
    kept = taken(f"{asked}\n" + OFFLOADED % ', "zero_force_ds_cpu_optimizer": false')
    on_host = {"foreach": "single_tensor"}  # PyTorch's default on a CPU
    assert kept == taken(asked, arm="fsdp2_cpu") == on_host.get(ASKED[asked], ASKED[asked])


@pytest.mark.parametrize("arm", ["ddp", "zero1", "zero2", "zero3", "fsdp2", "zero3_cpu", "fsdp2_cpu"])
def test_all_roots_at_once_are_predicted_of_a_ranks_part(arm):
    """4 bytes for each parameter of a part. An update on the host makes nothing here."""
    ours = {"arm": arm, "precision": "fp32"}
    more = made_in_update("--optim adamw_torch", **ours) - made_in_update("--optim adamw_torch_fused", **ours)
    part = known_of("", **ours).model.parameters / (1 if arm == "ddp" else NUMBERS["ranks"])
    assert more == pytest.approx(0 if arm.endswith("_cpu") else 4 * part, rel=0.001)


def test_each_name_is_of_the_trainer_or_was_in_transformers_4():
    from transformers.training_args import OptimizerNames

    assert {*NAMED} - {each.value for each in OptimizerNames} == {"adamw_hf", "adamw_apex_fused"}
