"""What is kept of a run has its numbers and none of the machine's paths."""

import json
import shutil

import pytest
from shaped import finished, put

from study.cli import keep
from study.errors import Stop
from study.records import store
from study.records.privacy import redact


def test_numbers_stay_and_paths_go(tmp_path):
    paths = {"argv": ["/home/someone/study/train.py", "--run-dir", "/home/someone/runs/a", "--lr"]}
    paths |= {"requested__run_dir": "/home/someone/study/runs/a", "software__address": "https://example.org/a/b"}
    put(tmp_path / "smoke", finished("a", requested__model="google/gemma-2-9b", **paths))
    assert keep.keep([tmp_path / "smoke"], tmp_path / "kept") == (1, [])
    kept = store.load(tmp_path / "kept" / "runs" / "smoke" / "a")
    assert (kept.requested.run_dir, kept.requested.model) == ("a", "google/gemma-2-9b")
    assert kept.argv == ["train.py", "--run-dir", "a", "--lr"]
    assert kept.software["address"] == "https://example.org/a/b", "not a path of a machine"
    assert "someone" not in kept.model_dump_json()
    original = store.load(tmp_path / "smoke" / "a")
    assert (kept.time, kept.loss, kept.memory) == (original.time, original.loss, original.memory)


CUT = {
    "no room in /var/tmp/nvme: 3 bytes": "no room in nvme: 3 bytes",
    "[Errno 2] No such file: '/data/imdb/train.csv'": "[Errno 2] No such file: 'train.csv'",
    "--data=/data/imdb": "--data=imdb",
    # a home folder's last part is a name
    "/home/alice": "~",
    "/Users/alice/ is full": "~ is full",
    "bound to /export/home/alice:ro": "bound to ~:ro",
    "/root/x": "x",
    # in other clothes
    "file:///home/alice/x": "x",
    "file://host/home/alice": "~",
    "PATH=/usr/local/bin:/home/alice/bin": "PATH=bin:bin",
    "cc -I/home/alice/include -L/home/alice": "cc -Iinclude -L~",
    "host:/export/home/alice/x": "host:x",
    "'/home/alice smith/my runs/a b'": "'a b'",
    "<td>/home/alice/x</td></tr>": "<td>x</td></tr>",
    # addresses: who logs in, and to which machine
    "https://alice:hf_secret@example.org/a/b": "https://example.org/a/b",
    "tcp://10.1.2.3:29500": "tcp://(IP address):29500",
    "connect to 192.168.1.4.": "connect to (IP address).",
    "[2001:db8::5]:29500, fe80::1%eth0": "[(IP address)]:29500, (IP address)%eth0",
}
STAYS = (
    "12 tokens/s, 3 GB/s, and/or",
    "accelerate_configs/zero3.yaml",
    "/",
    "relative ./a/b ../a/b ~/a/b",
    "https://example.org/a/b",
    "127.0.0.1 [::1] [::] 0.0.0.0",
    # and what only looks like an address
    "12:34:56",
    "00:1f.2 0000:3b:00.0",
    "std::bad_alloc c10::Error",
    "550.54.15",
    "cudnn==9.1.0.70 libcudnn.so.9.1.0.70",
)


@pytest.mark.parametrize(("text", "kept"), [*CUT.items(), *zip(STAYS, STAYS, strict=True)])
def test_a_path_is_cut_to_its_last_part(text, kept):
    assert redact(text) == kept


def test_what_is_left_out_is_named(tmp_path):
    runs = put(tmp_path / "runs", finished("good"), finished("cut", status="running"))
    (runs / "bad").mkdir()
    (runs / "bad" / "record.json").write_text("{")
    shutil.copytree(runs, tmp_path / "other" / "runs")
    count, left_out = keep.keep([runs, tmp_path / "other" / "runs"], tmp_path / "kept")
    assert count == 1
    assert all(any(words in sentence for sentence in left_out) for words in ("bad", "cut off", "rename a folder"))
    assert json.loads((tmp_path / "kept" / "runs" / "runs" / "good" / "record.json").read_text())["run_id"] == "good"
    with pytest.raises(Stop, match="no run below"):
        keep.keep([tmp_path / "nothing"], tmp_path / "kept")
