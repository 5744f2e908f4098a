"""Writes a failure as one script that imports nothing of this study: the adapter, the models, the checks and a case."""

import re
from pathlib import Path

from study.conform.suite import HERE, Adapter, Answer, Property, libraries

OURS = [HERE / name for name in ("models.py", "cases.py", "checks.py")]
SHARED = HERE / "adapters" / "deepspeed_common.py"  # by the adapters of DeepSpeed
START = '''"""Expected: {sentence}. Asked in: {source}.

Seen ({libraries}): {words}
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
    {check}(functools.partial(ShardedTraining, ADAPTER), Case({case}))
except Difference as difference:
    print(f"rank {{dist.get_rank()}}: {{difference}}", flush=True)
    os._exit(1)
os._exit(0)  # gloo's threads may abort an ordinary exit
"""


def write(path: Path, adapter: Adapter, each: Property, seen: Answer) -> None:
    """Write the script of a failure. It exits with 0 if the property holds, and with 1 if it fails."""
    theirs, case = _source(adapter.path), {"settings": adapter.settings} | each.case
    # The files stand one after the other, and the adapter is the module itself: its functions are global names.
    if SHARED.stem in adapter.path.read_text():
        theirs = _source(SHARED) + theirs
    about = {"sentence": each.sentence, "source": each.source, "words": seen.words, "libraries": libraries(seen)}
    start = START.format(ranks=adapter.ranks_for(each), **about)
    model = case.pop("model", "Plain")
    arguments = ", ".join([f"model={model}", *(f"{name}={value!r}" for name, value in case.items())])
    end = END.format(check=each.check, case=arguments)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(start + theirs + MIDDLE + "".join(map(_source, OURS)) + end, encoding="utf-8")


def _source(path: Path) -> str:
    """Return the source of a file without its imports of this study."""
    text = path.read_text(encoding="utf-8")
    # Their names may stand in parentheses, over several lines.
    return re.sub(r"^from study\.[^(\n]*(\([^)]*\))?.*\n", "", text, flags=re.MULTILINE)
