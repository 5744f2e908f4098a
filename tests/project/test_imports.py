"""What import-linter cannot see: imports that only some runs need. Those without torch are in test_wheel.py."""

import ast

from tests.conftest import ROOT, python

TRAINER = """
import os, sys
before = os.environ["PATH"]
from study import train

ours = sorted(name for name in sys.modules if name.partition(".")[0] == "study")
assert len(ours) <= 60, ours
others = ("predict", "ledger", "watch", "conform", "report")
assert not [name for name in ours if name.partition(".")[2].partition(".")[0] in others], ours

from study.core.settings import TrainerFlags, resolve
from study.training import models, tasks
from study.training.data import load_data

settings = resolve(TrainerFlags(), gpu=False)
data = load_data(settings)
models.on_meta(settings, models.model_config(settings, data.vocabulary))
print(*{"datasets", "deepspeed", "evaluate", "pyarrow"} & sys.modules.keys())

from study.watch import watch
assert os.environ["PATH"] == before
import pyarrow  # so that an import would have been seen
print(*{"pyarrow"} & sys.modules.keys())
"""


def test_the_trainer_loads_few_of_our_modules_and_what_only_some_runs_need_where_they_need_it():
    """At most 60, and none of the other parts. The embedded corpus and a built-in model need no further library.

    `tokenizers` is not among them: transformers imports it with every model. `evaluate` comes with the
    first evaluation, in rank 0 alone. A user's script keeps its PATH.
    """
    done = python("-c", TRAINER)
    assert done.stdout.split() == ["pyarrow"], done.stderr


def test_no_two_classes_have_one_name():
    """Who greps a class finds one."""
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "study").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path))
    assert len(places) > 100
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
