"""What `from study.predict import ...` gives to others."""

import inspect
import types

from study import predict
from tests.cases import for_each
from tests.conftest import python

ALONE = """
import runpy, sys
sys.argv[1:] = ["bert-base", "T4", "2"]
runpy.run_path("examples/predict.py")
assert not {"torch", "pandas", "transformers"} & sys.modules.keys()
"""


def test_the_example_asks_the_predictor_without_torch():
    done = python("-c", ALONE)
    assert (done.stdout[:4], done.stderr) == ("use ", "")


def undocumented(face: types.ModuleType, name: str) -> list[str]:
    """What a public name lacks. A dataclass without a docstring has its signature in its place."""
    each = getattr(face, name)
    lacks = ["a docstring"] if inspect.getdoc(each).startswith(f"{name}(") else []
    if inspect.isfunction(each):
        signature = inspect.signature(each)
        kinds = [signature.return_annotation, *(value.annotation for value in signature.parameters.values())]
        lacks += ["types"] if inspect.Signature.empty in kinds else []
    return lacks


@for_each("name", [name for name, each in vars(predict).items() if callable(each)])
def test_all_that_is_public_is_documented_and_typed(name):
    assert undocumented(predict, name) == []
