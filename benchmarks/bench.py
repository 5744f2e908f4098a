"""Compares our trainer's step time with a hand-written loop's and transformers.Trainer's. Repeats are interleaved.

python benchmarks/bench.py
python benchmarks/bench.py --model bert-base --precision bf16 --json bench.json
python benchmarks/bench.py --task wikitext --model gpt2-xl --sequence 1024

Each repeat runs `ours` (accelerate launch, study/train.py), `bare` and `hf` (rivals.py) as fresh processes, in a
different order each time. It gives a ratio of median step times for each rival. The result is the median of these
ratios with its interval over the repeats. Disturbances only make steps slower, so the fastest tenth of the steps, which
is disturbed less, is compared too.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import pandas as pd
import tyro

from study.core.arms import PACKAGE, ROOT, launcher
from study.core.errors import Stop, exit_on_stop
from study.core.options import parsed
from study.core.settings import TrainerFlags, check
from study.core.text import say, show
from study.records import store
from study.records.compare import median_with_interval
from study.sweeps.launches import options

TRAINERS = ("ours", "bare", "hf")
LAST_LINES = 20
USUAL = TrainerFlags(task="imdb", model="bert-tiny", steps=60, warmup_steps=10, sequence=128)


def main(
    settings: Annotated[TrainerFlags, tyro.conf.arg(name="")] = USUAL,
    *,
    repeats: int = 9,
    out: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> None:
    """Compare the step times of our trainer and its rivals, on one device and the embedded corpus.

    Args:
        settings: The settings of all three. Weights are random, and rows are those of the embedded corpus.
        repeats: The number of runs of each of the three. The interval is over these.
        out: Write every number into this file, with a description of the machine.
    """
    if repeats < 2:
        raise Stop(f"--repeats must be at least 2 (got {repeats})", "give 2 or more: one has no interval")
    if out and not out.resolve().parent.is_dir():
        raise Stop(f"the folder of --json {out} does not exist", "create the folder first")
    usual = vars(TrainerFlags())
    given = {name: value for name, value in vars(settings).items() if value != usual[name]}
    # Our trainer ends with an untimed evaluation, for which one batch is enough.
    given |= {"data": "embedded", "init": "random", "eval_rows": settings.micro_batch}
    check(TrainerFlags(**given))
    runs = repeat_all(given, repeats)
    result = {
        "settings": given,
        "ratios": compare(runs, settings.seed, "median_step_s"),
        "fastest_tenth": compare(runs, settings.seed, "fastest_tenth_step_s"),
        "runs": runs,
    }
    print_results(result)
    if out:
        out.write_text(json.dumps(result, indent=1, allow_nan=False, default=str) + "\n")


def repeat_all(settings: dict, repeats: int) -> dict[str, list[dict]]:
    """Run every repeat, and return the results by trainer."""
    runs: dict[str, list[dict]] = {name: [] for name in TRAINERS}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(repeats):
            shift = repeat % len(TRAINERS)
            for name in TRAINERS[shift:] + TRAINERS[:shift]:
                runs[name].append(measure(settings, name, Path(folder) / f"{name}-{repeat}"))
                step_ms = runs[name][-1]["median_step_s"] * 1000
                say(f"repeat {repeat + 1} of {repeats}  {name:<4}  {step_ms:.2f} ms")
    return runs


def measure(settings: dict, name: str, out: Path) -> dict:
    """Return step times and the first and last loss of a fresh process, and for ours the machine and the versions."""
    if name == "ours":
        command = [*launcher(ROOT / "accelerate_configs" / "single.yaml"), str(PACKAGE / "train.py")]
        command += [*options(settings), "--no-instruments", "--run-dir", str(out)]
    else:
        rival = Path(__file__).with_name("rivals.py")
        command = [sys.executable, str(rival), name, *options(settings), "--out", str(out)]
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],  # hf would take all GPUs
        "OMP_NUM_THREADS": str(settings.get("threads", 1)),  # `accelerate launch` would set it only for ours
    }
    child = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if child.returncode != 0:
        end = "\n".join(child.stdout.splitlines()[-LAST_LINES:])
        sys.exit(f"{name} failed with exit code {child.returncode}. Its last lines:\n{end}")
    if name == "ours":
        record = store.load(out)
        result = record.model_dump(mode="json", include={"commit", "dirty", "hardware", "software", "requested"})
        result |= {"step_s": record.time.step_s, "losses_first_last": [record.loss.train[0], record.loss.train[-1]]}
    else:
        result = json.loads(out.read_text())
    fastest_tenth_step_s = float(np.quantile(result["step_s"], 0.1))
    return result | {"median_step_s": median(result["step_s"]), "fastest_tenth_step_s": fastest_tenth_step_s}


def compare(runs: dict[str, list[dict]], seed: int, field: str) -> dict[str, dict]:
    """Return our step time over each rival's, in each repeat, and the median of these ratios with its interval."""
    step_s = {name: [run[field] for run in runs[name]] for name in TRAINERS}
    rng = np.random.default_rng(seed)
    ratios = {}
    for rival in TRAINERS[1:]:
        each = [ours / other for ours, other in zip(step_s["ours"], step_s[rival], strict=True)]
        ratio, low, high = median_with_interval(each, rng)
        ratios[f"ours/{rival}"] = {"ratio": ratio, "low": low, "high": high, "each": each}
    return ratios


def print_results(result: dict) -> None:
    """Print the repeats and their medians, the intervals, and the losses. A ratio above 1 means that ours is slower."""
    runs = result["runs"]
    columns = {f"{name} ms": [run["median_step_s"] * 1000 for run in runs[name]] for name in TRAINERS}
    columns |= {name: ratio["each"] for name, ratio in result["ratios"].items()}
    table = pd.DataFrame(columns, index=range(1, len(runs["ours"]) + 1))
    table.loc["median"] = table.median()
    say("")
    show([{"repeat": str(repeat)} | values for repeat, values in table.to_dict("index").items()])
    say("")
    for what, key in (("the median step", "ratios"), ("the fastest tenth of steps", "fastest_tenth")):
        for name, ratio in result[key].items():
            say(f"{name:<9}  {ratio['ratio']:.3f}  (95 %: {ratio['low']:.3f} to {ratio['high']:.3f}) of {what}")
    say("")
    losses = {name: runs[name][0]["losses_first_last"] for name in TRAINERS}
    show([{"": name, "first loss": losses[name][0], "last loss": losses[name][1]} for name in TRAINERS])


if __name__ == "__main__":
    with exit_on_stop():
        parsed(main, prog="python benchmarks/bench.py")
