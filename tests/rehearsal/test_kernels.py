"""With --gpu a rehearsal counts what a GPU's kernels keep, not a CPU's."""

import re

import pytest

from study.core.gpus import GPUS
from study.rehearsal.on_gpu import on_gpu
from study.rehearsal.request import Answer
from tests.rehearsal.test_rehearsal import rehearsed, study_virtual, written  # noqa: F401

GPT2 = """
    from transformers import GPT2Config, GPT2LMHeadModel
    config = GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64, attn_pdrop={dropout})
    config.resid_pdrop = config.embd_pdrop = 0
    model = GPT2LMHeadModel(config)
    {recomputes}
    loader = DataLoader(torch.randint(0, 64, (16, 256)), batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for tokens in loader:
        accelerator.backward(model(tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
"""
RECOMPUTES = "model.gradient_checkpointing_enable()"
SCORES_BYTES = 2 * 4 * 256 * 256 * 4


def peak(written, *options, dropout=0.1, recomputes=""):  # noqa: F811
    script = written(GPT2.format(dropout=dropout, recomputes=recomputes))
    return rehearsed(script, *options)["peak_bytes"]


REENTRANT = 'model.gradient_checkpointing_enable({"use_reentrant": True})'


@pytest.mark.parametrize(("precision", "recomputes"), [("no", ""), ("no", RECOMPUTES), ("bf16", REENTRANT)])
def test_a_fused_attention_keeps_no_scores_where_it_drops_some(written, precision, recomputes, monkeypatch):  # noqa: F811
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    peaks = {dropout: peak(written, "--gpu=RTX3090", dropout=dropout, recomputes=recomputes) for dropout in (0.1, 0)}
    assert peaks[0.1] == peaks[0]


def told(script, folder, *options) -> tuple[str, Answer]:
    """Return what a rehearsal prints, and its answer, of one run."""
    done = study_virtual(script, *options, f"--run-dir={folder}")
    return " ".join(done.stdout.split()), Answer.read(folder / "answer.json")


def test_without_a_gpu_its_kernels_are_a_cpus_and_that_is_said(written, tmp_path):  # noqa: F811
    script = written(GPT2.format(dropout=0.1, recomputes=""))
    words, cpu = told(script, tmp_path / "cpu")
    _, gpu = told(script, tmp_path / "gpu", "--gpu=RTX3090")
    assert max(cpu.peaks) > max(gpu.peaks) + SCORES_BYTES
    assert "its attention has dropout, and a CPU keeps the scores: --gpu leaves them out" in words, words
    done = study_virtual(written(GPT2.format(dropout=0, recomputes="")))
    assert "scores" not in done.stdout


PADDED = """
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, place):
            return torch.zeros({lengths}[place // 2 % 8], dtype=torch.int64)
    loader = DataLoader(Rows(), batch_size=2)
"""


@pytest.mark.parametrize(("fourth", "said"), [([200, 20], "2 x 200"), ([20, 200], "2 x 20")])
def test_the_batch_of_the_peak_is_named_though_loaders_are_ahead(written, fourth, said):  # noqa: F811
    """Of four batches the last was only fetched."""
    head, loop = GPT2.format(dropout=0, recomputes="").split("    loader = ")
    lengths = [16, fourth[0], 16, fourth[1], 16, 16, 20, 20]
    script = written(head + PADDED.format(lengths=lengths) + loop.partition("\n")[2])
    words = " ".join(study_virtual(script, "--gpu=T4", ranks=1).stdout.split())
    assert "; batch 2 x 200, 1 micro-batch, 1 rank;" in words or said == "2 x 20", words
    assert f"The largest micro-batch that it saw is {said}: a larger one holds more." in words
    assert "Your script trains in fp32: `accelerate launch --mixed_precision bf16`" in words


KNOWN_ROWS = """
    import datasets
    rows = datasets.Dataset.from_dict({"input_ids": [[1] * (16 + place) for place in range(64)]})
    loader = DataLoader(rows.with_format("torch"), collate_fn=lambda batch: batch[0]["input_ids"][None])
"""


def test_batches_are_as_long_as_the_longest_row_of_a_data_set_that_knows_it(written, tmp_path):  # noqa: F811
    head, loop = GPT2.format(dropout=0, recomputes="").split("    loader = ")
    script = written(head + KNOWN_ROWS + loop.partition("\n")[2])
    words, answer = told(script, tmp_path / "run", "--gpu=T4")
    assert re.search(r"is 1 x 79: its sequences were lengthened from \d+ tokens to 79, the data set's", words), words
    _, longer = told(script, tmp_path / "longer", "--gpu=T4", "--tokens=200")
    assert (longer.lengthened_to, longer.longest_row) == (200, 79)
    assert (answer.batch, longer.batch) == ([1, 79], [1, 200]), "seconds are of the rows that memory is of"
    assert max(longer.peaks) > max(answer.peaks)


def test_a_card_that_is_too_small_is_told_what_a_larger_one_shows():
    log = [(1, 30 * 2**30), (2, 40 * 2**30), (1, 0), (2, 0)]
    small, large = (on_gpu(Answer(log=log), 1, None, GPUS[name]) for name in ("A100-40GB", "A100-80GB"))
    assert (small.fits, small.peak, small.driver) == ("no", 70 * 2**30, large.driver)
    assert 70 * 2**30 == small.reserved < large.driver < 80 * 2**30


def test_an_allocator_gives_back_what_is_free_before_a_card_is_full():
    log = [(1, 30 * 2**30), (1, 0), (2, 36 * 2**30), (2, 0)]
    assert on_gpu(Answer(log=log), 1, None).reserved == 66 * 2**30
    assert on_gpu(Answer(log=log), 1, None, GPUS["A100-40GB"]).reserved == 36 * 2**30
