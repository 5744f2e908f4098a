"""How long sequences are: of the batches that train."""

import torch
from torch.utils.data import DataLoader

from study.rehearsal.lengths import Lengths
from study.rehearsal.request import Answer, Request


def test_what_an_evaluation_reads_is_no_part_of_an_update():
    """Its rows may be longer."""
    answer = Answer()
    lengths = Lengths(Request("train.py", [], 2, 2, 2), answer)
    loaders = {}
    for tokens in (8, 12):
        loaders[tokens] = iter(DataLoader(torch.zeros(4, tokens, dtype=torch.int64), batch_size=2))
        lengths.lengthen(loaders[tokens], next(loaders[tokens]))
    assert answer.row_tokens == 0, "nothing has trained"
    lengths.trained(loaders[8])
    assert answer.row_tokens == 8
