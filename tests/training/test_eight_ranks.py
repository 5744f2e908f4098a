"""Every arm on eight gloo ranks has the losses of one process with all their rows, and so have hybrids of 2 x 4."""

import json

import pytest
import yaml

from study.core.arms import NAMES, ROOT
from tests.conftest import DECODERS_ALONE, launch

STEPS = 10
TOLERANCE = 1e-5  # of a loss near 6, in fp32: the sums of eight ranks are made in another order
FLAGS = ("--sequence", "32", "--train-rows", "160", "--eval-rows", "8", "--steps", str(STEPS), "--dropout", "0")
FLAGS = (*FLAGS, "--threads", "1", "--no-instruments")
DECODER = ("--task", "wikitext", "--model", "llama-micro", *FLAGS)
LARGER = ("--task", "imdb", "--model", "bert-tiny", *FLAGS)  # an eighth of less than 8 MiB stays in memory
SHARE_ROWS = dict.fromkeys(DECODERS_ALONE, 2)  # so many ranks have the same rows
EIGHT = ("--num_processes", "8")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, cache):
    """A function that returns the losses of one process with so many rows in a step."""
    known = {}

    def losses(rows: int, flags: tuple[str, ...] = DECODER) -> list[float]:
        if (rows, flags) not in known:
            folder = tmp_path_factory.mktemp("alone") / "run"
            run = launch("single", folder, *flags, "--micro-batch", str(rows), cache=cache)
            assert run.code == 0, run.output
            known[rows, flags] = run.record.loss.train
        return known[rows, flags]

    return losses


def hold(run, expected: list[float]) -> None:
    assert run.code == 0, run.output
    record = run.record
    assert record.observed.ranks == record.observed.ranks_counted == 8
    assert len(set(expected)) == STEPS, "a loss that never changes proves nothing"
    assert record.loss.train == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("arm", [name for name in NAMES if name != "single"])
def test_an_arm_on_eight_ranks_trains_like_one_process(arm, alone, tmp_path, cache):
    flags = LARGER if arm == "zero3_nvme" else DECODER
    run = launch(arm, tmp_path / "run", *flags, "--micro-batch", "2", cache=cache, launcher=EIGHT)
    hold(run, alone(16 // SHARE_ROWS.get(arm, 1), flags))


def test_hsdp_has_two_groups_of_four(alone, tmp_path, cache):
    run = launch("hsdp", tmp_path / "run", *DECODER, "--micro-batch", "2", cache=cache, launcher=EIGHT)
    hold(run, alone(16))
    assert run.record.observed.fsdp["mesh"] == [[2, 4]]


def test_hpz_in_two_groups_of_four_trains_like_one_process(alone, tmp_path, cache):
    """The arm has pairs. Its yaml and its json are copied, with four ranks in a group."""
    config = json.loads((ROOT / "accelerate_configs/deepspeed/zero3_hpz.json").read_text())
    config["zero_optimization"]["zero_hpz_partition_size"] = 4
    (tmp_path / "zero3_hpz.json").write_text(json.dumps(config))
    arm = yaml.safe_load((ROOT / "accelerate_configs/zero3_hpz.yaml").read_text())
    arm["deepspeed_config"]["deepspeed_config_file"] = str(tmp_path / "zero3_hpz.json")
    (tmp_path / "zero3_hpz.yaml").write_text(yaml.safe_dump(arm))
    path = tmp_path / "zero3_hpz.yaml"
    run = launch(path, tmp_path / "run", *DECODER, "--micro-batch", "2", cache=cache, launcher=EIGHT)
    hold(run, alone(16))
    assert run.record.observed.second_partition_ranks == 4
