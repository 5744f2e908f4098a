"""The rows of a task: read and tokenised once, then cached as tensors; or generated.

`datasets` and the tokenizers are imported where they are used: the embedded corpus needs neither, and importing them
takes half a second in every rank.
"""

import hashlib
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.functional import pad

from study.errors import Stop
from study.io.files import safe_join
from study.machine import cache, hub
from study.models.step import FOLLOWING, IGNORED, inputs
from study.spec.settings import Settings
from study.spec.shapes import SHAPES, VOCABULARY, is_local
from study.training import corpus, models

SPLIT_SEED = 42  # the source document splits and shuffles with 42, whatever the seed of the run
ROWS = "rows.safetensors"  # in each entry of the cache
HUB_DATA = {"imdb": ("stanfordnlp/imdb", None), "wikitext": ("Salesforce/wikitext", "wikitext-2-v1")}

Rows = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Data:
    """Tokenised rows for training and evaluation, and where they came from."""

    train: Rows
    eval: Rows
    vocabulary: int | None  # None: the model's own
    source: str

    @property
    def train_rows(self) -> int:
        return len(next(iter(self.train.values())))

    @property
    def checksum(self) -> str:
        digest = hashlib.sha256()
        with unset_fake_temporarily():  # under --init none these tensors could not be read
            for rows in (self.train, self.eval):
                for name in sorted(rows):
                    digest.update(rows[name].numpy().tobytes())
        return digest.hexdigest()[:16]


def part_of_rows(rows: Rows, part: int, parts: int) -> Rows:
    """One of several equal parts of the rows' tokens, with their positions and the token that follows each."""
    ids = rows["input_ids"]
    length = ids.shape[-1] // parts
    columns = slice(part * length, (part + 1) * length)
    following = pad(ids[..., 1:], (0, 1), value=IGNORED)
    positions = torch.arange(columns.start, columns.stop).expand(*ids.shape[:-2], 1, -1)  # the same in all rows
    tokens = {"input_ids": ids[..., columns].clone(), FOLLOWING: following[..., columns].clone()}
    return tokens | {"position_ids": positions}


def load_data(settings: Settings) -> Data:
    """The rows of a task, from the cache if they are in it."""
    if settings.task == "synthetic":
        return _synthetic(settings)
    if settings.data == "embedded":
        return _embedded(settings)
    source = _data_source(settings)
    tokenizer = _tokenizer(settings)
    key = {
        "task": settings.task,
        "source": source,
        "sequence": settings.sequence,
        "split": SPLIT_SEED,
        "rows": [settings.train_rows, settings.eval_rows],
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
    }

    def write(folder: Path) -> None:
        prepare = _reviews if settings.task == "imdb" else _blocks
        splits, counts = _dataset(settings), {"train": settings.train_rows, "eval": settings.eval_rows}
        parts = {part: prepare(settings, tokenizer, splits[part], part, count) for part, count in counts.items()}
        tensors = {f"{part}.{name}": rows for part, columns in parts.items() for name, rows in columns.items()}
        save_file(tensors, folder / ROWS)

    tensors = load_file(cache.entry(safe_join(settings.cache_dir, "data", cache.fingerprint(key)), write) / ROWS)
    split: dict[str, Rows] = {"train": {}, "eval": {}}
    for name, rows in tensors.items():
        part, _, column = name.partition(".")
        split[part][column] = rows
    return Data(**split, vocabulary=len(tokenizer), source=source)


def _embedded(settings: Settings) -> Data:
    # The corpus has its own seed: runs with different seeds differ in weights and order, but not in their data.
    length = settings.sequence
    if settings.task == "imdb":
        train = corpus.reviews(settings.train_rows, length, SPLIT_SEED)
        test = corpus.reviews(settings.eval_rows, length, SPLIT_SEED + 1)
    else:
        counts = {"train": settings.train_rows or 1600, "validation": settings.eval_rows}
        train, test = (
            {"input_ids": corpus.stream(n * length, SPLIT_SEED, part).reshape(n, length)} for part, n in counts.items()
        )
    tensors = [{name: torch.from_numpy(array) for name, array in rows.items()} for rows in (train, test)]
    return Data(*tensors, vocabulary=VOCABULARY, source="embedded")


def _synthetic(settings: Settings) -> Data:
    """Random rows of the shape that the model takes, as many as a rank reads in a step. No rows for evaluation,
    because only virtual ranks use these."""
    config = models.model_config(settings, vocabulary=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SPLIT_SEED)
        rows = settings.train_rows or settings.micro_batch * settings.accumulation
        columns = inputs(config, rows, settings.sequence)
    return Data(columns, {}, vocabulary=None, source=f"synthetic {' and '.join(columns)} for {config.model_type}")


def _data_source(settings: Settings) -> str:
    """A text that identifies the data: its name on the hub, or its folder with a digest of file sizes and times."""
    if settings.data == "hub":
        return "/".join(filter(None, HUB_DATA[settings.task]))
    folder = Path(settings.data)
    if not (is_local(settings.data) and folder.is_dir()):
        raise Stop(f"--data {settings.data} is not a folder", "give an existing folder, 'hub' or 'embedded'")
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return f"{folder.name} {cache.fingerprint([(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files])}"


def _dataset(settings: Settings) -> dict:
    """The task's data, split for training and evaluation."""
    import datasets

    name, config = HUB_DATA[settings.task] if settings.data == "hub" else (settings.data, None)
    if settings.data == "hub":
        hub.try_to_connect()
        datasets.config.HF_HUB_OFFLINE = hub.is_offline()  # `datasets` has a copy of the constant
    try:
        splits = datasets.load_dataset(name, config, trust_remote_code=False)
    except Exception as error:  # the libraries raise a dozen types here; each means that the data cannot be read
        what = f"the data set {name}" if settings.data == "hub" else f"--data {name}"
        raise Stop(f"{what} cannot be read ({hub.reason(name, error)})", hub.WITHOUT_HUB) from error
    columns = ["label", "text"] if settings.task == "imdb" else ["text"]
    parts = ["train"] if settings.task == "imdb" else ["train", "validation"]
    if not all(part in splits and set(columns) <= set(splits[part].column_names) for part in parts):
        raise _other_layout(settings, f"lacks {' and '.join(parts)} with the columns {', '.join(columns)}")
    if settings.task == "wikitext":
        return {"train": splits["train"], "eval": splits["validation"]}
    # The source document holds out a fifth of the train split.
    split = splits["train"].train_test_split(test_size=0.2, seed=SPLIT_SEED)
    return {"train": split["train"], "eval": split["test"]}


def _other_layout(settings: Settings, what: str) -> Stop:
    return Stop(f"--data {settings.data} {what}", f"give a data set in the layout of {HUB_DATA[settings.task][0]}")


def _tokenizer(settings: Settings):
    from transformers import AutoTokenizer

    name = settings.tokenizer or (SHAPES[settings.model]["hub"] if settings.model in SHAPES else settings.model)
    name = name or SHAPES["gpt2"]["hub"]  # our own shapes use GPT-2's vocabulary
    hub.prepare_to_load(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        raise Stop(f"the tokenizer {name} cannot be read ({hub.reason(name, error)})", hub.WITHOUT_HUB) from error
    if not tokenizer.is_fast:
        raise Stop(f"the tokenizer {name} has no tokenizer.json and no vocabulary", "give another --tokenizer")
    if settings.task == "imdb" and tokenizer.pad_token is None:
        raise Stop(f"the tokenizer {name} has no padding token, which task imdb needs", "give another --tokenizer")
    return tokenizer


def _reviews(settings: Settings, tokenizer, split, part: str, count: int) -> Rows:
    """So many random rows of a split, padded, as the source document takes them."""
    _check_count(part, count, len(split), "rows")
    chosen = split.shuffle(seed=SPLIT_SEED).select(range(count))
    _check_texts(settings, chosen["text"])
    if strange := set(chosen["label"]) - {0, 1}:
        raise _other_layout(settings, f"has the label {min(strange, key=str)!r}, and task imdb has two, 0 and 1")
    options = {"padding": "max_length", "truncation": True, "max_length": settings.sequence}
    encoded = tokenizer(list(chosen["text"]), return_tensors="pt", **options)
    columns = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    return columns | {"labels": torch.tensor(chosen["label"])}


def _blocks(settings: Settings, tokenizer, split, part: str, count: int | None) -> Rows:
    """All text of a split as one string of tokens, cut into blocks; an incomplete last block is dropped."""
    _check_texts(settings, split["text"])
    ids = tokenizer(list(split["text"]), add_special_tokens=False, verbose=False)["input_ids"]
    stream = list(itertools.chain.from_iterable(ids))
    have = len(stream) // settings.sequence
    _check_count(part, count, have, "blocks")
    blocks = torch.tensor(stream[: have * settings.sequence]).view(have, settings.sequence)
    return {"input_ids": blocks[:count].clone()}


def _check_count(part: str, count: int | None, have: int, unit: str) -> None:
    if count is not None and count > have:
        raise Stop(f"--{part}-rows {count} is more than the {have} {unit} there are", f"give at most {have}")


def _check_texts(settings: Settings, texts) -> None:
    strange = [text for text in texts if not isinstance(text, str)]
    if strange:
        raise _other_layout(settings, f"has {str(strange[0])[:60]!r} in the column text, where text is expected")
