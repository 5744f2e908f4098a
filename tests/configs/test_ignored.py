"""What Accelerate or a stage ignores: `study arms` and `study diagnose` tell the same keys, whatever their values."""

import json
from pathlib import Path

import pytest

from study.configs import sources
from study.configs.mistakes import mistakes
from study.core import arms
from study.core.ignored_keys import OF_ITS_OFFLOAD, OF_STAGE_3, OF_STAGES_1_AND_2, OFFLOADS
from study.core.library_defaults import library_defaults
from tests.cases import for_each

OF_ZERO = library_defaults("deepspeed")["zero_optimization"]
BY_ID = ("stage_ignores", "accelerate_ignores", "nvme_path_lost")


def told(path: Path) -> set[str]:
    """What both commands say is ignored in a yaml, and in the json that it names: of each command the same."""
    of_arm = [mistake.said for mistake in arms.files_of(path).mistakes]
    ignored = {said.partition(":")[0].lower() for said in of_arm if " ignores " in said or " takes nvme " in said}
    found = {each.sentence.partition(":")[0].lower() for each in mistakes(sources.read(path)) if each.id in BY_ID}
    assert ignored == found
    return found


def naming(folder: Path, config: dict) -> Path:
    (folder / "ds.json").write_text(json.dumps(config))
    return of_section(folder, {"deepspeed_config_file": "ds.json"})


def of_section(folder: Path, section: dict) -> Path:
    (folder / "mine.yaml").write_text(json.dumps({"distributed_type": "DEEPSPEED", "deepspeed_config": section}))
    return folder / "mine.yaml"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_key_of_zero_that_a_stage_ignores(tmp_path, stage):
    """Also where it has DeepSpeed's default."""
    ignored = OF_STAGES_1_AND_2 if stage == 3 else OF_STAGE_3
    for key, default in OF_ZERO.items():
        if key in ("stage", *OFFLOADS):
            continue
        is_of_stage_3 = key.startswith("stage3_") or f"stage3_{key}" in OF_ZERO
        is_ignored = key in ignored or (stage < 3 and is_of_stage_3)
        for value in (default, 12345, "auto"):
            said = told(naming(tmp_path, {"zero_optimization": {"stage": stage, key: value}}))
            assert (f"stage {stage} ignores {key}" in said) == is_ignored, f"{key} = {value}"


@for_each("stage", [0, 1, 2, 3])
@for_each("part", OFFLOADS)
@for_each("device", ["none", "cpu", "nvme"])
def test_each_key_of_offloading_that_a_stage_ignores(tmp_path, part, device, stage):
    for key, default in library_defaults("deepspeed")[f"zero_optimization.{part}"].items():
        zero = {"stage": stage, part: {"device": device} | {key: device if key == "device" else default}}
        said = told(naming(tmp_path, {"zero_optimization": zero}))
        is_told = f"stage {stage} ignores {part}.{key}" in said
        assert is_told == (part == OFFLOADS[0] and device == "cpu" and stage in (1, 2) and key in OF_ITS_OFFLOAD)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_key_of_accelerate_that_is_ignored(tmp_path, stage):
    found = set()
    for key in library_defaults("accelerate")["deepspeed_config"]:
        if key not in ("deepspeed_config_file", "zero_stage"):
            for value in (True, False, "cpu", "nvme", "/disk", "none", None):
                found |= told(of_section(tmp_path, {"zero_stage": stage, key: value}))
    expected = {f"accelerate ignores {part}_nvme_path" for part in OFFLOADS}
    if stage < 3:
        flags = ("zero3_init_flag", "zero3_save_16bit_model")
        expected |= {f"accelerate ignores {key} with stage {stage}" for key in flags}
        expected.add(f"stage {stage} ignores offload_param")
    if stage == 0:
        expected.add("stage 0 ignores offload_optimizer")
    if stage in (1, 2):
        expected.add(f"stage {stage} takes nvme for cpu, and writes nothing to a disk")
    assert found == expected
