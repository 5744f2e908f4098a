"""The embedded corpus: the same bytes from the same seed, and a rule in it that can be learnt."""

import numpy as np
import pytest

from study.core.shapes import VOCABULARY
from study.training import tasks
from study.training.tasks import CLS, FIRST_WORD, NUM_CLASSES, OPINIONS, PAD, SEP

ROWS, SEQUENCE = 800, 128


def transitions(tokens: np.ndarray) -> np.ndarray:
    """Return how often each class follows each other class."""
    classes = (tokens - FIRST_WORD) // ((VOCABULARY - FIRST_WORD) // NUM_CLASSES)
    table = np.zeros((NUM_CLASSES, NUM_CLASSES), int)
    np.add.at(table, (classes[:-1], classes[1:]), 1)
    return table


def test_the_same_seed_gives_the_same_bytes():
    first, again, other = (
        [*tasks.reviews(80, 16, seed).values(), tasks.stream(5_000, seed, "train")] for seed in (42, 42, 43)
    )
    assert all(map(np.array_equal, first, again))
    assert not any(map(np.array_equal, first, other))


def test_reviews_look_like_tokenised_text_and_their_opinions_decide():
    """[CLS] words [SEP] padding. Praise against blame is right on 19 of 20, all that the wrong labels leave."""
    ids, mask, labels = tasks.reviews(ROWS, SEQUENCE, seed=42).values()
    length = mask.sum(1)
    assert (mask == (np.arange(SEQUENCE) < length[:, None])).all(), "ones, then zeros"
    assert ((ids == PAD) == (mask == 0)).all()
    assert set(ids[:, 0]) == {CLS}
    assert set(ids[np.arange(ROWS), length - 1]) == {SEP}
    assert tasks.reviews(2_000, SEQUENCE, seed=42)["input_ids"].max() == VOCABULARY - 1, "filler is of all other words"
    praise = ((ids >= FIRST_WORD) & (ids < FIRST_WORD + OPINIONS)).sum(1)
    blame = ((ids >= FIRST_WORD + OPINIONS) & (ids < FIRST_WORD + 2 * OPINIONS)).sum(1)
    opinions = (praise + blame).sum()
    assert opinions / (length - 2).sum() == pytest.approx(0.3, abs=0.01), "three words in ten are opinions"
    agree = np.maximum(praise, blame).sum() / opinions
    assert agree == pytest.approx(0.9, abs=0.01), "nine in ten of them agree"
    assert ((praise > blame) == labels).mean() == pytest.approx(0.95, abs=0.025), "one label in twenty is wrong"


def test_the_next_class_of_the_stream_is_predictable():
    """Nine of ten times the rule decides; the tenth time, one of eight at random."""
    tokens, other = (tasks.stream(50_000, seed=42, part=part) for part in ("train", "validation"))
    assert FIRST_WORD <= tokens.min() < tokens.max() < VOCABULARY
    table = transitions(tokens)
    assert table.max(1).sum() / table.sum() == pytest.approx(0.9 + 0.1 / NUM_CLASSES, abs=0.01)
    followers = table.argmax(1)
    assert len(set(followers)) == NUM_CLASSES, "each class has a follower of its own"
    assert (followers == transitions(other).argmax(1)).all(), "the parts share the rule"
    assert (followers != transitions(tasks.stream(5_000, 43, "train")).argmax(1)).any(), "another seed has another rule"
