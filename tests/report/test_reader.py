"""The page that reads pasted texts has some rooms and packages only: what the reader imports lies in them."""

from study.report.browser import OURS
from tests.conftest import python

HAS = {"pydantic", "packaging", "yaml"}
THEIRS = {"annotated_types", "pydantic_core", "typing_extensions", "typing_inspection"}  # what pydantic brings
PASTED = """deepspeed==0.17.6
{"zero_optimization": {"stage": 2}}
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
Llama-3-8B on 8 A100 with 4096 tokens: the loss is 0 and grad_norm 1.414"""
PROGRAM = """
import sys
before = {*sys.modules}
from study.cli import pasted
from study.configs.pasted.answer import answer

pasted.tell(answer(sys.argv[1]), False)
names = {name for name in {*sys.modules} - before if not name.startswith("_")}
print(*sorted({name.split(".")[1] for name in names if name.startswith("study.")}))
print(*sorted({name.split(".")[0] for name in names} - {*sys.stdlib_module_names}))
"""


def test_the_reader_imports_only_what_the_page_has():
    *said, rooms, packages = python("-c", PROGRAM, PASTED).stdout.splitlines()
    assert said
    assert {"configs", "known"} <= {*rooms.split()} <= {*OURS}
    assert {"study", *HAS} <= {*packages.split()} <= {"study", *HAS, *THEIRS, "cython_runtime"}
