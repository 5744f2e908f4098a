"""The traces that come with the package are those that a fresh trace finds, and need no torch."""

import json
import random
import zipfile

import committed_traces
import pytest

from study.predict.trace import committed, tracing
from study.predict.trace.asked import TraceOptions
from study.predict.trace.repeating import repeat
from study.predict.trace.transformer import Transformer
from tests.conftest import ROOT, python

pytestmark = pytest.mark.usefixtures("without_traces")
SOURCES = committed_traces.sources()


def compare(model: Transformer, options: TraceOptions, rows: tuple[int, ...]) -> None:
    """Assert that a committed trace is the fresh one, byte for byte and kernel by kernel."""
    known = committed.followed(model.member, options, rows)
    assert known is not None, (model.name, options, rows)
    assert json.loads(json.dumps(tracing.look(model))) == json.loads(json.dumps(model.look))
    fresh = tracing.followed(model, options, rows)
    assert [repeat(tape, fresh.stacks) for tape in fresh.tapes] == [repeat(tape, known.stacks) for tape in known.tapes]


def drawn(source: committed_traces.Source, chance: random.Random) -> Transformer:
    """A model of a member, of dimensions that no sample had; or the built-in shape of the member."""
    if source.family is None:
        return source.samples[0][0]
    model, _ = source.sample(chance)
    layers = committed.LAYERS[source.family]
    more = chance.randrange(4) if model.dimensions[layers] >= committed.MANY_LAYERS else 0
    return Transformer.of(model.dimensions | {layers: model.dimensions[layers] + more}, "drawn", dropout=source.dropout)


def test_the_file_has_every_member_once_and_no_others():
    names = [source.name for source in SOURCES]
    with zipfile.ZipFile(committed.PATH) as archive:
        assert sorted(archive.namelist()) == sorted([*names, "versions"])


# Llama, GPT-2 with dropout and in several precisions, and GPT-2 with eager attention; then all.
@pytest.mark.parametrize(
    ("source", "step"),
    [
        *zip((SOURCES[0], SOURCES[1], SOURCES[6]), (14, 12, 6), strict=True),
        *(pytest.param(source, 1, marks=pytest.mark.slow) for source in SOURCES),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_committed_trace_is_a_fresh_one(source, step):
    chance = random.Random(source.name)
    for options in source.options[::step]:
        model = drawn(source, chance)
        if committed.key(options, 1) in committed._content(source.name)["passes"]:
            tokens = chance.randrange(40, min(model.look.limit or 400, 400))
            for rows in ((1,), (2, 3)):
                compare(model, options._replace(sequence=tokens), rows)


CODE = """
import sys
sys.modules["torch"] = None
from study.predict.architecture import named
from study.predict.estimate import estimate
from study.core.arms import load_arm
from study.core.recipes import RECIPES
from study.core.shapes import config_of
from study.predict.outside.loops import OthersTraining
from study.predict.placement import Placement
from study.predict.trace.transformer import Transformer
from study.predict.training import Batch
model = Transformer.of(config_of("gpt-j-6b"), "gpt-j-6b")
how = RECIPES["bf16_cast"], Batch(rows=2, tokens=1024), Placement.of(load_arm("zero3"), 8, "cuda")
print(estimate(OthersTraining(model, *how, attention="eager")).peak_bytes)
print(estimate(OthersTraining(model, *how, attention="eager", loss="chunked")).peak_bytes)
"""


def test_without_torch_committed_traces_are_enough_and_others_are_a_sentence(tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin", "PYTHONPATH": str(ROOT)}
    done = python("-c", CODE, env=env)
    assert int(done.stdout) > 10e9
    assert "this model with these options has to be traced, and torch is not installed" in done.stderr
