"""Where a step that offloads goes: arithmetic, transfer, Adam and disk, each at the rate measured on its machine.

python -m study.where reports/h200/runs/offload --peaks reports/h200/peaks.json

Nothing here is fitted. `device` is the measured step of the run that offloads nothing and is alike in all else, its
own Adam included; `transfer` is what ZeRO-Offload's paper says must cross (section 4.1: gradients out, weights in),
over the measured link; `adam` is all parameters at the measured rate of DeepSpeed's Adam in host memory; `disk` is the
bytes that the kernel counted, over the measured disk. They add up, at best and at worst, as in `theory.step_seconds`.
"""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from study import arms, record
from study.record import Stop
from study.table import show
from study.theory import offload_traffic_bytes

NOT_ALIKE = ("arm", "config_file", "run_dir", "nvme_dir", "cache_dir", "seed")
PARTS = ("device", "transfer", "adam", "disk")


@dataclass(frozen=True)
class Where:
    """A run's measured step, and what each part takes by itself: None where there is none of it, or it is not known."""

    run: str
    arm: str
    model: str
    step_s: float
    parts_s: dict[str, float | None]

    @property
    def overlapped_s(self) -> float:
        """Arithmetic with transfer, and then the host's update with the disk that feeds it."""
        device, transfer, adam, disk = (self.parts_s[name] or 0 for name in PARTS)
        return max(device, transfer) + max(adam, disk)

    @property
    def one_by_one_s(self) -> float:
        return sum(seconds or 0 for seconds in self.parts_s.values())


def main(folder: tyro.conf.Positional[Path], *, peaks: Path) -> None:
    """Hold the steps of runs that offload against what this machine gives.

    Args:
        folder: A folder with runs in it, at any depth; those that offload nothing among them.
        peaks: What study.peaks wrote on that machine.
    """
    try:
        rates = json.loads(peaks.read_text())
    except (OSError, ValueError):
        raise Stop(f"--peaks {peaks} cannot be read", "make it there, with python -m study.peaks --json") from None
    found = examine([record.load(path.parent) for path in sorted(folder.glob("**/record.json"))], rates)
    if not found:
        raise Stop(f"no run below {folder} offloads and is done", "run study sweep offload first")
    show([{"run": it.run, "arm": it.arm, "model": it.model, "s/step": it.step_s}
          | {f"{name} s": it.parts_s[name] for name in PARTS}
          | {"all overlapped s": it.overlapped_s, "one by one s": it.one_by_one_s} for it in found])  # fmt: skip


def examine(made: list[dict], rates: dict) -> list[Where]:
    """Every finished run that offloads, with its parts."""
    done = [one for one in made if one["status"] == "done" and one["time"].get("step_s")]
    found = []
    for one in done:
        arm = arms.read(arms.all_paths()[one["requested"]["arm"]])
        if arm.offload_optimizer == "none" or one["requested"].get("virtual_ranks"):
            continue
        plain = [other for other in done if alike(one, other) and offloads_nothing(other)]
        device_s = statistics.median([other["time"]["median_step_s"] for other in plain]) if plain else None
        parts = {"device": device_s, "transfer": transfer_s(one, rates), "adam": adam_s(one, rates),
                 "disk": disk_s(one, rates)}  # fmt: skip
        if any(seconds is not None for seconds in parts.values()):
            asked = one["requested"]
            found.append(Where(one["run_id"], asked["arm"], asked["model"], one["time"]["median_step_s"], parts))
    return found


def alike(one: dict, other: dict) -> bool:
    """Whether two runs asked for the same, their arms aside, on as many ranks."""
    told = [{key: value for key, value in made["requested"].items() if key not in NOT_ALIKE} for made in (one, other)]
    stages = [made["observed"]["stage"] for made in (one, other)]
    return told[0] == told[1] and stages[0] == stages[1] and one["observed"]["ranks"] == other["observed"]["ranks"]


def offloads_nothing(made: dict) -> bool:
    return made["observed"]["offload_optimizer"] == "none" and made["observed"]["offload_param"] == "none"


def transfer_s(made: dict, rates: dict) -> float | None:
    """Half of the paper's bytes each way; both ways have a link of their own, and DeepSpeed uses them in turn."""
    links = rates["copy_bytes_per_s"]
    if "host to device" not in links:
        return None
    element = 2 if made["requested"]["precision"] == "bf16_cast" else 4
    half = offload_traffic_bytes(made["observed"]["parameters"], made["observed"]["ranks"], element) / 2
    return half / links["device to host"]["median"] + half / links["host to device"]["median"]


def adam_s(made: dict, rates: dict) -> float | None:
    """All ranks of a machine share its cores, so that all its parameters count."""
    rate = rates["host_adam_parameters_per_s"]
    return made["observed"]["parameters"] / rate["median"] if rate else None


def disk_s(made: dict, rates: dict) -> float | None:
    """What all ranks wrote and read in the timed steps, per step."""
    disk, ranks = rates["disk_bytes_per_s"], made["memory"]["per_rank"]
    moved = [[rank.get(f"nvme_{way}_bytes") for rank in ranks] for way in ("written", "read")]
    if made["observed"]["offload_optimizer"] != "nvme" or not disk or None in moved[0] + moved[1]:
        return None
    return (sum(moved[0]) / disk["written"] + sum(moved[1]) / disk["read"]) / len(made["time"]["step_s"])


if __name__ == "__main__":
    try:
        tyro.cli(main, prog="study.where", description=__doc__.partition("\n")[0])
    except Stop as stop:
        sys.exit(f"{stop.what}. What to do: {stop.remedy}.")
