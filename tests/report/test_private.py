"""What a report may not tell, and what a stranger may not put into it: planted in every text of a record."""

import csv
import html.parser
import lzma
import re
import zipfile
from pathlib import Path

import pandas as pd
import pytest
from shaped import failed, finished, put
from test_report import quick  # noqa: F401  a fixture

from study.ledger import texts
from study.records.keeping import redact
from study.records.schema import Record
from study.report.notebook import Book
from study.report.tables import no_formula

PRIVATE = {
    "a path": "/home/alice/thesis/plan.txt",
    "a token": "hf_AbCdEfGhIjKlMnOpQrSt",
    "a key": "WANDB_API_KEY=0123456789abcdef",
    "a login": "https://alice:s3cret0@example.org/x",
    "an e-mail": "alice@example.org",
    "an address": "tcp://10.1.2.3:29500",
    "a share": "10.1.2.3/home/alice/plan",
    "a machine": "node7.cluster.internal",
    "a user on a machine": "alice@gpu7: refused",
}
TELLS = ("alice", "thesis", "AbCdEfGh", "0123456789abcdef", "s3cret0", "10.1.2.3", "node7", "gpu7")
MARKUP = "<script>alert(1)</script><img src=x onerror=alert(1)> ![x](http://evil.org/a.png) [x](javascript:alert(1))"


def planted(value, text: str, where: str = ""):
    """A record with a text added to every text of it. A value that the record does not take stays as it was."""
    if isinstance(value, dict):
        return {name: planted(each, text, f"{where}.{name}") for name, each in value.items()}
    if isinstance(value, list):
        return [planted(each, text, where) for each in value]
    return f"={value} {text}" if isinstance(value, str) and where not in KEPT else value


# What decides that it is a record of a run that is done, and what only has some values.
KEPT = {".status", ".run_id", ".started_utc", ".finished_utc", ".commit", ".observed.backend"}
KEPT |= {f".requested.{name}" for name in ("task", "init", "precision", "attention", "repair")}


@pytest.fixture
def stranger(tmp_path):
    """Runs of a stranger who put something into every text."""
    text = f"{' '.join(PRIVATE.values())} {MARKUP}"
    for number, content in enumerate([finished("a", "zero2"), finished("b", "ddp"), failed("c", arm="zero3")]):
        put(tmp_path / "runs", planted(content, text) | {"run_id": content["run_id"]})
        folder = tmp_path / "runs" / content["run_id"]
        for name in ("log.txt", "output.txt", "steps.jsonl"):
            (folder / name).write_text(f"{number} {text}\n")
    return tmp_path / "runs"


FRAMES = ("{}", "before {} after", '{{"x": "{}"}}', "({})")
CUT = {
    "no room in /var/tmp/nvme: 3 bytes": "no room in nvme: 3 bytes",
    "[Errno 2] No such file: '/data/imdb/train.csv'": "[Errno 2] No such file: 'train.csv'",
    "--data=/data/imdb": "--data=imdb",
    # a home folder's last part is a name
    "/Users/alice/ is full": "~ is full",
    "bound to /export/home/alice:ro": "bound to ~:ro",
    "/root/x": "x",
    # in other clothes
    "file:///home/alice/x": "x",
    "file://host/home/alice": "~",
    "PATH=/usr/local/bin:/home/alice/bin": "PATH=bin:bin",
    "cc -I/home/alice/include -L/home/alice": "cc -Iinclude -L~",
    "'/home/alice smith/my runs/a b'": "'a b'",
    "<td>/home/alice/x</td></tr>": "<td>x</td></tr>",
    # addresses: who logs in, and to which machine
    "https://alice:hf_secret@example.org/a/b": "https://example.org/a/b",
    "connect to 192.168.1.4.": "connect to (IP address).",
    "[2001:db8::5]:29500, fe80::1%eth0": "[(IP address)]:29500, (IP address)%eth0",
}
STAYS = (  # it only looks private
    *("tokens: 12345678", "max_token 20000000", "pad_token: [PAD]", "2 CPUs @ 2.10GHz", "12:34:56", "550.54.15"),
    *("12 tokens/s, 3 GB/s, and/or", "accelerate_configs/zero3.yaml", "/", "relative ./a/b ../a/b ~/a/b"),
    *("https://example.org/a/b", "127.0.0.1 [::1] [::] 0.0.0.0", "00:1f.2 0000:3b:00.0"),
    *("std::bad_alloc c10::Error", "cudnn==9.1.0.70 libcudnn.so.9.1.0.70"),
)
TOLD = [(frame.format(text), None) for text in PRIVATE.values() for frame in FRAMES]
TOLD += [*CUT.items(), *zip(STAYS, STAYS, strict=True)]
TOLD += [({"hf_token": "short", "tokenizer": "gpt2"}, {"hf_token": "(secret)", "tokenizer": "gpt2"})]


@pytest.mark.parametrize(("told", "expected"), TOLD)
def test_what_tells_of_a_machine_or_its_user_is_taken_out(told, expected):
    redacted = redact(told)
    assert expected in (None, redacted)
    assert not [word for word in TELLS if word in str(redacted)], redacted


class Page(html.parser.HTMLParser):
    """What a browser would run or fetch."""

    def __init__(self):
        super().__init__()
        self.runs: list[str] = []

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            leads_out = name in ("src", "href", "xlink:href") and re.match(r"\s*(\w+:|//)", value or "")
            if name.startswith("on") or (leads_out and not value.startswith("data:")):
                self.runs.append(f"{tag} {name}={value}")
        if tag == "script" and dict(attributes).keys() != {"src", "defer"}:
            self.runs.append(tag)


def content(path: Path) -> str:
    if path.suffix == ".xz":
        return lzma.decompress(path.read_bytes()).decode()
    if path.suffix != ".zip":
        return path.read_text()
    with zipfile.ZipFile(path) as archive:
        (name,) = archive.namelist()
        return archive.read(name).decode()


ADDRESSES = {each.address for each in texts.texts()} | {each.thread for each in texts.faults()}


def test_a_report_tells_nothing_private_and_runs_nothing_of_a_stranger(stranger, quick, tmp_path):  # noqa: F811
    record = (stranger / "a" / "record.json").read_text()
    assert Record.model_validate_json(record).arm.startswith("=zero2 ")
    assert record.count("alice") > 50, "what is looked for is there"
    quick(stranger, tmp_path / "out")
    paths = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len([path for path in paths if path.suffix == ".html"]) == 3, "index, claims, calculator"
    for path in paths:
        text = content(path)
        assert not [word for word in TELLS if word in text], path.name
        if path.suffix == ".html":
            (page := Page()).feed(text)
            known = [f"a href={each}" for each in ADDRESSES] if path.name == "claims.html" else []
            known += ["script"] * {"index.html": 1, "calculator.html": 2}.get(path.name, 0)  # our own
            assert [each for each in page.runs if each not in known] == [], path.name
            assert page.runs.count("script") == known.count("script"), path.name


def test_data_files_tell_nothing_and_have_no_formula(stranger, tmp_path, capsys):
    """What a notebook writes beside a report."""
    book = Book("compare", str(stranger), str(tmp_path))
    rows = pd.DataFrame(
        [{"run": run.record.run_id, "arm": run.record.arm, "model": run.record.requested.model} for run in book.runs]
    )
    assert {arm.partition(" ")[0] for arm in rows["arm"]} == {"=zero2", "=ddp", "=zero3"}
    book.table(rows, "runs")
    for path in tmp_path.glob("*.csv"):
        assert not [word for word in TELLS if word in path.read_text()], path.name
    with (tmp_path / "compare-runs.csv").open(newline="") as file:
        cells = [cell for line in csv.reader(file) for cell in line]
    assert any(cell.startswith("'=zero2") for cell in cells)
    assert not [cell for cell in cells if cell.startswith(("=", "+", "@", "\t", "\r"))]


def test_a_number_below_zero_is_no_formula():
    texts = ("=1", "+1+1", "@x", "\tx", "\rx", "\n=x", "-x", "\uff1d1")
    assert [no_formula(text) for text in texts] == [f"'{text}" for text in texts]
    others = ["-1.5", "+2", -3, None, "a=b", "zero2"]
    assert list(map(no_formula, others)) == others
