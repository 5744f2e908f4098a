"""Gives every parser of files damaged values: a valid value comes out, or a Stop."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from study.configs import differences, mistakes
from study.configs import sources as configs
from study.configs.oom import reading
from study.configs.oom.explain import Described, explain
from study.configs.pasted import condense
from study.core import arms, files
from study.core.errors import Stop
from study.core.shapes import config_of
from study.predict.architecture import named
from study.predict.front import Wanted
from study.records import collectives, store
from study.records.keeping import redact
from study.watch import hangs
from tests.conftest import ROOT, table
from tests.shaped import failed, finished

WRONG = (None, -1, 2**64, 1e300, True, "../../etc/passwd", [[]], {"a": {}})  # for each value of a valid file


def damaged(whole: dict) -> Iterator[dict]:
    """Yield a valid value with one of its values missing or wrong, for each of its values."""
    for key, value in whole.items():
        yield {name: each for name, each in whole.items() if name != key}
        for wrong in WRONG:
            yield whole | {key: wrong}
        if isinstance(value, dict):
            for inner in damaged(value):
                yield whole | {key: inner}


def read_config(path: Path) -> None:
    """Compare it with itself, look for its mistakes, and take from it what an error about memory needs."""
    source = configs.read(path)
    differences.compare(source, source)
    list(mistakes.mistakes(source))
    explain(reading.find("CUDA out of memory. Tried to allocate 1.00 GiB."), Wanted(), Described(config=path))


def read_hang(path: Path) -> None:
    logs = collectives.load(path.parent)
    hangs.state(logs)
    hangs.causes(logs)


def read_and_redact(path: Path) -> None:
    redact(store.read(path).model_dump(by_alias=True))


def read_arm_and_config(path: Path) -> None:
    is_valid_or_a_sentence(arms.read, path)
    files.flat(configs.read(path).content)


def is_valid_or_a_sentence(parse: Callable, *given: Any) -> None:
    """A parser returns, or raises a Stop with a readable sentence. Any other exception fails the test."""
    stop = Stop("nothing is wrong", "go on")
    try:
        parse(*given)
    except Stop as caught:
        stop = caught
    assert stop.remedy
    assert len(stop.sentence) < 4000
    stop.sentence.encode(errors="surrogateescape")


class Parser(NamedTuple):
    read: Callable[[Path], Any]
    valid: dict  # what is damaged
    write: Callable[[dict], str | bytes] = json.dumps


CONFIGS = ROOT / "accelerate_configs"
VALID = table("cli/valid.toml")
DEEPSPEED, DUMP, LOG = VALID["deepspeed"], VALID["dump"], VALID["log"]
FAILED = failed("b", arm="zero3")
PARSERS = {
    "dumps/rank_1.json": Parser(lambda path: hangs.dumps(path.parent), DUMP),
    "oom.log": Parser(
        lambda path: reading.find(path.read_text(errors="replace")), {"a": "CUDA out of memory. Tried to"}
    ),
    "done/record.json": Parser(read_and_redact, finished("a")),
    "failed/record.json": Parser(read_and_redact, {"error": FAILED["error"]}, lambda part: json.dumps(FAILED | part)),
    "hang/collectives-rank0.json": Parser(read_hang, LOG),
    "arm.yaml": Parser(read_arm_and_config, VALID["accelerate"]),
    "accelerate.yaml": Parser(read_config, VALID["accelerate"]),
    "ds.json": Parser(read_config, DEEPSPEED),
    "trainer.json": Parser(
        read_config, {"per_device_train_batch_size": "8", "output_dir": "x", "deepspeed": DEEPSPEED}
    ),
    "fsdp.yaml": Parser(read_arm_and_config, yaml.safe_load((CONFIGS / "fsdp2.yaml").read_text())),
    "model/config.json": Parser(lambda path: named(str(path.parent)).member, VALID["model"]),
    "gpt/config.json": Parser(lambda path: named(str(path.parent)).member, config_of("gpt2")),
    "config.json": Parser(read_arm_and_config, json.loads((CONFIGS / "deepspeed/zero3_hpz.json").read_text())),
}
BOMBS = ["[" * 100_000, '{"a":' * 100_000, "a = " + "9" * 5000, "a: 0x" + "f" * 5000, "a: !!timestamp x\n"]
BOMBS += ["? {a: b}\n: c\n", '{"a": "\\ud800"}', '{"a": NaN}', b"\xff\xfe", "a." * 5000 + "a = 1", "a: !!int ''\n"]
BOMBS += ["a: &a [x]\n" + "".join(f"b{n}: [*a, *a]\n" for n in range(20)), "a: 9999-12-31T23:59:59-23:00\n"]
# Aliases that stand for 86 million values, and two that lead back to themselves; nested where a config has a value.
NINE = ", ".join(f"p{n}: *a{{}}" for n in range(9))
BILLION = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{{NINE.replace('{}', str(n - 1))}}}\n" for n in range(1, 9))
BOMBS += [
    f"{BILLION}zero_optimization: {{stage: 2}}\n",
    "gradient_clipping: &g [*g]\n",
    "zero_optimization: &z {stage: *z}\n",
]
BOMBS += ["gradient_clipping: 0x" + "f" * 5000, "0x" + "f" * 5000 + ": 1\nzero_optimization: {stage: 2}\n"]
BOMBS += [f"zero_optimization: {'[' * depth}{']' * depth}" for depth in (40, 300)]


@pytest.mark.parametrize("name", PARSERS)
def test_a_damaged_file_is_refused_in_a_sentence(tmp_path, name):
    parser = PARSERS[name]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    contents = [parser.write(value) for value in damaged(parser.valid)]
    whole = parser.write(parser.valid)
    for content in (*BOMBS, *contents, whole[: len(whole) // 2], ""):
        path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
        is_valid_or_a_sentence(parser.read, path)


# --- what is bounded: the names of files, numbers, sizes of what a text stands for ---------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "rank_4000000000.json",
        "rank_99999999999999999999.json",
        "trace_rank_0_final.json",
        "rank_0a.json",
        "rank_1².json",
    ],
)
def test_a_name_without_a_rank_is_no_dump(tmp_path, name):
    (tmp_path / f"{name}.json").write_text(json.dumps(DUMP))
    assert hangs.dumps(tmp_path) == []


def test_what_a_dump_lacks_is_named(tmp_path):
    (tmp_path / "rank_0.json").write_text('{"entries": []}')
    with pytest.raises(Stop, match="it does not have 'pg_config'"):
        hangs.dumps(tmp_path)


@pytest.mark.parametrize("sizes", [[[10**9] * 50_000], [["a" * 1000, 10**9]], [[[1, 2], 10**9]], [["9" * 4000] * 60]])
def test_a_size_in_a_dump_is_one_that_64_bits_hold(tmp_path, sizes):
    (tmp_path / "rank_0.json").write_text(json.dumps(DUMP | {"entries": [DUMP["entries"][0] | {"input_sizes": sizes}]}))
    with pytest.raises(Stop, match="is no Flight Recorder dump"):
        hangs.dumps(tmp_path)


@pytest.mark.parametrize("wrong", VALID["wrong_in_a_log"])
def test_ranks_and_times_in_a_log_are_those_of_a_training(tmp_path, wrong):
    (tmp_path / "collectives-rank0.json").write_text(json.dumps(LOG | wrong))
    with pytest.raises(Stop, match="is not a log of collectives"):
        collectives.load(tmp_path)


def test_many_groups_and_many_ranks_are_told_at_once(tmp_path):
    recent = [LOG["recent"][0] | {"group": str(number)} for number in range(40_000)]
    (tmp_path / "collectives-rank0.json").write_text(
        json.dumps(LOG | {"ranks": 2**17 - 1, "groups": {}, "recent": recent})
    )
    logs = collectives.load(tmp_path)
    assert hangs.hangs(logs)[0].sentence.startswith("Ranks 1, 2, 3, 4, 5, 6, 7, 8, ... left no log")
    assert "unequal batches" in hangs.hangs(logs)[0].remedy


def test_a_text_that_stands_for_too_much_is_refused_before_it_is_made():
    for text, why in ((BILLION, "2,000,000 values"), ("a: &a [*a]", "30 deep"), ("a: 0x" + "f" * 300, "1000 bits")):
        with pytest.raises(ValueError, match=why):
            files.from_yaml(text)
    assert files.from_yaml("a: &a {b: 1}\nc: *a") == {"a": {"b": 1}, "c": {"b": 1}}, "an alias by itself is harmless"


def test_a_record_of_millions_of_lists_is_refused(tmp_path):
    (tmp_path / "record.json").write_text('{"observed": {"deepspeed": {"a": [' + "[]," * 3_000_000 + "[]]}}}")
    with pytest.raises(Stop, match="more than 2,000,000 values"):
        store.read(tmp_path / "record.json")


def test_of_an_endless_input_a_part_is_read(monkeypatch):
    with open("/dev/zero") as zero:  # noqa: PTH123  it is the standard input
        monkeypatch.setattr(condense.sys, "stdin", zero)
        monkeypatch.setattr(condense, "MAX_BYTES", 2**24)
        assert 0 < len(condense.standard_input()) < 2**21
