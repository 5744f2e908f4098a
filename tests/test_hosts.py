"""`study doctor --cluster`: hosts compared, through a command that leads to each of them."""

from pathlib import Path

import pytest

from study.cli import machine
from study.errors import Stop
from study.extras.hosts import hosts
from study.extras.hosts.hosts import Clock, Host

SEEN = {
    "software": dict.fromkeys(hosts.COMPARED, "1.0"),
    "gpus": ["H100", "H100"],
    "cpu": "EPYC",
    "cores": 8,
    "memory_bytes": 64e9,
    "free_bytes": 1e12,
}


def hosts_file(tmp_path: Path, text: str) -> Path:
    (tmp_path / "hosts.txt").write_text(text)
    return tmp_path / "hosts.txt"


def host(name: str, clock_s: float = 0.0, **seen) -> Host:
    return Host(name, name, SEEN | seen, Clock(clock_s, 0.001))


def test_a_line_names_a_host_and_how_the_others_reach_it(tmp_path):
    text = "me@n1 10.7.0.1\n\nn2  # the second\nn3 slots=8\nyou@n4\n"
    read = [(each.name, each.address) for each in hosts.read(hosts_file(tmp_path, text))]
    assert read == [("me@n1", "10.7.0.1"), ("n2", "n2"), ("n3", "n3"), ("you@n4", "n4")]


@pytest.mark.parametrize(("text", "words"), [("# none\n", "names no host"), ("a\nb\na\n", "names a twice")])
def test_what_is_wrong_with_a_hosts_file_is_one_sentence(tmp_path, text, words):
    with pytest.raises(Stop, match=words):
        hosts.read(hosts_file(tmp_path, text))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({}, None),
        ({"software": SEEN["software"] | {"torch": "2.0"}}, "Torch differs: 1.0 on a; 2.0 on b."),
        ({"gpus": ["H100"]}, "The list of GPUs differs: H100, H100 on a; H100 on b."),
        ({"cpu": "Xeon"}, "Operators are compiled for one of them"),
        ({"clock_s": 3.2}, "The clock of b is 3.2 s ahead of the others"),
        ({"free_bytes": 2e9}, "b has only 2 GB free"),
    ],
)
def test_a_difference_is_one_sentence(other, words):
    problems = hosts.differences([host("a"), host("b", **other)])
    assert len(problems) == (words is not None)
    assert words is None or words in problems[0]


def test_a_slow_or_missing_link_is_one_sentence():
    links = {("a", "b"): 9e9, ("b", "a"): 1e9, ("a", "c"): 9.1e9, ("c", "a"): None}
    problems = hosts.slow_links(links)
    assert problems[0] == "b sends only 1 GB/s to a; the median link has 9 GB/s."
    assert "c cannot connect to a" in problems[1]


def test_hosts_are_reached_by_any_command_and_the_links_are_measured(tmp_path, capsys, monkeypatch):
    """Three hosts: this machine twice, and one that cannot be reached. An MOTD is not taken for an answer."""
    way = tmp_path / "way"
    way.write_text(
        '#!/bin/sh\nhost=$1; shift\n[ "$host" = gone ] && { echo "no route to $host" >&2; exit 255; }\n'
        f'echo "Welcome to $host"; cd {Path(hosts.__file__).parents[2]}; exec "$@"\n'
    )
    way.chmod(0o755)
    monkeypatch.setattr(hosts, "LINK_S", 0.1)
    file = hosts_file(tmp_path, "one 127.0.0.1\ntwo 127.0.0.1\ngone\n")
    with pytest.raises(SystemExit) as end:
        machine.doctor(cluster=file, reach=f"{way} {{host}}", nvme_dir=tmp_path)
    output = capsys.readouterr().out
    assert end.value.code == 1
    assert "gone cannot be used: no route to gone." in output
    assert "does not answer" in output
    comparison = hosts.compare(hosts.read(file)[:2], tmp_path, f"{way} {{host}}")
    assert comparison.problems == hosts.slow_links(comparison.links)
    assert set(comparison.links) == {("one", "two"), ("two", "one")}
    assert min(comparison.links.values()) > 10e6  # loopback
    assert all(abs(each.clock.ahead_s) <= each.clock.error_s + 0.005 for each in comparison.hosts)  # one clock
