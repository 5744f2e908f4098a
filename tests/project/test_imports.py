"""What import-linter cannot see: modules that load without torch for real, and imports that only some runs need."""

from tests.conftest import ROOT, python

HEAVY = {"torch", "accelerate", "deepspeed", "transformers", "datasets"}
WITHOUT_TORCH = ("core", "records", "sweeps", "predict", "predict/outside", "watch/oom", "ledger", "report", "cli")


def loaded_by(code: str, names: set[str]) -> set[str]:
    """Which of these modules a fresh process has loaded after running some code."""
    code += f"\nimport sys\nprint(*{names!r} & sys.modules.keys())"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_reading_judging_and_reporting_load_without_torch():
    files = [file for package in WITHOUT_TORCH for file in (ROOT / "study" / package).glob("[!_]*.py")]
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    assert loaded_by(f"import {', '.join(modules)}", HEAVY) == set()


TRAINER = """
import os, sys
before = os.environ["PATH"]
from study import train

ours = sorted(name for name in sys.modules if name.partition(".")[0] == "study")
assert len(ours) <= 60, ours
others = ("predict", "ledger", "watch", "conform", "report")
assert not [name for name in ours if name.partition(".")[2].partition(".")[0] in others], ours

from study.core.settings import Flags, resolve
from study.training import models, tasks
from study.training.data import load_data

settings = resolve(Flags(), gpu=False)
data = load_data(settings)
models.on_meta(settings, models.model_config(settings, data.vocabulary))
print(*{"datasets", "deepspeed", "evaluate", "pyarrow"} & sys.modules.keys())

from study.watch import watch
assert os.environ["PATH"] == before
import pyarrow  # so that an import would have been seen
"""


def test_the_trainer_loads_few_of_our_modules_and_what_only_some_runs_need_where_they_need_it():
    """At most 60, and none of the other parts. The embedded corpus and a built-in model need no further library.

    `tokenizers` is not among them: transformers imports it with every model. `evaluate` comes with the
    first evaluation, in rank 0 alone. A user's script keeps its PATH.
    """
    assert loaded_by(TRAINER, {"pyarrow"}) == {"pyarrow"}
