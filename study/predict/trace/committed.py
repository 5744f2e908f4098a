"""Traces that come with the package: of the built-in shapes, and of families of models that are given by numbers.

Reading them needs no torch. `committed.zip` has a member for each shape or family. Every number on a tape is a sum of
terms: a factor, times a product of the model's dimensions and the tokens of a row.
`reproductions/laboratories/committed_traces.py` writes the file.
"""

import contextlib
import functools
import hashlib
import json
import zipfile
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import NamedTuple

from study.predict.trace.repeating import Followed, Stack
from study.predict.trace.tape import Tape

PATH = Path(__file__).with_name("committed.zip")
VERSIONS = "versions"  # the member with the versions of the packages that the traces were made with
MANY_LAYERS = 6  # from so many on, layers in the middle repeat each other
# By family: the letter of each dimension in a term, and its name in the config. t stands for the tokens of a row, w for
# the width of a head.
_BERT = {"h": "hidden_size", "f": "intermediate_size", "a": "num_attention_heads"}
_BERT |= {"v": "vocab_size", "p": "max_position_embeddings"}
DIMENSIONS = {
    "bert": _BERT,
    "gpt2": {"h": "n_embd", "f": "n_inner", "a": "n_head", "v": "vocab_size", "p": "n_positions"},
    "llama": _BERT | {"g": "num_key_value_heads", "w": "head_dim"},
}
LAYERS = {"bert": "num_hidden_layers", "gpt2": "n_layer", "llama": "num_hidden_layers"}
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # they change no size
TIED = {"bert": True, "gpt2": True, "llama": False}  # transformers' default for configs that say nothing


class Member(NamedTuple):
    """Which member of the file has the traces of a model, and the dimensions to evaluate them for."""

    name: str
    dimensions: dict[str, int]
    layers: int | None  # of a family


def member(config: dict, dropout: float | None) -> Member:
    """Return the member for a config, whether the file has it or not."""
    config = _plain(config)
    family = str(config.get("model_type"))
    if family not in DIMENSIONS:
        return Member(f"{family}-{_digest([config, dropout])}", {}, None)
    config = _with_defaults(config)
    free = {**DIMENSIONS[family], "layers": LAYERS[family]}
    given = {letter: config.get(name) for letter, name in free.items()}
    dimensions = {letter: size for letter, size in given.items() if type(size) is int and size > 0}
    if len(dimensions) < len(given):
        return Member("unknown", {}, None)
    dimensions.setdefault("w", dimensions["h"] // dimensions["a"])
    layers = dimensions.pop("layers")
    fixed = {name: value for name, value in config.items() if name not in (*free.values(), *IDS)}
    structure = [fixed, dropout, min(layers, MANY_LAYERS), sharing(dimensions)]
    return Member(f"{family}-{_digest(structure)}", dimensions, layers)


def _plain(config: dict) -> dict:
    """Return the config as a Llama if it is a Mistral whose attention has no window: its passes are the same."""
    if config.get("model_type") != "mistral" or config.get("sliding_window", 0) is not None:
        return config
    return {name: value for name, value in config.items() if name != "sliding_window"} | {"model_type": "llama"}


def sharing(dimensions: dict[str, int]) -> bool | str:
    """Return whether heads share keys and values; "one" if all of them do."""
    heads = dimensions["a"]
    groups = dimensions.get("g", heads)
    return "one" if groups == 1 else groups < heads


def _with_defaults(config: dict) -> dict:
    """The config with those of transformers' defaults that a dimension depends on."""
    family = config["model_type"]
    config = {"tie_word_embeddings": TIED[family]} | {name: each for name, each in config.items() if each is not None}
    if family == "gpt2" and "n_embd" in config:
        config.setdefault("n_inner", 4 * config["n_embd"])
    if family == "llama" and {"num_attention_heads", "hidden_size"} <= config.keys():
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return config


def _digest(structure: list) -> str:
    return hashlib.sha256(json.dumps(structure, sort_keys=True).encode()).hexdigest()[:12]


def key(options: tuple, rows: int) -> str:
    """Return the name of a pass in a member: all options but the tokens of a row, on which its terms depend."""
    precision, attention, checkpointing, loss, zero3_linear, cuda, *usual = options[1:]
    replaced = ["attention", "dropout", "autocast", *(["softmax"] if attention == "eager" else [])]
    said = [precision, attention, checkpointing, loss, zero3_linear, replaced if cuda else [], *filter(None, usual)]
    return json.dumps([*said, rows])


@functools.cache
def installed() -> dict[str, str | None]:
    """Return the versions that a trace depends on; None for a package that is not installed."""
    versions: dict[str, str | None] = dict.fromkeys(("torch", "transformers"))
    for package in versions:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def remarks(config: dict, dropout: float | None) -> list[str]:
    """Return a sentence if a model has traces here, and another transformers is installed than they were made with."""
    made_with = (_content(VERSIONS) or {}).get("transformers")
    current = installed()["transformers"]
    if current in (None, made_with) or not has_passes(config, dropout):
        return []
    return [f"Activations are traced with transformers {made_with}; {current} is installed here, and may differ."]


@functools.cache
def _content(name: str) -> dict | None:
    if not PATH.exists():  # while it is made for the first time
        return None
    with zipfile.ZipFile(PATH) as archive:
        return json.loads(archive.read(name)) if name in archive.namelist() else None


def look(config: dict, dropout: float | None) -> list | None:
    """Return what a look at the model would show; None if the file has no such model."""
    name, dimensions, layers = member(config, dropout)
    content = _content(name)
    if content is None:
        return None
    if layers is None:
        return content["look"]
    values = _values(content, dimensions)
    kind, _, templates, buffers, fused, limit, limited_by, vocabulary = content["look"]
    named = [[name, [values[each] for each in shape], block, trains] for name, shape, block, trains in templates]
    tensors = [tensor for tensor in named if tensor[2] == "embeddings"]
    for i in range(layers):
        of_layer = (tensor for tensor in named if tensor[2] == "layer.0")
        tensors += [
            [name.replace(".0.", f".{i}.", 1), shape, f"layer.{i}", trains] for name, shape, _, trains in of_layer
        ]
    tensors += [tensor for tensor in named if tensor[2] == "head"]
    return [kind, config["model_type"], tensors, values[buffers], fused, values[limit], limited_by, values[vocabulary]]


def has_passes(config: dict, dropout: float | None) -> bool:
    """Return whether the file has passes of a model, which include those with activation checkpointing."""
    return _content(member(config, dropout).name) is not None


def followed(config: dict, dropout: float | None, options: tuple, rows: tuple[int, ...]) -> Followed | None:
    """Return a pass over each number of rows; None if the file has no such pass."""
    name, dimensions, layers = member(config, dropout)
    content = _content(name)
    keys = [key(options, count) for count in rows]
    tokens = options[0]
    sizes = [size for letter, size in dimensions.items() if letter != "g"]
    unusual = any(size < 2 for size in (tokens, *sizes))  # a size of 1 leads to other kernels
    if content is None or unusual or not all(each in content["passes"] for each in keys):
        return None
    values = _values(content, dimensions | {"t": tokens})
    stored = [content["passes"][each] for each in keys]
    stacks = []
    for name, kinds, kept in stored[0]["stacks"]:
        kinds_of_all = kinds if layers is None else kinds[:1] * layers
        stacks.append(Stack(name, tuple(kinds_of_all), tuple(kept)))
    return Followed([_tape(content, each, values) for each in stored], stacks)


def _values(content: dict, dimensions: dict[str, int]) -> list[int]:
    """Evaluate every sum of a member."""
    terms = [prod(dimensions.get(letter, 0) for letter in letters) for letters in content["terms"]]
    return [sum(n * terms[term] for n, term in zip(each[::2], each[1::2], strict=True)) for each in content["sums"]]


def _tape(content: dict, stored: dict, values: list[int]) -> Tape:
    """Return a stored tape with its sizes."""
    tape: Tape = []
    tensor_count = 0
    known: dict[tuple[int, ...], tuple] = {}  # layers repeat each other
    for numbers in map(tuple, stored["tape"]):
        entry = content["entries"][numbers[0]]
        if entry[0] in ("freed", "gradient"):
            tape.append((entry[0], tensor_count - entry[1]))
            continue
        tensor_count += entry[0] == "made"
        if numbers not in known:
            known[numbers] = with_sizes(entry, [values[size] for size in numbers[1:]])
        tape.append(known[numbers])
    return tape


def with_sizes(entry: list, sizes: list[int]) -> tuple:
    """Return the entry of a tape from its part without sizes."""
    kind = entry[0]
    if kind == "made":
        return kind, sizes[0], entry[1]
    if kind == "kernel":
        return kind, entry[1] and (entry[1], tuple(sizes[:-1])), sizes[-1]
    return (*entry, *sizes)
