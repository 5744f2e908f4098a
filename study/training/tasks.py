"""The two tasks: the loss of each row, the metric over the evaluation rows, and the rows, generated or of real text.

The generated corpus is not language, but a model can learn it: one that learns nothing here is not training.
`datasets` and the tokenizers are imported where they are used, because they take half a second in every rank.
"""

import itertools
from pathlib import Path

import numpy as np
import torch

from study.core import cache, shapes
from study.core.errors import Stop
from study.core.models.step import Batch, logits_and_losses
from study.core.settings import Settings
from study.core.shapes import SHAPES, VOCABULARY
from study.training.models import hub_name, reading, weights_dtype

SPLIT_SEED = 42  # the source document splits and shuffles with 42, whatever the seed of the run
HUB_DATA = {"imdb": ("stanfordnlp/imdb", None), "wikitext": ("Salesforce/wikitext", "wikitext-2-v1")}
COLUMNS = {"imdb": ["label", "text"], "wikitext": ["text"]}


def row_losses(settings: Settings, model, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each row, in fp32 in every precision, and its predicted class."""
    config = getattr(model, "module", model).config  # of what DDP or DeepSpeed wraps
    logits, losses = logits_and_losses(config, model, batch, weights_dtype(settings), row_tokens=settings.sequence)
    if settings.task == "imdb":
        return losses, logits.argmax(-1)
    return losses, torch.zeros_like(losses)


def metric(settings: Settings, losses: np.ndarray, predictions: np.ndarray, rows: Batch) -> dict[str, float | None]:
    """Return accuracy or perplexity over the evaluation rows."""
    from study.training.evaluation import Accuracy, Perplexity  # which takes seconds

    if settings.task == "imdb":
        return Accuracy().compute(predictions=predictions, references=rows["labels"].numpy())
    return Perplexity().compute(losses=losses)


# 1 is an unknown word, of which there is none
PAD = 0
CLS = 2
SEP = 3
FIRST_WORD = 4
NUM_CLASSES = 8
OPINIONS = 32  # words of praise; the same number of blame


def reviews(rows: int, sequence: int, seed: int) -> dict[str, np.ndarray]:
    """Return rows like tokenised reviews: [CLS] words [SEP] padding, with a label that their opinion words decide."""
    # Three words in ten are opinions, and nine of ten opinions agree with the label. The rest is filler.
    rng = np.random.default_rng([seed, 1])
    labels = rng.integers(0, 2, rows)
    praise = FIRST_WORD + np.arange(OPINIONS)
    first_filler = FIRST_WORD + 2 * OPINIONS
    filler = first_filler + _zipf(rng, (rows, sequence), VOCABULARY - first_filler)
    # Drawn for every position, though only some hold an opinion: so no draw depends on another.
    agrees = rng.random((rows, sequence)) < 0.9
    opinion = rng.choice(praise, (rows, sequence)) + OPINIONS * (labels[:, None] ^ agrees)
    ids = np.where(rng.random((rows, sequence)) < 0.3, opinion, filler)
    labels = np.where(rng.random(rows) < 0.05, 1 - labels, labels)  # some are wrong, so that the loss has a floor
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
    """Return tokens in which the class of each word decides the class of the next, nine times in ten."""
    rng = np.random.default_rng([seed, 2, ("train", "validation").index(part)])
    # The rule is the same for each part: each class has one follower.
    following = np.random.default_rng(seed).permutation(NUM_CLASSES)
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
    """Return what identifies the data: its name on the hub, or its folder with a digest of file sizes and times."""
    if settings.data == "hub":
        return "/".join(filter(None, HUB_DATA[settings.task]))
    folder = Path(settings.data)
    if not folder.is_dir():
        raise Stop(f"--data {settings.data} is not a folder", "give an existing folder, 'hub' or 'embedded'")
    files = [(path.name, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    return f"{folder.name} {cache.fingerprint([(name, seen.st_size, seen.st_mtime_ns) for name, seen in files])}"


def dataset(settings: Settings) -> dict:
    """Return the task's data, split for training and evaluation."""
    import datasets

    name, config = HUB_DATA[settings.task] if settings.data == "hub" else (settings.data, None)
    with reading("data set", name):
        datasets.config.HF_HUB_OFFLINE = shapes.is_offline()  # `datasets` has a copy of the constant
        splits = datasets.load_dataset(name, config, trust_remote_code=False)
        train = splits["train"].select_columns(COLUMNS[settings.task])
        if settings.task == "wikitext":
            return {"train": train, "eval": splits["validation"]}
        # The source document holds out a fifth of the train split.
        parts = train.train_test_split(test_size=0.2, seed=SPLIT_SEED)
        return {"train": parts["train"], "eval": parts["test"]}


def load_tokenizer(settings: Settings):
    """Return the tokenizer that is asked for, or the model's own. Our own shapes use GPT-2's vocabulary."""
    from transformers import AutoTokenizer

    name = settings.tokenizer or hub_name(settings) or SHAPES["gpt2"]["hub"]
    with reading("tokenizer", name):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def review_rows(settings: Settings, tokenizer, split, count: int | None) -> Batch:
    """Return at most so many random rows of a split, padded, as the source document takes them."""
    chosen = split.shuffle(seed=SPLIT_SEED)[:count]
    options = {"padding": "max_length", "truncation": True, "max_length": settings.sequence}
    encoded = tokenizer(chosen["text"], return_tensors="pt", **options)
    labels = torch.tensor(chosen["label"])
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"], "labels": labels}


def text_blocks(settings: Settings, tokenizer, split, count: int | None) -> Batch:
    """Return at most so many blocks of a split's text as one string of tokens. An incomplete last block is dropped."""
    ids = tokenizer(list(split["text"]), add_special_tokens=False, verbose=False)["input_ids"]
    stream = torch.tensor(list(itertools.chain.from_iterable(ids)))
    blocks = stream[: len(stream) // settings.sequence * settings.sequence].view(-1, settings.sequence)
    return {"input_ids": blocks[:count].clone()}
