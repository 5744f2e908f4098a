"""The two tasks: the loss of each row, the metric over the evaluation rows, and the rows, generated or of real text.

The generated corpus is not language, but a model can learn it: reviews whose opinion words decide the label, and a
stream in which the class of each word decides the class of the next. A model that learns nothing here is not training.

`datasets` and the tokenizers are imported where they are used: the generated corpus needs neither, and importing them
takes half a second in every rank.
"""

import itertools
import math
from pathlib import Path

import numpy as np
import torch

from study.core import cache, shapes
from study.core.errors import Stop
from study.core.models.step import Batch, logits_and_losses
from study.core.settings import Settings
from study.core.shapes import SHAPES, VOCABULARY, is_local
from study.training.models import hub_name, weights_dtype

SPLIT_SEED = 42  # the source document splits and shuffles with 42, whatever the seed of the run
HUB_DATA = {"imdb": ("stanfordnlp/imdb", None), "wikitext": ("Salesforce/wikitext", "wikitext-2-v1")}
Values = dict[str, float | None]


def row_losses(settings: Settings, model, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each row, in fp32 in every precision, and its predicted class."""
    config = getattr(model, "module", model).config  # of what DDP or DeepSpeed wraps
    logits, losses = logits_and_losses(config, model, batch, weights_dtype(settings), row_tokens=settings.sequence)
    if settings.task == "imdb":
        return losses, logits.argmax(-1)
    return losses, torch.zeros_like(losses, dtype=torch.long)


def metric(settings: Settings, losses: np.ndarray, predictions: np.ndarray, rows: Batch) -> Values:
    """Accuracy or perplexity over the evaluation rows, with `evaluate` on real data.

    Runs on the embedded corpus do without `evaluate`: importing it takes 0.8 s and 110 MB, and they are short.
    """
    if settings.task == "imdb":
        formula, dtype, values, references = accuracy, "int64", predictions, rows["labels"].numpy()
    else:
        formula, dtype, values = perplexity, "float64", losses
        references = np.full(len(losses), rows["input_ids"].shape[1] - 1)  # the first token is not predicted
    if settings.data == "embedded":
        return formula(values, references)
    import datasets
    import evaluate

    class FormulaMetric(evaluate.Metric):  # the library's own `load` would fetch code from the hub
        def _info(self):
            dtypes = {"predictions": dtype, "references": "int64"}
            features = datasets.Features({name: datasets.Value(each) for name, each in dtypes.items()})
            text = formula.__doc__
            return evaluate.MetricInfo(description=text, citation="", inputs_description="", features=features)

        def _compute(self, predictions, references):
            return formula(predictions, references)

    return FormulaMetric(keep_in_memory=True).compute(predictions=values, references=references)


def accuracy(predictions, references) -> Values:
    """Share of right answers."""
    return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}


def perplexity(predictions, references) -> Values:
    """exp of the mean negative log-likelihood per token: `predictions` are means per row, `references` token counts."""
    mean = np.average(np.asarray(predictions, np.float64), weights=np.asarray(references))
    return {"perplexity": math.exp(mean) if mean < 700 else None}  # exp(710) is more than a double holds


# 1 is an unknown word, of which there is none
PAD = 0
CLS = 2
SEP = 3
FIRST_WORD = 4
NUM_CLASSES = 8
OPINIONS = 32  # words of praise; the same number of blame


def reviews(rows: int, sequence: int, seed: int) -> dict[str, np.ndarray]:
    """Batch like tokenised reviews: [CLS] words [SEP] padding, with a label that their opinion words decide.

    Three words in ten are opinions, and nine of ten opinions agree with the label. The rest is filler with a Zipf
    distribution, as in text. One label in twenty is wrong, so that the loss has a floor.
    """
    rng = np.random.default_rng([seed, 1])
    labels = rng.integers(0, 2, rows)
    praise = FIRST_WORD + np.arange(OPINIONS)
    first_filler = FIRST_WORD + 2 * OPINIONS
    filler = first_filler + _zipf(rng, (rows, sequence), VOCABULARY - first_filler)
    # Drawn for every position, though only some hold an opinion: so no draw depends on another.
    agrees = rng.random((rows, sequence)) < 0.9
    opinion = rng.choice(praise, (rows, sequence)) + OPINIONS * (labels[:, None] ^ agrees)
    ids = np.where(rng.random((rows, sequence)) < 0.3, opinion, filler)
    labels = np.where(rng.random(rows) < 0.05, 1 - labels, labels)
    length = rng.integers(sequence // 2, sequence + 1, rows)
    position = np.arange(sequence)[None, :]
    ids[:, 0] = CLS
    ids[position == length[:, None] - 1] = SEP
    mask = position < length[:, None]
    return {
        "input_ids": np.where(mask, ids, PAD),
        "attention_mask": mask.astype(np.int64),
        "labels": labels.astype(np.int64),
    }


def stream(tokens: int, seed: int, part: str) -> np.ndarray:
    """Tokens in which the class of each word decides the class of the next, nine times in ten.

    The rule is the same for each part ("train", "validation"); the words are not.
    """
    rng = np.random.default_rng([seed, 2, ("train", "validation").index(part)])
    following = np.random.default_rng(seed).permutation(NUM_CLASSES)  # the rule: each class has one follower
    jumps = rng.random(tokens) < 0.1
    anywhere = rng.integers(0, NUM_CLASSES, tokens)
    classes = np.empty(tokens, np.int64)
    now = 0
    for i in range(tokens):
        now = anywhere[i] if jumps[i] else following[now]
        classes[i] = now
    per_class = (VOCABULARY - FIRST_WORD) // NUM_CLASSES
    return FIRST_WORD + classes * per_class + _zipf(rng, tokens, per_class)


def _zipf(rng: np.random.Generator, shape, count: int) -> np.ndarray:
    """Return numbers below `count`, the k-th with a probability proportional to 1 / k^1.1."""
    weight = 1 / np.arange(1, count + 1) ** 1.1
    return rng.choice(count, shape, p=weight / weight.sum())


# --- real text ------------------------------------------------------------------------------------------------------


def data_source(settings: Settings) -> str:
    """A text that identifies the data: its name on the hub, or its folder with a digest of file sizes and times."""
    if settings.data == "hub":
        return "/".join(filter(None, HUB_DATA[settings.task]))
    folder = Path(settings.data)
    if not (is_local(settings.data) and folder.is_dir()):
        raise Stop(f"--data {settings.data} is not a folder", "give an existing folder, 'hub' or 'embedded'")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    seen = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"{folder.name} {cache.fingerprint(seen)}"


def dataset(settings: Settings) -> dict:
    """Return the task's data, split for training and evaluation."""
    import datasets

    name, config = HUB_DATA[settings.task] if settings.data == "hub" else (settings.data, None)
    if settings.data == "hub":
        shapes.try_to_connect()
        datasets.config.HF_HUB_OFFLINE = shapes.is_offline()  # `datasets` has a copy of the constant
    try:
        splits = datasets.load_dataset(name, config, trust_remote_code=False)
    except Exception as error:  # the libraries raise a dozen types here; each means that the data cannot be read
        what = f"the data set {name} cannot be read ({shapes.why_not_loaded(name, error)})"
        raise Stop(what, shapes.WITHOUT_HUB) from error
    needed = {"imdb": (["train"], ["label", "text"]), "wikitext": (["train", "validation"], ["text"])}
    parts, columns = needed[settings.task]
    if not all(part in splits and set(columns) <= set(splits[part].column_names) for part in parts):
        raise _other_layout(settings, f"lacks {' and '.join(parts)} with the columns {', '.join(columns)}")
    if settings.task == "wikitext":
        return {"train": splits["train"], "eval": splits["validation"]}
    # The source document holds out a fifth of the train split.
    split = splits["train"].train_test_split(test_size=0.2, seed=SPLIT_SEED)
    return {"train": split["train"], "eval": split["test"]}


def _other_layout(settings: Settings, what: str) -> Stop:
    return Stop(f"--data {settings.data} {what}", f"give a data set in the layout of {HUB_DATA[settings.task][0]}")


def load_tokenizer(settings: Settings):
    """Return the tokenizer that is asked for, or the model's own. Our own shapes use GPT-2's vocabulary."""
    from transformers import AutoTokenizer

    name = settings.tokenizer or hub_name(settings) or SHAPES["gpt2"]["hub"]
    shapes.prepare_to_load(name)
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        what = f"the tokenizer {name} cannot be read ({shapes.why_not_loaded(name, error)})"
        raise Stop(what, shapes.WITHOUT_HUB) from error


def review_rows(settings: Settings, tokenizer, split, part: str, count: int | None) -> Batch:
    """Return so many random rows of a split, padded, as the source document takes them."""
    count = _checked_count(part, count, len(split), "rows")
    chosen = split.shuffle(seed=SPLIT_SEED).select(range(count))
    if strange := set(chosen["label"]) - {0, 1}:  # a GPU would only report a failed assertion
        raise _other_layout(settings, f"has the label {min(strange, key=str)!r}, and task imdb has two, 0 and 1")
    options = {"padding": "max_length", "truncation": True, "max_length": settings.sequence}
    encoded = tokenizer(list(chosen["text"]), return_tensors="pt", **options)
    columns = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    return columns | {"labels": torch.tensor(chosen["label"])}


def text_blocks(settings: Settings, tokenizer, split, part: str, count: int | None) -> Batch:
    """All text of a split as one string of tokens, cut into blocks; an incomplete last block is dropped."""
    ids = tokenizer(list(split["text"]), add_special_tokens=False, verbose=False)["input_ids"]
    stream = torch.tensor(list(itertools.chain.from_iterable(ids)))
    blocks = stream[: len(stream) // settings.sequence * settings.sequence].view(-1, settings.sequence)
    return {"input_ids": blocks[: _checked_count(part, count, len(blocks), "blocks")].clone()}


def _checked_count(part: str, count: int | None, have: int, unit: str) -> int:
    if count is not None and count > have:
        raise Stop(f"--{part}-rows {count} is more than the {have} {unit} there are", f"give at most {have}")
    return count or have
