"""Which of a model's inputs are its tokens, and how many sequences a micro-batch has."""

import torch

from study.watch.targets import tokens_in

IDS, FLOATS = torch.ones(3, 8, dtype=torch.int64), torch.ones(5, 8)


def test_tokens_are_known_by_their_name_or_as_the_only_integers_and_sequences_are_counted():
    named = tokens_in((), {"input_ids": IDS, "attention_mask": IDS, "labels": IDS}, [IDS, IDS, IDS])
    assert (named.ids is IDS, named.rows) == (True, 3)
    alone = tokens_in((FLOATS, IDS), {}, [FLOATS, IDS])
    assert (alone.ids is IDS, alone.rows) == (True, 3)
    without = tokens_in((FLOATS,), {}, [FLOATS])
    assert (without.ids, without.rows) == (None, 5)
    assert tokens_in((), {}, []).rows == 0
