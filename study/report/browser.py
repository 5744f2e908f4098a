"""The Python that reads pasted texts in a browser: Pyodide's runtime, the packages that the reader needs, our rooms.

npm has the runtime, and the package index the wheels for it (PEP 783). Nothing is fetched when the page is read.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import yaml

from study.core.arms import ROOT
from study.core.errors import Stop

RUNTIME = "pyodide@314.0.7"  # the newest on 28 November 2026: Python 3.14
FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
PLATFORM = ("--platform", "pyemscripten_2026_0_wasm32", "--python-version", "3.14", "--abi", "cp314")
WHEELS = ("pydantic", "packaging")
OURS = ("core", "known", "configs", "cli")  # rooms of study/ that the reader imports
KINDS = (".py", ".toml", ".json", ".txt")


def fetch(into: Path) -> list[str]:
    """Put all that the page needs into a folder, and return the names of its archives. A Stop if a program fails."""
    into.mkdir()
    with tempfile.TemporaryDirectory() as temporary:
        _run("npm", "pack", "--silent", "--fetch-retries=1", "--pack-destination", temporary, RUNTIME)
        (packed,) = Path(temporary).glob("*.tgz")
        with tarfile.open(packed) as archive:
            # `filter` is an argument since Python 3.11.4: Debian 12 has 3.11.2.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(temporary)
        for name in FILES:
            shutil.copyfile(Path(temporary, "package", name), into / name)
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--implementation", "cp")
    _run(*pip, *PLATFORM, "--dest", str(into), *WHEELS)
    _pack(into / "study.zip")
    return [*sorted(path.name for path in into.glob("*.whl")), "study.zip"]


def _run(*words: str) -> None:
    try:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise Stop(
            f"{words[0]} cannot fetch the browser's Python: {said.strip()[-300:]}", "connect, or leave out --paste"
        ) from None


def _pack(path: Path) -> None:
    """Write our rooms into an archive, and PyYAML's own Python: it has no wheel for this platform, and needs none."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(ROOT / "study/__init__.py", "study/__init__.py")
        for room in OURS:
            for file in sorted((ROOT / "study" / room).rglob("*")):
                if file.suffix in KINDS and "__pycache__" not in file.parts:
                    archive.write(file, file.relative_to(ROOT))
        for file in sorted(Path(yaml.__file__).parent.glob("*.py")):
            archive.write(file, f"yaml/{file.name}")
