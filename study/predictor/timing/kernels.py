"""Fits lines for the bytes and kernels of transformers' modules besides matrix products.

`python -m study.predictor.timing.kernels` follows small models, without values, of each family that has formulas, and
writes `kernels.json`. A kernel reads and writes a sum of tensors, each of tokens x a width, so a few models determine
its line. The worst residual is printed.
"""

import json
import sys
from pathlib import Path

import numpy

from study.predictor.architecture import FAMILIES, NAMES, describe
from study.predictor.setup import Setup
from study.predictor.timing import work
from study.predictor.tracing.transformer import Transformer
from study.spec.shapes import NO_FUSED_ATTENTION

PRECISIONS = ("bf16_cast", "bf16", "fp32")
# Layers, heads, heads of keys, width of a head, inner width, vocabulary, tokens of a row: in varying proportions.
SIZES = (
    (2, 4, 4, 16, 256, 512, 32),
    (2, 4, 2, 24, 160, 768, 48),
    (2, 6, 2, 16, 512, 1024, 64),
    (2, 2, 1, 64, 320, 640, 96),
    (2, 8, 4, 32, 1024, 2048, 24),
    (2, 4, 1, 32, 96, 256, 128),
    (2, 6, 6, 8, 704, 1536, 16),
)


def config(family: str, sizes: tuple[int, ...]) -> dict:
    """A small model without dropout; families without groups of heads ignore them."""
    layers, heads, of_keys, width, inner, vocabulary, _ = sizes
    values = {"layers": layers, "heads": heads, "hidden": heads * width, "inner": inner, "positions": 256}
    values = {name: values[key] for key, names in NAMES.items() for name in names}
    if family in ("llama", "gemma2"):
        values |= {"num_key_value_heads": of_keys, "head_dim": width}
    if family == "gptj":
        values["rotary_dim"] = 8
    family, _, activation = family.partition(" ")
    if activation:
        values["activation_function"] = activation
    values |= {"vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {"model_type": family} | values


def pairs(family: str, precision: str, attention: str) -> list[tuple]:
    """For each small model: its dimensions, its setup, and its blocks."""
    seen = []
    for sizes in SIZES:
        shape = config(family, sizes)
        looked_at = Transformer.of(shape, family, dropout=0.0)
        values = {"precision": precision, "attention": attention, "sequence": sizes[-1], "device": "cuda"}
        setup = Setup(model=looked_at, micro_batch=4, **values)
        model = work.as_architecture(shape) if family == "llama" else describe(shape, dropout=0.0)
        seen.append((model, setup, work.blocks(setup)))
    return seen


def lines(families: list[str]) -> dict:
    """Coefficients by family, precision, attention, block and phase."""
    table, worst = {}, 0.0
    for family in families:
        for precision in PRECISIONS:
            for attention in ("eager",) if family in NO_FUSED_ATTENTION else ("sdpa", "eager"):
                seen = pairs(family, precision, attention)
                for name in ("embeddings", "layer", "head"):
                    for phase in ("forward", "backward"):
                        features, moved, kernels = [], [], []
                        for model, setup, blocks in seen:
                            ends = {"embeddings": blocks[0], "layer": blocks[2], "head": blocks[-1]}
                            of_block = getattr(ends[name], phase)
                            features.append(work.features(model, setup.micro_batch, setup.sequence, name))
                            moved.append(of_block.moved_bytes)
                            kernels.append(of_block.moving_kernels)
                        scale = numpy.array(moved)
                        scale[scale == 0] = 1
                        coefficients, *_ = numpy.linalg.lstsq(
                            numpy.array(features) / scale[:, None], numpy.array(moved) / scale, rcond=1e-9
                        )
                        miss = abs(numpy.array(features) @ coefficients / scale - numpy.array(moved) / scale).max()
                        worst = max(worst, miss)
                        if miss > 0.01:
                            sys.stderr.write(f"{family} {precision} {attention} {name} {phase}: {miss:.3f}\n")
                        key = f"{family} {precision} {attention} {name} {phase}"
                        table[key] = [int(numpy.median(kernels)), *(round(float(value), 4) for value in coefficients)]
    sys.stderr.write(f"worst miss {worst:.4f}\n")
    return table


if __name__ == "__main__":
    path = Path(work.__file__).with_name("kernels.json")
    known = json.loads(path.read_text()) if path.exists() else {}
    for family in sys.argv[1:] or [*FAMILIES, "llama", "gpt2 gelu"]:
        known |= lines([family])
        rows = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in known.items()]
        path.write_text("{\n" + ",\n".join(rows) + "\n}\n")
