"""Gives every parser of files damaged values: a valid value comes out, or a Stop."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from conftest import ROOT
from shaped import failed, finished

from study.core import arms
from study.core.errors import Stop
from study.records import store
from study.records.keeping import redact
from study.watch import hangs
from study.watch import sources as configs
from study.watch.oom import reading

WRONG = [None, -1, 2**64, "../../etc/passwd", [[]], {"a": {}}]  # in the place of each value of a valid file


def damaged(whole: dict) -> Iterator[dict]:
    """Yield a valid value with one of its values missing or wrong, for each of its values."""
    for key, value in whole.items():
        yield {name: each for name, each in whole.items() if name != key}
        for wrong in WRONG:
            yield whole | {key: wrong}
        if isinstance(value, dict):
            for inner in damaged(value):
                yield whole | {key: inner}


def read_and_redact(path: Path) -> None:
    redact(store.read(path).model_dump(by_alias=True))


def read_arm_and_config(path: Path) -> None:
    is_valid_or_a_sentence(arms.read, path)
    configs.flat(configs.read(path).content)


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
ZERO3 = {"zero_stage": 3, "offload_optimizer_device": "cpu", "gradient_clipping": 1.0}
ACCELERATE = {"distributed_type": "DEEPSPEED", "num_processes": 2, "mixed_precision": "no", "deepspeed_config": ZERO3}
CALL = {"collective_seq_id": 1, "process_group": ["0", "a"], "profiling_name": "gloo:all_reduce", "retired": False}
FRAME = {"filename": "a.py", "line": 1, "name": "f"}
CALL |= {"state": "scheduled", "time_created_ns": 1, "input_sizes": [[3]], "frames": [FRAME]}
FAILED = failed("b", arm="zero3")
DUMP = {"entries": [CALL], "pg_config": {"0": {"ranks": "[0, 1]"}}}
PARSERS = {
    "dumps/rank_1.json": Parser(lambda path: hangs.dumps(path.parent), DUMP),
    "oom.log": Parser(
        lambda path: reading.find(path.read_text(errors="replace")), {"a": "CUDA out of memory. Tried to"}
    ),
    "done/record.json": Parser(read_and_redact, finished("a")),
    "failed/record.json": Parser(read_and_redact, {"error": FAILED["error"]}, lambda part: json.dumps(FAILED | part)),
    "arm.yaml": Parser(read_arm_and_config, ACCELERATE),
    "fsdp.yaml": Parser(read_arm_and_config, yaml.safe_load((CONFIGS / "fsdp2.yaml").read_text())),
    "config.json": Parser(read_arm_and_config, json.loads((CONFIGS / "deepspeed" / "zero3_hpz.json").read_text())),
}
BOMBS = ["[" * 100_000, '{"a":' * 100_000, "a = " + "9" * 5000, "a: 0x" + "f" * 5000, "a: !!timestamp x\n"]
BOMBS += ["? {a: b}\n: c\n", '{"a": "\\ud800"}', '{"a": NaN}', b"\xff\xfe", "a." * 5000 + "a = 1", "a: !!int ''\n"]
BOMBS += ["a: &a [x]\n" + "".join(f"b{n}: [*a, *a]\n" for n in range(20)), "a: 9999-12-31T23:59:59-23:00\n"]


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
