"""Traces that come with the package: of the built-in shapes, and of families of models that are given by numbers.

Every number on a tape is a sum of terms: a factor, times a product of the model's dimensions and the tokens of a row.
A tape is cut into sections, what a layer does in a phase or what comes around the layers, and equal ones are kept once.
"""

import functools
import json
import zipfile
from collections.abc import Sequence
from itertools import groupby
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from study.core import cache
from study.core.machine import version
from study.predict.trace.pieces import in_pieces
from study.predict.trace.tape import Tape

PATH = Path(__file__).with_name("committed.zip")
MANY_LAYERS = 6  # models of a family with more layers repeat the one in the middle
MIDDLE = 2  # counted from 0
# Of whole trainings in each precision there are 28, of adapters 24. Members with fewer lack autocast or 4 bits.
USUAL_PASSES = 24
Plan = list[tuple[str, int, int]]  # of each section the name, the layer, and its number in the file
# By family: the letter of each dimension in a term, and its name in the config. w: a head's width. Of every model, t:
# tokens of a row; r: rows after the second; k: the rank of adapters.
_BERT = {"h": "hidden_size", "f": "intermediate_size", "a": "num_attention_heads"}
_BERT |= {"v": "vocab_size", "p": "max_position_embeddings", "layers": "num_hidden_layers"}
DIMENSIONS = {
    "bert": _BERT,
    "gpt2": {"h": "n_embd", "f": "n_inner", "a": "n_head", "v": "vocab_size", "p": "n_positions", "layers": "n_layer"},
}
DIMENSIONS |= dict.fromkeys(("llama", "qwen2", "qwen3"), _BERT | {"g": "num_key_value_heads", "w": "head_dim"})
DECODERS = {*DIMENSIONS, "mistral"} - {"bert"}  # their heads have no bias, which the chunked loss would leave out
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # they change no size


class Member(NamedTuple):
    """Which member of the file has the traces of a model, and the dimensions to evaluate them for."""

    name: str
    family: str
    dimensions: dict[str, int]
    layers: int | None  # of a family


UNKNOWN = Member("unknown", "", {}, None)


def member(config: dict, dropout: float | None, rank: int | None = None, adapters: Sequence = ()) -> Member:
    """Return the member for a config, which the file may not have. `adapters`: what is said of them beside the rank."""
    plain = _plain(config)
    family, like = str(config.get("model_type")), str(plain.get("model_type"))
    if like not in DIMENSIONS:
        return UNKNOWN if rank else Member(f"{like}-{cache.fingerprint([plain, dropout])[:12]}", family, {}, None)
    free = DIMENSIONS[like]
    dimensions: dict[str, Any] = {letter: plain.get(name) for letter, name in free.items()}
    if not all(type(size) is int and size > 0 for size in dimensions.values()):
        return UNKNOWN
    dimensions.setdefault("w", dimensions["h"] // dimensions["a"])
    # What is left decides which operations run: models that agree in it differ in their sizes alone.
    layers = dimensions.pop("layers")
    fixed = {name: value for name, value in plain.items() if name not in (*free.values(), *IDS)}
    structure = [fixed, dropout, min(layers, MANY_LAYERS), sharing(dimensions)]
    if rank:
        dimensions["k"] = rank
        structure.append(adapters)
    return Member(f"{like}-{cache.fingerprint(structure)[:12]}", family, dimensions, layers)


def _plain(config: dict) -> dict:
    """Return the config with transformers' defaults of its dimensions. A Mistral without a window is as a Llama."""
    if config.get("model_type") == "mistral" and config.get("sliding_window", 0) is None:
        config = config | {"model_type": "llama"}
    family = str(config.get("model_type"))
    if family not in DIMENSIONS:
        return config
    said = {name: value for name, value in config.items() if value is not None}
    sizes = {name: value for name, value in said.items() if type(value) is int}  # anybody's config may say anything
    defaults: dict[str, Any] = {"tie_word_embeddings": family in ("bert", "gpt2")}
    if family == "gpt2":
        defaults["n_inner"] = 4 * sizes.get("n_embd", 0)
    if family == "qwen3":
        defaults["head_dim"] = 128
    if family in ("llama", "qwen2"):
        heads = sizes.get("num_attention_heads", 1)
        defaults |= {"num_key_value_heads": heads, "head_dim": sizes.get("hidden_size", 0) // max(heads, 1)}
    return defaults | said


def sharing(dimensions: dict[str, int]) -> bool | str:
    """Return whether heads share keys and values; "one" if all of them do."""
    heads = dimensions["a"]
    groups = dimensions.get("g", heads)
    return "one" if groups == 1 else groups < heads


def key(options: Any, rows: int) -> str:
    """Return the name of a pass in a member: all options but the tokens of a row, and whether there are more rows.

    The terms depend on both numbers.
    """
    return json.dumps([*options[1:], min(rows, 2)])


@functools.cache
def installed() -> dict[str, str | None]:
    """Return the versions that a trace depends on; None for a package that is not installed."""
    return {package: version(package) for package in ("torch", "transformers")}


@functools.cache
def _content(name: str) -> Any:
    with zipfile.ZipFile(PATH) as archive:
        return json.loads(archive.read(name)) if name in archive.namelist() else None


def has_usual_passes(member: Member) -> bool:
    """Return whether the file has each pass that an advice in the usual precisions asks for, also beside 4 bits."""
    content = _content(member.name)
    return content is not None and len(content["passes"]) >= USUAL_PASSES


def look(member: Member) -> list | None:
    """Return what a look at the model would show. None if the file has no such model."""
    content = _content(member.name)
    if content is None:
        return None
    kind, _, tensors, buffers, fused, limit, _, vocabulary = content["look"]
    if member.layers:
        values = _values(content, member.dimensions)
        parts = {block: [*same] for block, same in groupby(tensors, key=itemgetter(2))}
        layers = [
            (name.replace(".0.", f".{i}.", 1), shape, f"layer.{i}", trains)
            for i in range(member.layers)
            for name, shape, _, trains in parts["layer.0"]
        ]
        whole = [*parts["embeddings"], *layers, *parts["head"]]
        tensors = [(name, [values[size] for size in shape], block, trains) for name, shape, block, trains in whole]
        buffers, limit, vocabulary = values[buffers], values[limit], values[vocabulary]
    return [kind, member.family, tensors, buffers, fused, limit, vocabulary, True]


def tape(member: Member, options: Any, rows: int) -> Tape | None:
    """Return the tape of a pass; None if the file has no such pass."""
    if options.loss == "chunked":
        if member.family not in DECODERS:
            return None
        whole = tape(member, options._replace(loss="whole", logits="fp32", keeps_logits=False), rows)
        return whole and in_pieces(whole, rows)
    content = _content(member.name)
    dimensions = member.dimensions | {"t": options.sequence}
    unusual = any(size < 2 for letter, size in dimensions.items() if letter != "g")  # a size of 1: other kernels
    if content is None or unusual or key(options, rows) not in content["passes"]:
        return None
    values = _values(content, dimensions | {"r": max(0, rows - 2)})
    plan = longer(content["passes"][key(options, rows)], max(0, (member.layers or 0) - MANY_LAYERS))
    sections = {number: _section(content, number, values) for number in {number for _, _, number in plan}}
    return joined(plan, sections)


def _values(content: dict, dimensions: dict[str, int]) -> list[int]:
    terms = [prod(dimensions.get(letter, 0) for letter in letters) for letters in content["terms"]]
    return [sum(n * terms[term] for n, term in zip(each[::2], each[1::2], strict=True)) for each in content["sums"]]


def shorter(config: dict) -> dict:
    """Return the config of a family's model with as many layers as tell what more of them do."""
    return config | {DIMENSIONS[_plain(config)["model_type"]]["layers"]: MANY_LAYERS}


def longer(plan: Plan, more_layers: int) -> Plan:
    """Repeat the sections of the layer in the middle. The backward pass begins with the last layer."""
    longer = []
    for name, layer, number in plan:
        if layer == MIDDLE:
            layers = list(range(MIDDLE, MIDDLE + more_layers + 1))
            longer += [(name, each, number) for each in (layers[::-1] if name.startswith("backward") else layers)]
        else:
            longer.append((name, layer + more_layers if layer > MIDDLE else layer, number))
    return longer


def _section(content: dict, number: int, values: list[int]) -> list[tuple]:
    """Return the entries of a section. They name layers and tensors as they are seen from its layer."""
    entries = []
    for entry, *sums in content["sections"][number]:
        kind, *rest = content["entries"][entry]
        sizes = [values[each] for each in sums]
        if kind == "made":
            entries.append((kind, *sizes, *rest))
        elif kind == "kernel":
            *of_kernel, flops = sizes
            entries.append((kind, rest[0] and (rest[0], tuple(of_kernel)), flops))
        else:
            entries.append((kind, *rest, *sizes))
    return entries


def joined(plan: Plan, sections: dict[int, list[tuple]]) -> Tape:
    """Return the sections of a plan one after the other. `compact` finds a few entries more that say nothing."""
    tape: Tape = []
    first: dict[str, int] = {}  # the number of the first tensor of each section
    tensor_count = 0
    for section, layer, number in plan:
        first[section.format(layer)] = tensor_count
        for entry in sections[number]:
            if entry[0] == "kernel":  # `match` is slow
                tape.append(entry)
                continue
            match entry:
                case "made", _, _:
                    tensor_count += 1
                case "freed" | "gradient" as kind, maker, distance, nth:
                    entry = (kind, first[maker.format(layer + distance)] + nth)
                case "event", words, distance, gradient_bytes:
                    entry = ("event", words.format(layer + distance), gradient_bytes)
            tape.append(entry)
    return tape
