"""Gives every parser of strangers' files arbitrary values. They are valid, or a Stop with one sentence."""

import contextlib
import copy
import json
import os
import string
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from shaped import failed, finished

from study.errors import Stop
from study.extras.offline import parcel
from study.extras.slurm import slurm
from study.io import parsing as texts
from study.ledger import files as claims
from study.predictor.advice import question
from study.predictor.outside import published
from study.records import collectives, seal, store
from study.records.privacy import redact
from study.spec import arms
from study.spec.settings import Settings, build
from study.sweeps import protocol
from study.watcher import sources as configs

# A few examples in `make test`, many where one looks for faults: STUDY_EXAMPLES=2000 pytest tests/test_parsers.py
FEW = 12
EXAMPLES = int(os.environ.get("STUDY_EXAMPLES", FEW))
QUICK = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES == FEW,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
LONGEST_SENTENCE = 4000

# --- values --------------------------------------------------------------------------------------------------------

# What breaks programs, beside what hypothesis thinks of by itself.
TEXTS = st.sampled_from(
    [
        *("", ".", "..", "../../x", "/etc/passwd", "a/b", "a\0b", "a\nb", "~", "-", "--help", "=1+1", "${HOME}", "{}"),
        *(
            "nan",
            "inf",
            "auto",
            "none",
            "null",
            "no",
            "true",
            "0x10",
            "1e999",
            "1" * 5000,
            "x" * 5000,
            "<script>",
            "$x$",
        ),
        *("\u202e", "\ud7ff", "é", "\uff11", "zero2", "gpt-tiny", "imdb", "a.*[", "%s", "\\", "train", "2026-11-21"),
    ]
)
NUMBERS = st.sampled_from([0, -1, 1, 2, 2**31, 2**63, -(2**64), 10**400, 1e308, -0.0, 5e-324, True, False])
SCALARS = st.one_of(TEXTS, NUMBERS, st.none(), st.text(max_size=8), st.integers(), st.floats())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS | st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def places(value, place: tuple = ()) -> list[tuple]:
    """Every place in a nested value: the keys that lead to it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place] * bool(place) + [each for key, inner in items for each in places(inner, (*place, key))]


@st.composite
def spoiled(draw, whole: dict):
    """A valid value in which one to three places are changed, removed, or extended."""
    value = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        *above, last = draw(st.sampled_from(places(value)))
        owner = value
        for key in above:
            owner = owner[key]
        how = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if how == "replace":
            owner[last] = draw(VALUES)
        elif how == "remove":
            del owner[last]
        elif isinstance(owner, dict):
            owner[draw(TEXTS)] = draw(VALUES)
        if not places(value):
            break
    return value


def as_toml(value) -> str:
    """A value as TOML, with tables in braces. Values that TOML cannot hold are left out."""
    if isinstance(value, dict):
        return "{" + ", ".join(as_lines(value)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(as_toml(each) for each in value if each is not None) + "]"
    if isinstance(value, bool) or value is None:
        return str(bool(value)).lower()
    if isinstance(value, (int, float)):
        return repr(value) if abs(value) < 10**4000 else hex(value)
    return json.dumps(value) if isinstance(value, str) else str(value)


def as_lines(table: dict) -> list[str]:
    return [f"{json.dumps(str(key))} = {as_toml(each)}" for key, each in table.items() if each is not None]


def as_file(value: dict) -> str:
    """A table at the top of a TOML file; lists of tables under their heads, as claims and protocols want them."""
    lines, tables = [], []
    for key, each in value.items():
        if isinstance(each, list) and each and all(isinstance(table, dict) for table in each) and key.isidentifier():
            for table in each:
                tables += [f"[[{key}]]", *as_lines(table)]
        else:
            lines += as_lines({key: each})
    return "\n".join([*lines, *tables]) + "\n"


def is_valid_or_a_sentence(parse: Callable, *given) -> None:
    """A parser returns a value, or raises a Stop with a readable sentence."""
    try:
        parse(*given)
    except Stop as caught:
        stop = caught
    else:
        return
    assert stop.remedy
    assert len(stop.sentence) < LONGEST_SENTENCE, f"{len(stop.sentence)} characters"
    stop.sentence.encode(errors="surrogateescape")


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """A function that puts a content into a file with this suffix, the same each time."""
    folder = tmp_path_factory.mktemp("parsers")

    def put(content: str | bytes, name: str) -> Path:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
        return path

    return put


# --- every parser on bytes -----------------------------------------------------------------------------------------


def cells_of(path: Path) -> None:
    content = protocol.read(str(path))
    for scale in protocol.SCALES:
        is_valid_or_a_sentence(lambda at=scale: [cell.name for cell in protocol.cells(content, at)])


def compared(path: Path) -> dict:
    return configs.flat(configs.read(path).content)


READERS = {
    "protocol.toml": cells_of,
    "claims.toml": claims.read_all,
    "record.json": store.read,
    "arm.yaml": arms.read,
    "config.yaml": compared,
    "config.json": compared,
    "manifest.jsonl": lambda path: seal.find([path.parent]),
    "collectives-rank0.json": lambda path: collectives.load(path.parent),
    "rows.csv": published.read_rows,
    "sources.toml": published.read_sources,
    "cluster.toml": slurm.read,
    "records-manifest.json": lambda path: parcel._manifest(path.parent),
}
WORDS = """[[ ]] &a *a <<: !!python/object !!int !!timestamp !!float !!binary 1 nan inf 1e999 0x10 2026-13-45 a name
part claim arm true null distributed_type DEEPSPEED"""
TOKENS = st.sampled_from([*"[]{}(),:=\"'#\n\t\r -+.&*!|>%@`~\ufeff", *WORDS.split(), "9" * 5000])
TEXT = st.one_of(st.binary(max_size=60), st.text(max_size=60), st.lists(TOKENS, max_size=25).map("".join))


@pytest.mark.parametrize("name", READERS)
@QUICK
@given(content=TEXT)
@example(content="[" * 100_000)
@example(content='{"a":' * 100_000)
@example(content="a = " + "9" * 5000)
@example(content="a = 0x" + "f" * 5000)
@example(content="a: 0x" + "f" * 5000)
@example(content="a: !!timestamp x\n")
@example(content="a: !!int ''\n")
@example(content="a: !!bool x\n")
@example(content="a: 9999-12-31T23:59:59-23:00\n")
@example(content="? {a: b}\n: c\n")
@example(content='{"a": "\\ud800"}')
@example(content='{"a": NaN}')
@example(content=b"\xff\xfe")
@example(content="a: &a [x]\n" + "".join(f"b{n}: [*a, *a]\n" for n in range(20)))
@example(content="a." * 5000 + "a = 1")
def test_any_bytes_are_read_or_refused_in_a_sentence(file, name, content):
    is_valid_or_a_sentence(READERS[name], file(content, f"{name}-folder/{name}"))


# --- each on what is nearly valid ----------------------------------------------------------------------------------

PROTOCOL = {
    **{"about": "a", "document": "none", "replicates": "nothing"},
    "part": [
        {"name": "p", "arm": ["zero2", "ddp"], "model": "gpt-tiny", "task": "wikitext", "reserve_s": {"gpt-tiny": 3}}
        | {"tiny": {"steps": 9, "seed": [1, 2]}, "paper": {"frontier": "micro_batch", "micro_batch": [1, 9]}},
        {"name": "q", "script": "as_printed", "repair": "none", "arm": "single", "ranks": 1, "tiny": {"lr": 1e-3}},
    ],
}


def with_part(**values) -> dict:
    return PROTOCOL | {"part": [PROTOCOL["part"][0] | values]}


@QUICK
@given(spoiled(PROTOCOL))
@example(with_part(tiny={"steps": 9, "seed": list(range(200)), "lr": [0.1] * 200}))
@example(with_part(paper={"frontier": "micro_batch", "micro_batch": [1, 10**12]}))
@example(with_part(paper={"frontier": "model", "model": ["gpt-tiny"] * 20_000}))
def test_protocols(file, content):
    is_valid_or_a_sentence(cells_of, file(as_file(content), "mine.toml"))


CLAIM = {
    **{"id": "Q1-01", "quote": "a b", "where": "there", "says": "It is so", "kind": "memory", "value": 780},
    **{"unit": "GB", "relation": "above", "tolerance": 0.001, "conditions": {"parameters": 65e9}, "check": "theory"},
    "with": {"quantity": "states_bytes", "parameters": 65e9, "stage": 0, "ranks": 1},
    "unsaid": {"recipe": ["mixed-adam", "bf16-adam"]},
}
CLAIMS = {
    **{"document": "Q1", "title": "T", "read": "its PDF", "tolerances": {"0.001": "three digits"}},
    "source": [{"id": "s", "title": "t", "address": "a", "read": "original"}],
    "claim": [
        CLAIM,
        CLAIM | {"id": "Q1-02", "check": "arithmetic", "with": {"plus": [0.5, 2]}, "unit": "", "unsaid": {}},
        CLAIM
        | {"id": "Q1-03", "check": "tried", "with": {"what": "reproduction", "name": "sgd_becomes_adam"}, "unsaid": {}}
        | {"value": True, "unit": "", "relation": "equal", "tolerance": 0},
    ],
}


@QUICK
@given(spoiled(CLAIMS))
def test_claims(file, content):
    text = as_file(content)
    is_valid_or_a_sentence(claims.read_all, file(f"fixed = 2026-11-21\n{text}", "mine.toml"))


@QUICK
@given(st.one_of(spoiled(finished("a")), spoiled(failed("b", arm="zero3"))))
def test_records(file, content):
    path = file(json.dumps(content), "run/record.json")
    is_valid_or_a_sentence(lambda: redact(store.load(path.parent).model_dump(by_alias=True)))


ACCELERATE = {
    **{"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_processes": 2, "num_machines": 1},
    **{"mixed_precision": "no", "machine_rank": 0},
    "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu", "gradient_clipping": 1.0},
}
FSDP = ACCELERATE | {
    "distributed_type": "FSDP",
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_offload_params": False}
    | {"fsdp_cpu_ram_efficient_loading": False, "fsdp_reshard_after_forward": True},
}


@QUICK
@given(st.one_of(spoiled(ACCELERATE), spoiled(FSDP)))
def test_accelerate_configs(file, content):
    try:
        text = yaml.safe_dump(content)
    except (yaml.YAMLError, ValueError):
        text = json.dumps(content)
    is_valid_or_a_sentence(arms.read, file(text, "mine.yaml"))
    is_valid_or_a_sentence(compared, file(text, "mine.yaml"))


DEEPSPEED = {
    **{"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 1.0, "bf16": {"enabled": True}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}},
}


@QUICK
@given(spoiled(DEEPSPEED))
def test_deepspeed_configs(file, content):
    beside = file(json.dumps(content), "ds.json")
    yaml_text = f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: {beside}\n"
    is_valid_or_a_sentence(arms.read, file(yaml_text, "mine.yaml"))
    is_valid_or_a_sentence(compared, beside)


ROW = dict.fromkeys(published.Row.model_fields, "") | {
    "source": "s",
    "model": "gpt2",
    "n_gpus": "8",
    "memory_GB": "3.5",
}


@QUICK
@given(spoiled(ROW), st.sampled_from([",", ";", "\t"]))
def test_rows_of_others(file, content, separator):
    names = [str(name) for name in content]
    line = separator.join(json.dumps(str(value)) for value in content.values())
    is_valid_or_a_sentence(
        lambda path: [(row.kind, row.step_s, row.memory_bytes) for row in published.read_rows(path)],
        file(f"{','.join(names)}\n{line}\n", "rows.csv"),
    )


SIZE = st.from_regex(r"\A\s?[-+]?[\d٣.e]{0,6} ?[KMGTkx]?i?B?(/s)?\Z")


@QUICK
@given(st.one_of(SIZE, TEXTS, st.text(max_size=20)))
@example("9" * 400 + "TB")
@example("9" * 5000)
@example("1.." + "9" * 5000)
def test_sizes_and_counts_on_the_command_line(text):
    for parse in (
        lambda: question.bytes_of(text, "--memory"),
        lambda: question.bytes_of(text, "--disk", "B/s"),
        lambda: question.counts_of(text),
    ):
        is_valid_or_a_sentence(parse)
    with contextlib.suppress(Stop):
        assert 0 < question.bytes_of(text, "--memory") < float("inf")


@QUICK
@given(st.dictionaries(st.sampled_from([*Settings.__dataclass_fields__, "other"]), SCALARS, max_size=4))
def test_settings(values):
    is_valid_or_a_sentence(build, values, "mine.toml")


@QUICK
@given(VALUES)
def test_a_value_that_is_read_is_not_changed(value):
    """The limits refuse or let pass; they change nothing."""
    try:
        text = json.dumps(value, allow_nan=False)
        assert texts.from_json(text) == json.loads(text)
    except ValueError:
        return
    texts.refuse_excess(value)


@QUICK
@given(st.text(alphabet=string.printable, max_size=80))
def test_leaving_out_what_is_private_happens_once(text):
    """Sharing a record twice gives the same result."""
    assert redact(redact(text)) == redact(text)
