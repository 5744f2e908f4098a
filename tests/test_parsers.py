"""Gives every parser of strangers' files arbitrary bytes and damaged values: a valid value comes out, or a Stop."""

import copy
import json
import os
import pickle
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from shaped import failed, finished

from study.core import arms
from study.core.errors import Stop
from study.ledger import texts as claims
from study.predict import question
from study.predict.outside import published
from study.records import collectives, store
from study.records.keeping import redact
from study.sweeps import protocol
from study.watch import evidence, trends
from study.watch import sources as configs
from study.watch.oom import reading

# A few examples in `make test`, many where one looks for faults: STUDY_EXAMPLES=2000 pytest tests/test_parsers.py
FEW = 12
EXAMPLES = int(os.environ.get("STUDY_EXAMPLES", FEW))
QUICK = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES == FEW,
    database=None,
    suppress_health_check=list(HealthCheck),
)
LONGEST_SENTENCE = 4000

# What breaks programs, beside what hypothesis thinks of by itself.
ODD = """.. ../../x /etc/passwd a/b ~ --help =1+1 ${HOME} {} nan inf auto none null no true 0x10 1e999 <script> $x$ %s
\\ \u202e \uff11 zero2 gpt-tiny imdb a.*[ 2026-11-21"""
TEXTS = st.sampled_from(["", "a\0b", "a\nb", "\ud7ff", "1" * 5000, "x" * 5000, *ODD.split()])
NUMBERS = st.sampled_from([0, -1, 1, 2, 2**31, 2**63, -(2**64), 10**400, 1e308, -0.0, 5e-324, True, False])
SCALARS = st.one_of(TEXTS, NUMBERS, st.none(), st.text(max_size=8), st.integers(), st.floats())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS | st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
TOKENS = """[ ] { } ( ) , : = " ' # \\ - + . & * ! | > % @ ` [[ ]] &a *a <<: !!python/object !!int !!timestamp !!float
!!binary 1 nan inf 1e999 0x10 2026-13-45 a name part claim arm true null distributed_type DEEPSPEED"""
TOKEN = st.sampled_from(["\n", "\t", "\r", " ", "\ufeff", "9" * 5000, *TOKENS.split()])
BYTES = st.one_of(st.binary(max_size=60), st.text(max_size=60), st.lists(TOKEN, max_size=25).map("".join))


def places(value: Any, place: tuple = ()) -> list[tuple]:
    """Return every place in a nested value: the keys that lead to it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place] * bool(place) + [each for key, inner in items for each in places(inner, (*place, key))]


@st.composite
def damaged(draw, whole: dict) -> dict:
    """Draw a valid value in which one place is changed, removed, or extended."""
    value = copy.deepcopy(whole)
    *above, last = draw(st.sampled_from(places(value)))
    owner = value
    for key in above:
        owner = owner[key]
    how = draw(st.sampled_from(["replace", "remove", "add"]))
    if how == "remove":
        del owner[last]
    elif how == "add" and isinstance(owner, dict):
        owner[draw(TEXTS)] = draw(VALUES)
    else:
        owner[last] = draw(VALUES)
    return value


def as_toml(value: Any) -> str:
    """Return a value as TOML, with tables in braces."""
    if isinstance(value, dict):
        return "{" + ", ".join(toml_lines(value)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(as_toml(each) for each in value if each is not None) + "]"
    return json.dumps(value) if isinstance(value, (str, bool)) else str(value)[:4000]


def toml_lines(table: dict) -> list[str]:
    return [f"{json.dumps(str(key))} = {as_toml(each)}" for key, each in table.items() if each is not None]


def toml_file(table: dict) -> str:
    return "\n".join(toml_lines(table))


def csv_file(row: dict) -> str:
    return f"{','.join(map(str, row))}\n{','.join(json.dumps(str(value)) for value in row.values())}\n"


def steps_file(row: dict) -> str:
    lines = (",".join(map(str, {**row, "step": step}.values())) for step in range(40))
    return "\n".join([",".join(trends.COLUMNS), *lines])


def read_steps(path: Path) -> None:
    tables = trends.load(path.parent)
    trends.findings(tables)


def read_cells(path: Path) -> None:
    content = protocol.read(str(path))
    for scale in protocol.SCALES:
        is_valid_or_a_sentence(protocol.cells, content, scale)


def read_and_redact(path: Path) -> None:
    redact(store.read(path).model_dump(by_alias=True))


def read_arm_and_config(path: Path) -> None:
    is_valid_or_a_sentence(arms.read, path)
    configs.flat(configs.read(path).content)


def read_rows(path: Path) -> None:
    for row in published.read(path, published.Row):
        _ = row.kind, row.step_s, row.memory_bytes


def is_valid_or_a_sentence(parse: Callable, *given: Any) -> None:
    """A parser returns, or raises a Stop with a readable sentence. Any other exception fails the test."""
    try:
        parse(*given)
    except Stop as caught:
        stop = caught
    else:
        return
    assert stop.remedy
    assert len(stop.sentence) < LONGEST_SENTENCE
    stop.sentence.encode(errors="surrogateescape")


class Parser(NamedTuple):
    read: Callable[[Path], Any]
    valid: dict  # what is damaged
    write: Callable[[dict], str | bytes] = json.dumps


PART = {"name": "p", "arm": ["zero2", "ddp"], "model": "gpt-tiny", "task": "wikitext", "reserve_s": {"gpt-tiny": 3}}
PART |= {"tiny": {"steps": 9, "seed": [1, 2]}, "paper": {"frontier": "micro_batch", "micro_batch": [1, 9]}}
PROTOCOL = {"about": "a", "document": "none", "replicates": "nothing", "part": [PART]}
CLAIM = {
    "id": "Q1-01",
    "question": "How much?",
    "quote": "a b",
    "where": "there",
    "verdict": "holds",
    "found": "780 GB.",
}
CLAIM |= {"changes": "nothing", "certainty": "low", "because": "a formula"}
CLAIM |= {"evidence": [{"kind": "formula", "expression": "states(65e9, 0, 1)", "value": 780, "unit": "GB"}]}
CLAIMS = {
    "document": "Q1",
    "title": "T",
    "address": "a",
    "read": "its PDF",
    "sentences": 3,
    "unjudged": {},
    "claim": [CLAIM],
}
ZERO3 = {"zero_stage": 3, "offload_optimizer_device": "cpu", "gradient_clipping": 1.0}
ACCELERATE = {"distributed_type": "DEEPSPEED", "num_processes": 2, "mixed_precision": "no", "deepspeed_config": ZERO3}
FSDP = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_offload_params": False}
FSDP |= {"fsdp_cpu_ram_efficient_loading": False, "fsdp_reshard_after_forward": True}
DEEPSPEED = {"gradient_clipping": 1.0, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
ROW = dict.fromkeys(published.Row.model_fields, "") | {
    "set": "known",
    "source": "s",
    "model": "gpt2",
    "n_gpus": "8",
    "memory_GB": "3",
}
CALL = {"collective_seq_id": 1, "process_group": ["0", "a"], "profiling_name": "gloo:all_reduce", "retired": False}
CALL |= {
    "state": "scheduled",
    "time_created_ns": 1,
    "input_sizes": [[3]],
    "frames": [{"filename": "a.py", "line": 1, "name": "f"}],
}
DUMP = {"entries": [CALL], "pg_config": {"0": {"ranks": "[0, 1]"}}}
PARSERS = {
    "dumps/rank_1.json": Parser(evidence.dumps, DUMP),
    "dumps/rank_1.pickle": Parser(evidence.dumps, DUMP, pickle.dumps),
    "oom.log": Parser(
        lambda path: reading.find(path.read_text(errors="replace")), {"a": "CUDA out of memory. Tried to"}
    ),
    "protocol.toml": Parser(read_cells, PROTOCOL, toml_file),
    "claims.toml": Parser(claims.read, CLAIMS, toml_file),
    "done/record.json": Parser(read_and_redact, finished("a")),
    "failed/record.json": Parser(read_and_redact, failed("b", arm="zero3")),
    "arm.yaml": Parser(read_arm_and_config, ACCELERATE),
    "fsdp.yaml": Parser(read_arm_and_config, {"distributed_type": "FSDP", "fsdp_config": FSDP}),
    "config.json": Parser(read_arm_and_config, DEEPSPEED),
    "run/steps-rank0.csv": Parser(read_steps, dict.fromkeys(trends.COLUMNS, 0.5), steps_file),
    "run/collectives-rank0.json": Parser(lambda path: collectives.load(path.parent), {"rank": 0, "groups": {"0": [0]}}),
    "rows.csv": Parser(read_rows, ROW, csv_file),
}
BOMBS = ["[" * 100_000, '{"a":' * 100_000, "a = " + "9" * 5000, "a: 0x" + "f" * 5000, "a: !!timestamp x\n"]
BOMBS += ["? {a: b}\n: c\n", '{"a": "\\ud800"}', '{"a": NaN}', b"\xff\xfe", "a." * 5000 + "a = 1", "a: !!int ''\n"]
BOMBS += ["a: &a [x]\n" + "".join(f"b{n}: [*a, *a]\n" for n in range(20)), "a: 9999-12-31T23:59:59-23:00\n"]


@pytest.mark.parametrize("name", PARSERS)
@QUICK
@given(data=st.data())
def test_a_file_is_read_or_refused_in_a_sentence(tmp_path_factory, name, data):
    parser = PARSERS[name]
    for content in (
        data.draw(st.sampled_from(BOMBS)),
        data.draw(BYTES),
        parser.write(data.draw(damaged(parser.valid))),
    ):
        path = tmp_path_factory.getbasetemp() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
        is_valid_or_a_sentence(parser.read, path)


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("bomb", range(len(BOMBS)))
def test_a_bomb_is_refused_in_a_sentence(tmp_path, name, bomb):
    path, content = tmp_path / name, BOMBS[bomb]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    is_valid_or_a_sentence(PARSERS[name].read, path)


@QUICK
@given(st.one_of(st.from_regex(r"\A\s?[-+]?[\d٣.e]{0,6} ?[KMGTkx]?i?B?(/s)?\Z"), TEXTS, st.text(max_size=20)))
@example("9" * 400 + "TB")
def test_sizes_on_the_command_line(text):
    is_valid_or_a_sentence(lambda: question.bytes_of(text, "--memory"))
    try:
        size_bytes = question.bytes_of(text, "--memory")
    except Stop:
        return
    assert 0 < size_bytes < float("inf")


@QUICK
@given(st.text(alphabet=string.printable, max_size=80))
def test_redacting_twice_is_redacting_once(text):
    assert redact(redact(text)) == redact(text)
