"""Writes the address of the repository into every file that names it. Whoever publishes the study runs it once.

python tools/address.py https://github.com/NAME/zero-study
"""

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNKNOWN = "https://github.com/OWNER/zero-study"  # until somebody publishes it, where a reader does not type it
# By file: the line that has the address, as a pattern around it.
PLACES = {
    "pyproject.toml": r'(Source = ")[^"]+',
    "README.md": r"(git clone )\S+",
    "GUIDE.md": r'(ADDRESS=")[^"]*',
    "examples/kubernetes.yaml": r"(git clone )\S+",
    ".pre-commit-hooks.yaml": r"(repo: )[^\s,]+",
    "CITATION.cff": r"(?:# )?(repository-code: ).+",
    "notebooks/by_hand.ipynb": r'("source = \\")[^"\\]*',
    "notebooks/colab.ipynb": r'("source = \\")[^"\\]*',
}
# By file: the link that opens the notebook by hand in Colab. Until then it promises no more than to say how.
LINKS = dict.fromkeys(
    ("README.md", "examples/zero_by_hand/README.md", "notebooks/by_hand.ipynb"),
    r"(\[[\w ]*in Colab)(?:: how)?\]\([^)]+\)",
)


def main(address: str) -> None:
    if not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+", address):
        raise SystemExit(f"{address} is not an address like {UNKNOWN}")
    in_colab = address.replace("github.com", "colab.research.google.com/github")
    link = f"]({in_colab}/blob/main/notebooks/by_hand.ipynb)"
    for places, new in ((PLACES, address), (LINKS, link)):
        for name, pattern in places.items():
            path = ROOT / name
            path.write_text(re.sub(pattern, rf"\g<1>{new}", path.read_text()))
    readme = ROOT / "README.md"
    title, _, rest = readme.read_text().partition("\n\n")
    if rest.startswith("[![tests]"):
        rest = rest.partition("\n\n")[2]
    badge = f"[![tests]({address}/actions/workflows/tests.yml/badge.svg)]({address}/actions)"
    readme.write_text(f"{title}\n\n{badge}\n\n{rest}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    main(parser.parse_args().address)
