"""The built-in model shapes: published dimensions by name, so that building a model needs no network.

Each shape in shapes.json is a config of `transformers`, plus `hub`: the name of the published weights and tokenizer.
The dimensions come from the models' own config files. gpt3-2.7b and gpt3-13b are table 2.1 of the GPT-3 paper as GPT-2s
without weights; for 13B it prints a width of 5140, and 40 heads of 128 make 5120. Ours are gpt-tiny, which takes the
vocabulary of its data, and the -micro shapes, as small as bert-tiny, with the vocabulary of the embedded corpus.

models.json has the dimensions of further published models, which the study only predicts. They are those of the models'
own config files; 52 of them were compared with litgpt's config.py (26857050). `parameters` is the published number,
which a test counts. Baichuan's and InternLM2's joined products of query, key and value are three there.
"""

import functools
import json
import re
from pathlib import Path

from study.core import files
from study.core import parsing as texts

VOCABULARY = 2048
MAX_CONFIG_BYTES = 8 * 2**20  # of a config.json: one with 20,000 labels has 1 MB
SHAPES: dict[str, dict] = json.loads(Path(__file__).with_suffix(".json").read_text())
VARIANT = re.compile(r"(?i)[-_ ](chat|instruct|it|hf|base)(?=[-_ ]|$)")
NO_FUSED_ATTENTION = ("gptj", "gemma2")  # model types for which transformers 5 has eager attention only


def config_of(name: str, vocabulary: int = VOCABULARY) -> dict:
    """Return the config of a built-in shape. `vocabulary` is for shapes that take the vocabulary of their data."""
    shape = _without(models()[name], "hub")
    if shape.get("vocab_size", 0) is None:
        shape |= {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None}
    return shape


def shape_of(model: str) -> str:
    """Return the built-in shape that a hub name or the last part of a path means; the name itself if it means none."""
    last = Path(model).name
    return next((name for name, shape in SHAPES.items() if last == Path(shape.get("hub") or name).name), model)


@functools.cache
def models() -> dict[str, dict]:
    """Return the configs of all models that have a name: the built-in shapes, and those that are only predicted."""
    further = json.loads(Path(__file__).with_name("models.json").read_text())
    return SHAPES | {name: _without(config, "parameters") for name, config in further.items()}


def model_of_name(name: str) -> str | None:
    """Return the model of `models` that a name or a hub name means, in any spelling. None if it means none.

    Variants for chats have the dimensions of their base.
    """
    last = Path(name).name
    base = VARIANT.sub("", last)
    for spelling in (letters(last), letters(base), letters(base).removeprefix("meta")):
        for known, config in models().items():
            if spelling in (letters(known), letters(Path(config.get("hub") or known).name)):
                return known
    return None


def _without(config: dict, *names: str) -> dict:
    return {key: value for key, value in config.items() if key not in names}


def with_size(size: str) -> list[str]:
    """Return the built-in shapes whose names end with a size such as 7B."""
    return [name for name in SHAPES if name.endswith(f"-{size.strip().lower()}")]


def letters(name: str) -> str:
    """Return a name without signs and capitals."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def model_type(model: str) -> str | None:
    """Return the `model_type` of a built-in shape, a local folder or the hub name of a shape. None if unknown."""
    if model in SHAPES:
        return SHAPES[model]["model_type"]
    if not is_local(model):
        return SHAPES.get(shape_of(model), {}).get("model_type")
    try:
        config = texts.from_json(files.read(Path(model) / "config.json", MAX_CONFIG_BYTES))
    except (OSError, ValueError):
        return None  # whoever builds the model says what is wrong with it
    return config.get("model_type") if isinstance(config, dict) else None


def is_local(name: str) -> bool:
    """Return whether a name is a path that exists, as opposed to a name on the hub."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # too long for a path, or with a NUL in it
        return False
