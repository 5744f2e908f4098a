"""What `from study.known import ...` gives to others."""

import pytest

from study import known
from study.core.errors import Stop
from study.known import Flags, stack
from tests.conftest import python
from tests.known.test_stack import answers
from tests.predict.test_public import undocumented

ALONE = """
import runpy, sys
sys.argv[1:] = []
runpy.run_path("examples/known.py")
assert not {"torch", "pandas", "transformers"} & sys.modules.keys()
"""


def test_the_example_names_the_fault_without_torch():
    done = python("-c", ALONE)
    first, remedy, *_ = done.stdout.splitlines()
    assert first.startswith("applies: Stage 2 keeps only the last micro-batch")
    assert first.endswith("[last-pass-only]")
    assert (remedy[:14], done.stderr) == ("  What to do: ", "")


def test_from_python_the_answer_is_that_of_the_command():
    found = stack("deepspeed==0.18.4", "torch==2.13.0", flags=Flags(stage=3, peft=True))
    assert {each.fault.id: each.answer for each in found} == answers("deepspeed==0.18.4 torch==2.13.0 --stage 3 --peft")
    with pytest.raises(Stop, match="names none of"):
        stack("deepspede")


@pytest.mark.parametrize("name", [name for name, each in vars(known).items() if callable(each)])
def test_all_that_is_public_is_documented_and_typed(name):
    assert undocumented(known, name) == []
