"""What a stranger may give: code of models is refused, and study.core opens files. Ruff's S rules do the rest."""

import re

from study.core.arms import PACKAGE

RUNS = re.compile(
    r"trust_remote_code=(?!False)|\btorch\.load\((?!.*weights_only=True\))|\bnp\.load\(|\bnumpy\.load\("
    r"|(?:AutoConfig|AutoTokenizer)\.from_pretrained\((?!.*trust_remote_code)"
)


def test_nothing_runs_code_of_others():
    sources = {path: path.read_text() for path in PACKAGE.rglob("*.py") if "reproductions" not in path.parts}
    # A script that somebody rehearses is run as it is, so it decides by itself whose code it takes: SECURITY.md.
    del sources[PACKAGE / "rehearsal" / "hugging_face_patches.py"]
    assert sum(source.count("trust_remote_code=False") for source in sources.values()) >= 4
    assert not [name for name, source in sources.items() if RUNS.search(source)]
