"""What a script loads from the hub: if it cannot be had here, that is told before anything long, and always alike."""

import ast
import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from study.core.errors import Stop
from study.core.shapes import is_local, is_offline, model_of_name, try_to_connect

# The files that a tokenizer, or a processor of images, is read from (transformers 5.23). tokenizer_config.json alone
# has no words.
TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "preprocessor_config.json",
)  # fmt: skip
REMEDIES = {
    "config": "give --config-of {}=FOLDER, a folder with its config.json",
    "tokenizer": "give --config-of {}=FOLDER, a folder with its config.json and tokenizer",
    "weights": "load them before by `hf download {}`, or give the script a folder",
    "data set": "load it before by `hf download --repo-type dataset {}`, or give the script a file",
}

NOT_HERE = "the hub does not answer, and it is not in the cache"


def missing(what: str, name: str, reason: str, where: str | None = None) -> Stop:
    """Return that something of the hub is not here. `what` is one of REMEDIES."""
    of = "" if what == "data set" else " of"
    return Stop(f"the {what}{of} {name} cannot be had ({reason})", REMEDIES[what].format(name), "hub", where)


@contextlib.contextmanager
def loading(what: str, name: object) -> Iterator[None]:
    """Tell in one way that something of the hub cannot be had. What is wrong with a local file its library says."""
    try:
        yield
    except Exception as error:  # transformers asks for sentencepiece where it has no file at all
        of_hub = error.status == "hub" if isinstance(error, Stop) else isinstance(error, OSError) or is_offline()
        if is_local(str(name)) or not of_hub:
            raise
        raise missing(what, str(name), why(error)) from None


def why(error: Exception) -> str:
    return NOT_HERE if is_offline() else str(error).splitlines()[0].rstrip(".")


def telling(what: str, load: Callable) -> Callable:
    """Return a function that loads something by its first argument, and tells so if it cannot be had."""

    def loaded(*args, **kwargs):
        with loading(what, next(iter([*args, *kwargs.values()]))):
            return load(*args, **kwargs)

    return loaded


def refuse_missing(script: Path, configs_of: Mapping[str, str]) -> None:
    """Raise Stop for what a script loads in any case and cannot have. Without a hub libraries use the cache at once."""
    try_to_connect()
    if not is_offline():
        return
    texts: dict[str, object] = {}
    for statement in ast.parse(script.read_bytes()).body:  # those in a branch, or a function, may never run
        value = getattr(statement, "value", None)
        if isinstance(statement, ast.Assign) and isinstance(value, ast.Constant):
            texts |= {ast.unparse(target): value.value for target in statement.targets}
        what, name = (isinstance(value, ast.Call) and _loaded(value, texts)) or ("", "")
        if name and not (name in configs_of or is_local(name) or _is_here(what, name)):
            raise missing(what, name, NOT_HERE, f"{script.name}:{statement.lineno}")


def _loaded(call: ast.Call, texts: Mapping[str, object]) -> tuple[str, str] | None:
    """Return what a call loads from the hub, and its name there. None: nothing, or that is not known."""
    function = ast.unparse(call.func)
    if not call.args or any(each.arg in ("data_files", "data_dir") for each in call.keywords):
        return None
    first = call.args[0]
    name = first.value if isinstance(first, ast.Constant) else texts.get(ast.unparse(first))
    if not isinstance(name, str):
        return None
    owner, _, last = function.rpartition(".")
    if last == "from_pretrained":
        return ("tokenizer" if "Tokenizer" in owner or "Processor" in owner else "config"), name
    return ("data set", name) if last == "load_dataset" and "/" in name else None


def _is_here(what: str, name: str) -> bool:
    """Whether something of the hub was downloaded before, or is built in."""
    from huggingface_hub import constants, try_to_load_from_cache

    if what == "data set":
        folders = (Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}", Path(constants.HF_HOME))
        return folders[0].is_dir() or any(folders[1].glob(f"datasets/{name.replace('/', '___').lower()}*"))
    if what == "config" and model_of_name(name):
        return True
    files = TOKENIZERS if what == "tokenizer" else ("config.json", "adapter_config.json", "model_index.json")
    return any(isinstance(try_to_load_from_cache(name, file), str) for file in files)
