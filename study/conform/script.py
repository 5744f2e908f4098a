"""Writes a failure as one script that imports nothing of this study: the adapter, the models, the checks and a case."""

import re
from pathlib import Path

from study.conform.suite import HERE, PROPERTIES, Adapter, PropertyAnswer, libraries

OURS = [HERE / name for name in ("models.py", "cases.py", "checks.py")]
SHARED = HERE / "adapters" / "deepspeed_common.py"  # by the adapters of DeepSpeed
START = '''"""Expected: {each.sentence}. Asked in: {each.source}.

Seen ({libraries}): {seen.words}
"""
import os
import subprocess
import sys
import tempfile
import types

if "RANK" not in os.environ:  # starts its own ranks
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    folder = tempfile.mkdtemp()
    for ranks in {ranks}:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={{ranks}}"]
        if subprocess.run([*torchrun, os.path.abspath(__file__)], cwd=folder).returncode:
            sys.exit("fails")
    print("holds")
    sys.exit()

# --- the adapter ---------------------------------------------------------------------------------------------------

'''
MIDDLE = """
ADAPTER = types.SimpleNamespace(**globals())

# --- the suite -----------------------------------------------------------------------------------------------------

"""
END = """
# --- this property -------------------------------------------------------------------------------------------------

dist.init_process_group("gloo")
try:
    {each.check}(functools.partial(ShardedTraining, ADAPTER), Case({each.model}, {case}))
except Unequal as difference:
    print(f"rank {{dist.get_rank()}}: {{difference}}", flush=True)
    os._exit(1)
os._exit(0)  # gloo's threads may abort an ordinary exit
"""


def write(path: Path, adapter: Adapter, seen: PropertyAnswer) -> None:
    """Write the script of a failure. It exits with 0 if the property holds, and with 1 if it fails."""
    each = PROPERTIES[seen.property]
    # The files stand one after the other, and the adapter is the module itself: its functions are global names.
    theirs = [SHARED, adapter.path] if SHARED.stem in adapter.path.read_text() else [adapter.path]
    start = START.format(each=each, seen=seen, libraries=libraries(seen), ranks=adapter.ranks_for(each))
    case = [f"{name}={value!r}" for name, value in ({"settings": adapter.settings} | each.case).items()]
    end = END.format(each=each, case=", ".join(case))
    path.parent.mkdir(parents=True, exist_ok=True)
    text = [start, *map(_source, theirs), MIDDLE, *map(_source, OURS), end]
    path.write_text("".join(text), encoding="utf-8")


def _source(path: Path) -> str:
    """Return the source of a file without its imports of this study."""
    text = path.read_text(encoding="utf-8")
    # Their names may stand in parentheses, over several lines.
    return re.sub(r"(?m)^from study\.[^(\n]*(\([^)]*\))?.*\n", "", text)
