"""Damage to a folder is seen: in its files, which of them there are, and the digests themselves."""

import subprocess

import pytest

from study.core import digests


def change(path):
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "a bit of a file": (lambda folder: change(folder / "parts/b.bin"), ["parts/b.bin"]),
    "a file is cut": (lambda folder: (folder / "a.bin").write_bytes(b""), ["a.bin"]),
    "a file is gone": (lambda folder: (folder / "a.bin").unlink(), ["a.bin"]),
    "a file is new": (lambda folder: (folder / "c.bin").touch(), ["c.bin"]),
    "no digests": (lambda folder: (folder / digests.FILE).unlink(), [digests.FILE]),
    "digests without the end": (lambda folder: (folder / digests.FILE).write_bytes(b""), ["a.bin", "parts/b.bin"]),
    "digests that are no text": (lambda folder: (folder / digests.FILE).write_bytes(b"\xff"), [digests.FILE]),
    "nothing": (lambda folder: None, []),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_seen(kind, tmp_path):
    (tmp_path / "parts").mkdir()
    for name in ("a.bin", "parts/b.bin"):
        (tmp_path / name).write_bytes(name.encode() * 100)
    digests.write(tmp_path)
    assert digests.damaged(tmp_path) == []
    damage, names = DAMAGE[kind]
    damage(tmp_path)
    assert digests.damaged(tmp_path) == names


def test_sha256sum_reads_them(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"a")
    digests.write(tmp_path)
    subprocess.run(
        ["sha256sum", "--check", "--strict", digests.FILE], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL
    )
