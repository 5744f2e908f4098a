"""The embedded corpus: the same bytes from the same seed, and a rule in it that can be learnt."""

import numpy as np
import pytest

from study.spec.shapes import VOCABULARY
from study.training import tasks
from study.training.tasks import CLS, FIRST_WORD, NUM_CLASSES, OPINIONS, PAD, SEP, UNK

ROWS, SEQUENCE, TOKENS = 800, 128, 50_000
PER_CLASS = (VOCABULARY - FIRST_WORD) // NUM_CLASSES
FIRST_FILLER = FIRST_WORD + 2 * OPINIONS


@pytest.fixture(scope="module")
def reviews() -> dict[str, np.ndarray]:
    return tasks.reviews(ROWS, SEQUENCE, seed=42)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return tasks.stream(TOKENS, seed=42, part="train")


def class_of(tokens: np.ndarray) -> np.ndarray:
    return (tokens - FIRST_WORD) // PER_CLASS


def transitions(tokens: np.ndarray) -> np.ndarray:
    """How often each class follows each other class."""
    table = np.zeros((NUM_CLASSES, NUM_CLASSES), int)
    np.add.at(table, (class_of(tokens)[:-1], class_of(tokens)[1:]), 1)
    return table


def content(seed: int) -> list[bytes]:
    arrays = [*tasks.reviews(ROWS, SEQUENCE, seed).values(), tasks.stream(5_000, seed, "train")]
    return [array.tobytes() for array in arrays]


def test_the_same_seed_gives_the_same_bytes():
    """The global random state is neither used nor touched."""
    np.random.seed(0)  # noqa: NPY002  the very thing that must stay as it is
    before, first = np.random.get_state()[1].copy(), content(42)  # noqa: NPY002
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002
    np.random.seed(1)  # noqa: NPY002
    assert content(42) == first
    assert all(ours != theirs for ours, theirs in zip(first, content(43), strict=True))


# --- reviews -------------------------------------------------------------------------------------------------------


def test_reviews_look_like_tokenised_text(reviews):
    """[CLS] words [SEP] padding, and a mask that says so."""
    ids, mask, labels = reviews["input_ids"], reviews["attention_mask"], reviews["labels"]
    assert ids.shape == mask.shape == (ROWS, SEQUENCE)
    assert labels.shape == (ROWS,)
    assert {array.dtype for array in reviews.values()} == {np.dtype(np.int64)}
    length = mask.sum(1)
    assert (mask == (np.arange(SEQUENCE) < length[:, None])).all(), "ones, then zeros"
    assert (length.min() >= SEQUENCE // 2, length.max()) == (True, SEQUENCE)
    assert ((ids == PAD) == (mask == 0)).all(), "padding where the mask is 0, and nowhere else"
    assert (ids[:, 0] == CLS).all()
    assert (ids[np.arange(ROWS), length - 1] == SEP).all()
    assert (ids == CLS).sum() == (ids == SEP).sum() == ROWS
    words = ids[(ids != PAD) & (ids != CLS) & (ids != SEP)]
    assert words.min() == FIRST_WORD > UNK
    assert words.max() < VOCABULARY
    counts = np.bincount(words, minlength=VOCABULARY)[FIRST_FILLER:]
    assert counts[:10].sum() > counts[-1000:].sum() > 0, "Zipf: frequent words are few"


def test_opinion_words_decide_the_label(reviews):
    """Counting praise against blame is right on 19 of 20, which is all that the wrong labels leave."""
    ids, labels = reviews["input_ids"], reviews["labels"]
    assert set(labels) == {0, 1}
    assert abs(labels.mean() - 0.5) < 0.06, "3.4 standard deviations of 800 coins"
    praise = ((ids >= FIRST_WORD) & (ids < FIRST_WORD + OPINIONS)).sum(1)
    blame = ((ids >= FIRST_WORD + OPINIONS) & (ids < FIRST_FILLER)).sum(1)
    share = (praise + blame).sum() / (reviews["attention_mask"].sum() - 2 * ROWS)
    assert share == pytest.approx(0.3, abs=0.01), "three words in ten are opinions"
    decided = praise > blame
    agree = np.where(decided, praise, blame).sum() / (praise + blame).sum()
    assert agree == pytest.approx(0.9, abs=0.01), "nine in ten of them agree"
    right = (decided == labels).mean()
    assert right > 0.9 * 0.95
    assert right == pytest.approx(0.95, abs=0.025), "one label in twenty is wrong: the loss has a floor"
    for hint in (reviews["attention_mask"].sum(1), (ids >= FIRST_FILLER).sum(1)):
        assert abs(np.corrcoef(hint, labels)[0, 1]) < 0.12, "neither the length nor the filler decides: 3.4 deviations"


# --- stream --------------------------------------------------------------------------------------------------------


def test_stream_ids_are_words(tokens):
    assert tokens.shape == (TOKENS,)
    assert np.issubdtype(tokens.dtype, np.integer)
    assert tokens.min() >= FIRST_WORD
    assert tokens.max() < VOCABULARY
    assert set(class_of(tokens)) == set(range(NUM_CLASSES))


def test_the_next_class_is_predictable(tokens):
    """Nine of ten times the rule decides; the tenth time, one of eight at random."""
    table = transitions(tokens)
    right = table.max(1).sum() / table.sum()
    assert right == pytest.approx(0.9 + 0.1 / NUM_CLASSES, abs=0.01)
    assert len(set(table.argmax(1))) == NUM_CLASSES, "each class has a follower of its own"
    frequent = (tokens[:-1] - FIRST_WORD) % PER_CLASS < 3
    follows = table.argmax(1)[class_of(tokens)[:-1]] == class_of(tokens)[1:]
    assert 0.2 < frequent.mean() < 0.8
    assert follows[frequent].mean() == pytest.approx(follows[~frequent].mean(), abs=0.01), "the rule is in classes only"


def test_parts_share_the_rule_and_not_the_words(tokens):
    other = tasks.stream(TOKENS, seed=42, part="validation")
    assert (transitions(tokens).argmax(1) == transitions(other).argmax(1)).all()
    assert (tokens == other).mean() < 0.2
    rule_of = [tuple(transitions(tasks.stream(5_000, seed, "train")).argmax(1)) for seed in range(5)]
    assert len(set(rule_of)) > 1, "another seed has another rule"
