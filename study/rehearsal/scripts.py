"""Where the script is that somebody names: a Python file, a program on the PATH, or a module. Needs no torch."""

import importlib.util
import shutil
import sys
from pathlib import Path

from study.configs.stacks import CONFIGS
from study.core.arms import all_paths
from study.core.errors import Stop


def locate(script: str) -> tuple[Path, str | None]:
    """Return the file of a script, a program or a module, and the module's name."""
    if Path(script).suffix in CONFIGS:
        raise Stop(f"{script} is a config, not a script", "name a Python file; --config_file takes a config")
    if Path(script).suffix == ".sh":
        remedy = "give the launch command in it: `study virtual torchrun --nproc-per-node 4 train.py --its-words`"
        raise Stop(f"{script} is a script of a shell, and not of Python", remedy)
    if Path(script).is_file():
        return Path(script), None
    if program := shutil.which(script):
        if b"python" not in Path(program).read_bytes()[:200].partition(b"\n")[0]:
            raise Stop(f"{script} is no program in Python", "name a Python file")
        return Path(program), None
    if module := file_of_module(script):
        return module
    remedy = "name a Python file, a program on the PATH, or a module, installed or in this folder"
    if script in all_paths():
        remedy = f"did you mean '--arm {script}', or {remedy.removeprefix('name ')}"
    raise Stop(f"there is no script {script}", remedy)


def file_of_module(name: str) -> tuple[Path, str] | None:
    """Return the file that `python -m NAME` runs, and its name. None: there is no such module."""
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        spec = importlib.util.find_spec(name)  # imports the packages around it alone
    except (ImportError, ValueError):
        return None
    finally:
        sys.path.pop(0)
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0], "__main__.py"), f"{name}.__main__"
    if spec is not None and spec.origin:
        return Path(spec.origin), name
    return None
