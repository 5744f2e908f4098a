"""The emulated cluster: what would be typed, what is refused, what is left behind, and a training over two hosts."""

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from study.errors import Stop
from study.extras.cluster import cluster, over_hosts
from study.extras.cluster.cluster import UNLIMITED, Cluster, Host
from study.measure import hardware, readback
from study.records import metrics, store
from study.records.schema import Network
from study.spec import arms
from study.spec.settings import Flags
from study.sweeps import launches, protocol
from study.sweeps.protocol import Cell

REFUSED = cluster.refusal()
emulates = pytest.mark.skipif(REFUSED is not None, reason=REFUSED.what if REFUSED else "")
HOSTS = tuple(Host(f"host{n}", 100 + n, f"zshost{n}", f"10.77.0.{n + 1}") for n in range(2))
TWO = Cluster(200.0, None, True, Host("hub", 99), HOSTS)
TRAINING = """about = "a training over two hosts"
document = "none"
replicates = "nothing"
[[part]]
name = "p"
arm = "{arm}"
data = "embedded"
train_rows = 96
eval_rows = 8
sequence = 32
micro_batch = 4
threads = 1
steps = 4
warmup_steps = 1
bandwidth_mbit = 400
hosts = 2
[part.tiny]
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A cluster of this test's own: its state file is in another cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield cluster.state_path()
    cluster.down()


def holders(state: Path) -> set[int]:
    """The processes whose command line names this state file."""
    return {p.pid for p in psutil.process_iter(["cmdline"]) if str(state) in " ".join(p.info["cmdline"] or [])}


def inside(host: Host, *words: str) -> str:
    return subprocess.run([*cluster.read().enter(host), *words], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("text", ["200", "0mbit", "-5mbit", "fast", "5 mbit", "1e3mbit"])
def test_what_is_no_bandwidth_is_refused(text):
    with pytest.raises(Stop, match="is not a bandwidth"):
        cluster.bandwidth(text)


@pytest.mark.parametrize("arm", ["ddp", "zero3", "fsdp2"])
def test_each_host_gets_its_number_its_share_of_the_ranks_and_the_others_addresses(arm):
    folder = Path("/run")
    words = launches.command(Cell("p", "p", "tiny", arm, 4, {"hosts": 2, "bandwidth_mbit": 50}), folder, None)
    assert words[1:4] == ["-m", "study.extras.cluster.over_hosts", "4"]
    of_hosts = [over_hosts.host_words(TWO, host, int(words[3]), words[4:]) for host in HOSTS]
    for number, of_host in enumerate(of_hosts):
        entered, launch = of_host[: of_host.index("--") + 1], " ".join(of_host[of_host.index("--") + 2 :])
        assert entered == ["nsenter", "--target", str(HOSTS[number].pid), "--net", "--"]
        options = f"--hosts 10.77.0.1,10.77.0.2 --machine-rank {number} --processes 2"
        script = f"{arms.all_paths()[arm]} {protocol.SCRIPTS['train']}"
        assert (
            launch == f"-m study.extras.hosts.multinode {options} {script} --run-dir /run --hosts 2 --bandwidth-mbit 50"
        )


def test_cells_that_do_not_say_which_cluster_go_over_the_one_that_stands():
    free = Cell("p", "p", "tiny", "ddp", 2, {})
    fixed = Cell("p", "p", "tiny", "ddp", 4, {"hosts": 4, "bandwidth_mbit": 50})
    assert [cell.settings for cell in over_hosts.spread([free, fixed], TWO)] == [
        {"hosts": 2, "bandwidth_mbit": 200.0},
        fixed.settings,
    ]
    assert over_hosts.spread([fixed], None) == [fixed]
    with pytest.raises(Stop, match="no emulated cluster is up"):
        over_hosts.spread([free], None)


def test_once_a_host_has_failed_the_others_are_ended(monkeypatch):
    monkeypatch.setattr(over_hosts, "GRACE_S", 0.1)
    launches_of_hosts = [subprocess.Popen(words) for words in (["sleep", "600"], ["sh", "-c", "exit 3"], ["true"])]
    assert sorted(over_hosts.wait(launches_of_hosts)) == [-15, 0, 3]


def test_a_cell_that_cannot_be_spread_is_unavailable():
    cell = Cell("p", "p", "tiny", "ddp", 3, {"hosts": 2})
    assert over_hosts.refusal(cell, gpus=0).what == "3 ranks cannot be spread evenly over 2 hosts"
    assert "there are GPUs" in over_hosts.refusal(cell, gpus=8).what


def test_another_network_than_was_asked_for_is_a_mismatch():
    settings = Flags(hosts=2, bandwidth_mbit=200)
    rank = {"interface": "zshost0", "bandwidth_mbit": 200.0, "limited_by": "tbf", "delayed_by": None}
    apart = [rank | {"host": "net:[1]"}, rank | {"host": "net:[2]"}]
    assert readback.other_network(settings, hardware.describe_network(apart)) == []
    together = hardware.describe_network([rank | {"host": "net:[1]"}] * 2)
    assert readback.other_network(settings, together) == ["hosts: promised 2, observed 1"]
    faster = hardware.describe_network([side | {"bandwidth_mbit": 400.0} for side in apart])
    assert "observed 400.0" in readback.other_network(settings, faster)[0]
    free = hardware.describe_network([side | {"bandwidth_mbit": None} for side in apart])
    assert readback.other_network(Flags(hosts=2, bandwidth_mbit="unlimited"), free) == []
    assert readback.other_network(settings, free) == ["bandwidth in Mbit/s: promised 200, observed None"]


# --- with root or user namespaces ----------------------------------------------------------------------------------


@emulates
def test_a_cluster_is_what_was_declared_and_leaves_nothing_behind(own):
    before = Path("/proc/net/dev").read_text().count(":")
    standing = cluster.up(3, 200.0)
    assert cluster.read() == standing == cluster.up(3, 200.0), "the same one is kept"
    assert len(holders(own)) == 4, "three hosts and the hub"
    for host in standing.hosts:
        (said,) = json.loads(inside(host, "tc", "-json", "qdisc", "show", "dev", host.interface))
        assert (said["kind"], said["options"]["rate"]) == ("tbf", 200e6 / 8)
        assert host.address in inside(host, "ip", "address")
    other = cluster.up(2, UNLIMITED)
    assert len(cluster.read().hosts) == 2
    assert "tbf" not in inside(other.hosts[0], "tc", "qdisc")
    assert cluster.down() == 2
    assert cluster.read() is None
    assert holders(own) == set()
    assert not own.exists()
    assert Path("/proc/net/dev").read_text().count(":") == before, "no interface of this machine's own network"


@emulates
def test_what_a_crash_leaves_is_healed_and_what_runs_inside_ends(own):
    standing = cluster.up(2, 100.0)
    guest = subprocess.Popen([*standing.enter(standing.hosts[1]), "sleep", "600"], start_new_session=True)
    psutil.Process(standing.hosts[0].pid).kill()
    while standing.hosts[0].pid in holders(own):
        time.sleep(0.01)
    assert cluster.read() is None, "half a cluster is none"
    cluster.up(2, 100.0)
    assert guest.wait(10) == -9
    assert len(holders(own)) == 3
    own.unlink()  # as if `up` had died before it could write
    assert cluster.read() is None
    assert cluster.down() == 2
    assert holders(own) == set()


@emulates
@pytest.mark.parametrize("arm", ["ddp", pytest.param("zero2", marks=pytest.mark.slow)])
def test_a_training_over_two_hosts_is_one_record_with_its_bytes_counted_on_the_links(arm, tmp_path, monkeypatch):
    (tmp_path / "mini.toml").write_text(textwrap.dedent(TRAINING.format(arm=arm)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "state"))
    words = [sys.executable, "-m", "study.cli", "sweep", str(tmp_path / "mini.toml"), "--cluster"]
    ran = subprocess.run([*words, "--runs", str(tmp_path / "runs")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (folder,) = (tmp_path / "runs").glob(f"p-{arm}-*")
    record = store.load(folder)
    assert record.observed.ranks == record.observed.ranks_counted == 2
    wanted = {"hosts": 2, "interfaces": ["zshost0", "zshost1"], "bandwidth_mbit": 400.0, "limited_by": "tbf"}
    assert record.observed.network == Network(**wanted)
    assert record.observed.threads == 1
    assert len(record.memory.per_rank) == 2
    links, expected = record.traffic.per_link, metrics.wire_bytes_per_rank(record)
    assert len(links) == 2
    for link, wire_bytes in zip(links, expected, strict=True):
        # Headers and acknowledgements come on top, at most a tenth.
        assert wire_bytes < link.sent_bytes / record.traffic.link_steps < 1.1 * wire_bytes
    at_least_s = expected[0] * 8 / 400e6
    assert at_least_s < metrics.median_step_s(record)
    assert holders(tmp_path / "state") == set(), "the sweep brought the cluster up, and took it down"
