"""Writes `reports/calculator.json`: what the built-in shapes need on a GPU, as `study estimate` says.

`python tools/calculator_tables.py` takes some minutes.
"""

import argparse
import json
import sys

from study.core.shapes import SHAPES, config_of
from study.predict.trace import committed
from study.predict.trace.transformer import Transformer
from study.report.calculator import ARMS, FILE, GPUS_TRIED, arms_of, needs, sequences

KINDS = ("decoder", "encoder", "seq2seq")  # whose rows have tokens


def main() -> None:
    models = {}
    for name in SHAPES:
        model = Transformer.of(config_of(name), name)
        if name.endswith(("-micro", "-tiny")) or committed.look(model.member) is None or model.look.kind not in KINDS:
            continue
        models[name] = {
            sequence: {
                arm: {gpus: needs(model, arm, gpus, sequence) for gpus in GPUS_TRIED if arm in arms_of(gpus)}
                for arm in ARMS
            }
            for sequence in sequences(model)
        }
        sys.stderr.write(f"{name}\n")
    FILE.write_text(json.dumps(models, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
