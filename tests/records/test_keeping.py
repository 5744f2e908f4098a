"""Names of this machine and of others leave a record, and words that only look like them stay."""

import socket

import pytest

from study.records.keeping import redact


@pytest.mark.parametrize(
    ("name", "text", "left"),
    [
        ("node-7", "rank 3 on node-7 failed", "rank 3 on (host) failed"),
        ("node-7", "rank 3 failed", "rank 3 failed"),
        ("gpu", "one gpu is enough", "one gpu is enough"),
        ("n-1", "n-1 ranks wait", "n-1 ranks wait"),
    ],
)
def test_the_machines_own_name_goes_if_it_is_no_word(monkeypatch, name, text, left):
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert redact(text) == left


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("tcp://10.1.2.3:29500", "tcp://(IP address):29500"),
        ("tcp://127.0.0.1:29500", "tcp://127.0.0.1:29500"),
        ("listens on 0.0.0.0", "listens on 0.0.0.0"),
        ("cudnn==9.1.0.70", "cudnn==9.1.0.70"),
        ("at 12:30:45", "at 12:30:45"),
        ("fe80::1 answers", "(IP address) answers"),
        ("/home/ann/", "~"),
        ("/home/ann/train.py", "train.py"),
        ("'/data/my runs/a'", "'a'"),
        ("https://ann:hf_x@example.org/a", "https://example.org/a"),
        ("ann@example.org wrote", "(address) wrote"),
        ("db.corp answers", "(host) answers"),
    ],
)
def test_addresses_paths_and_people_go_and_what_every_machine_has_stays(text, left):
    assert redact(text) == left
    assert redact({"words": [text]}) == {"words": [left]}
