"""What a stranger may give: code of models is refused, and study.core opens files. Ruff's S rules do the rest."""

import ast
import re

from study.core.arms import PACKAGE

# Calls that can run code which comes with a model or a data set.
RUN_CODE = {"from_pretrained", "load_dataset", "load_dataset_builder", "load_metric", "pipeline"}
UNPICKLES = re.compile(r"\btorch\.load\((?!.*weights_only=True\))|\bnp\.load\(|\bnumpy\.load\(")
SOURCES = {path: path.read_text() for path in PACKAGE.rglob("*.py") if "reproductions" not in path.parts}


def test_code_of_others_is_refused_wherever_something_could_ask():
    nodes = [node for source in SOURCES.values() for node in ast.walk(ast.parse(source))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    calls = [call for call in calls if call.func.attr in RUN_CODE]
    assert len(calls) >= 4, "a config, a tokenizer, weights, data"
    silent = [call for call in calls if not any(word.arg == "trust_remote_code" for word in call.keywords)]
    assert [ast.unparse(call) for call in silent] == []


def test_nothing_unpickles():
    assert not [path for path, source in SOURCES.items() if UNPICKLES.search(source)]
