"""The page that reads pasted texts has some rooms of the package only: what the reader imports lies in them."""

from study.report.browser import OURS
from tests.conftest import python

PASTED = 'deepspeed==0.17.6\n{"zero_optimization": {"stage": 2}}\ntorch.OutOfMemoryError: CUDA out of memory.'
PROGRAM = """
import sys
from study.cli import pasted
from study.configs.pasted.answer import answer

pasted.tell(answer(sys.argv[1]), False)
print(*sorted({name.split(".")[1] for name in sys.modules if name.startswith("study.")}))
"""


def test_the_reader_imports_only_rooms_that_the_page_has():
    *said, rooms = python("-c", PROGRAM, PASTED).stdout.splitlines()
    assert said
    assert {*rooms.split()} <= {*OURS}
    assert {"configs", "known"} <= {*rooms.split()}
