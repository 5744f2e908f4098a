"""The built-in model shapes: published dimensions by name, so that building a model needs no network.

Each is a config of `transformers`, plus `hub`, the name of the published weights and tokenizer, and `parameters`, their
published number, which a test counts. The dimensions come from the models' own config files, in models.json (models
that the study only predicts) compared with litgpt's config.py (26857050) for 52 of them. gpt3-2.7b and gpt3-13b are
table 2.1 of the GPT-3 paper as GPT-2s without weights; for 13B it prints a width of 5140, and 40 heads of 128 make
5120. Ours are gpt-tiny and the -micro shapes. Baichuan's and InternLM2's joined products of query, key and value are
three.
"""

import functools
import json
import re
from pathlib import Path

from study.core import files
from study.core.errors import FULL_INSTALL, Stop, nearest

VOCABULARY = 2048
MAX_CONFIG_BYTES = 8 * 2**20  # of a config.json: one with 20,000 labels has 1 MB
SHAPES: dict[str, dict] = files.beside(__file__, "shapes.json")
VARIANT = re.compile(r"(?i)[-_ ](chat|instruct|it|hf|base|bnb-4bit)(?=[-_ ]|$)")
# Model types for which transformers 5 has no sdpa, and those of them that FlashAttention computes, which has Gemma-2's
# cap of scores (modeling_gemma2.py:351 of 5.23).
NO_FUSED_ATTENTION = ("gptj", "gemma2", "deberta-v2")
FUSED_BY_FLASH = ("gemma2",)


def config_of(name: str, vocabulary: int = VOCABULARY) -> dict:
    """Return the config of a built-in shape. `vocabulary` is for shapes that take the vocabulary of their data."""
    shape = {key: value for key, value in models()[name].items() if key not in ("hub", "parameters")}
    if shape.get("vocab_size", 0) is None:  # GPT-2's ids of special tokens would be outside of a small vocabulary
        shape |= {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None}
    return shape


def shape_of(model: str) -> str:
    """Return the built-in shape that a hub name or the last part of a path means; the name itself if it means none."""
    last = Path(model).name
    for name, shape in SHAPES.items():
        if last == Path(shape.get("hub") or name).name:
            return name
    return model


@functools.cache
def models() -> dict[str, dict]:
    """Return the configs of all models that have a name: the built-in shapes, and those that are only predicted."""
    return SHAPES | files.beside(__file__, "models.json")


@functools.cache
def _by_letters() -> dict[str, str]:
    """Return models by the letters of their names and hub names; of two that share them, the first."""
    names: dict[str, str] = {}
    for known, config in models().items():
        names.setdefault(letters(known), known)
        names.setdefault(letters(Path(config.get("hub") or known).name), known)
    return names


def model_of_name(name: str) -> str | None:
    """Return the model of `models` that a name or a hub name means, in any spelling. None if it means none."""
    # Variants for chats have the dimensions of their base.
    last = Path(name).name
    base = VARIANT.sub("", last)
    # Meta-Llama-3-8B and Llama-3-8B are one: Meta has renamed its models.
    spellings = (letters(last), letters(base), letters(base).removeprefix("meta"))
    return next((_by_letters()[each] for each in spellings if each in _by_letters()), None)


def of_size(params: float) -> list[str]:
    """Return the models of nearly so many parameters that are called by their size, such as 7b: the nearest first."""
    found = {name: re.search(r"-([\d.]+)b$", name) for name in models()}
    called = {name: 1e9 * float(billions[1]) for name, billions in found.items() if billions}
    published = {name: models()[name].get("parameters") or size for name, size in called.items()}
    # Another tenth of the parameters is another tenth of the memory.
    near = [name for name, size in published.items() if abs(size - params) <= 0.1 * params]

    def order(name: str) -> tuple[float, bool, float]:
        return abs(called[name] - params), name not in SHAPES, abs(published[name] - params)

    return sorted(near, key=order)


@functools.lru_cache(2**12)  # a name is compared with those of all models
def letters(name: str) -> str:
    """Return a name without signs and capitals."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def model_type(model: str) -> str | None:
    """Return the `model_type` of a built-in shape, a local folder or the hub name of a shape. None if unknown."""
    if model not in SHAPES and is_local(model):
        return _local_config(model).get("model_type")
    return SHAPES.get(shape_of(model), {}).get("model_type")


def _local_config(model: str) -> dict:
    """Return the config of a model in a folder; empty if it cannot be read. Whoever builds the model says why."""
    try:
        return dict(files.from_json(files.read(Path(model) / "config.json", MAX_CONFIG_BYTES)))
    except (OSError, ValueError, TypeError):
        return {}


def is_local(name: str) -> bool:
    """Return whether a name is a path that exists, as opposed to a name on the hub."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # too long for a path, or with a NUL in it
        return False


# --- The Hugging Face Hub: whether it answers, and the errors if something cannot be loaded. It needs no torch

TIMEOUT_S = 3
WITHOUT_HUB = (
    "give --data embedded with a built-in --model, or local folders (--data, --model, --tokenizer, --init random)"
)


@functools.cache
def try_to_connect() -> None:
    """Ask the Hub once for anything, before a library does. If it does not answer, switch the libraries to offline."""
    # Otherwise they would retry for minutes before they use earlier downloads. They read HF_HUB_OFFLINE from the
    # environment only while they are imported, and this constant afterwards.
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_S)
    except Exception:  # no network, HF_ENDPOINT is no address, or the user has said that there is none
        constants.HF_HUB_OFFLINE = True


def prepare_to_load(name: str) -> None:
    """Call this before a library loads `name`, a local path or a name on the Hub."""
    if not is_local(name):
        try_to_connect()


def is_offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def hub_config(model: str) -> Path:
    """Return the config.json of a model, from the Hub or an earlier download."""
    try:
        from huggingface_hub import hf_hub_download  # the light install lacks it

        try_to_connect()
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # the library raises a dozen types; each means that it cannot be loaded
        raise not_found(model, error) from error


def refuse_code(model: str) -> None:
    """Raise Stop for a folder with Python code that its config.json wants to run. The check does not load the code."""
    # A folder without such code is read with transformers' own class. Names on the Hub are checked by transformers.
    # A value of auto_map is "module.Class", "repository--module.Class", or a list of such.
    classes = json.dumps(_local_config(model).get("auto_map"))
    modules = {f"{module}.py" for module in re.findall(r'(\w+)\.\w+"', classes)}  # of "module.Class"
    if any(Path(model, module).exists() for module in modules):
        what = f"--model {model} has Python code of its own ({', '.join(sorted(modules))}), which was not run"
        raise Stop(what, "take auto_map out of its config.json to use transformers' own class, if it has one")


def not_found(model: str, error: Exception) -> Stop:
    """Return the error for a model that cannot be loaded. The remedy names its built-in shape, if there is one."""
    if Path(model).is_file():
        return Stop(f"--model {model} is a file", "give a folder with a config.json, or --params")
    what = f"--model {model} is not a built-in shape, nor a folder with a config.json, nor available from the Hub"
    otherwise = "give a folder, or --params"
    if isinstance(error, ModuleNotFoundError):
        otherwise += f"; or {FULL_INSTALL}"
    remedy = nearest(model.rpartition("/")[2], models(), most=3, otherwise=otherwise)
    if (ours := shape_of(model)) in SHAPES:
        remedy = f"give {ours}, the built-in shape of that model"
    elif model_of_name(model):
        remedy = "study estimate and study advise alone know its dimensions: give a folder with its config.json"
    return Stop(f"{what} ({why_not_loaded(model, error)})", remedy)


def why_not_loaded(name: str, error: Exception) -> str:
    """Return why a local folder or a name on the Hub cannot be loaded, as part of a sentence."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name}, which asks it, is not installed"
    if is_offline() and isinstance(error, OSError) and not is_local(name):
        return "the hub does not answer, and it was not downloaded before"
    if "trust_remote_code" in str(error):
        return "it needs Python code of its own, and the study never runs code from a model or a data set"
    return f"{type(error).__name__}: {files.why(error)}"
