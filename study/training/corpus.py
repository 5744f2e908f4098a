"""The embedded corpus: token ids generated from a seed, so that everything works without a network.

It is not language, but a model can learn it: reviews whose opinion words decide the label, and a stream in which the
class of each word decides the class of the next. A model that learns nothing here is not training.
"""

import numpy as np

from study.spec.shapes import VOCABULARY

PAD, UNK, CLS, SEP = 0, 1, 2, 3
FIRST_WORD = 4
NUM_CLASSES = 8
OPINIONS = 32  # words of praise; the same number of blame


def reviews(rows: int, sequence: int, seed: int) -> dict[str, np.ndarray]:
    """Rows like tokenised reviews: [CLS] words [SEP] padding, with a label that their opinion words decide.

    Three words in ten are opinions, and nine of ten opinions agree with the label. The rest is filler with a Zipf
    distribution, as in text. One label in twenty is wrong, so that the loss has a floor.
    """
    rng = np.random.default_rng([seed, 1])
    labels = rng.integers(0, 2, rows)
    praise = FIRST_WORD + np.arange(OPINIONS)
    filler = _zipf(rng, (rows, sequence), FIRST_WORD + 2 * OPINIONS)
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
    following = np.random.default_rng(seed).permutation(NUM_CLASSES)
    jumps = rng.random(tokens) < 0.1
    anywhere = rng.integers(0, NUM_CLASSES, tokens)
    classes = np.empty(tokens, np.int64)
    now = 0
    for i in range(tokens):
        now = anywhere[i] if jumps[i] else following[now]
        classes[i] = now
    per_class = (VOCABULARY - FIRST_WORD) // NUM_CLASSES
    return FIRST_WORD + classes * per_class + _zipf(rng, tokens, 0, per_class)


def _zipf(rng: np.random.Generator, shape, first: int, count: int | None = None) -> np.ndarray:
    """Ids from `first` on, the k-th with a probability proportional to 1 / k^1.1."""
    count = VOCABULARY - first if count is None else count
    weight = 1 / np.arange(1, count + 1) ** 1.1
    return first + rng.choice(count, shape, p=weight / weight.sum())
