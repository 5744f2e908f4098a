"""With --gpu a rehearsal counts what a GPU's kernels keep, not a CPU's."""

import pytest

from tests.rehearsal.test_rehearsal import rehearsed, study_virtual, written  # noqa: F401

GPT2 = """
    from transformers import GPT2Config, GPT2LMHeadModel
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, attn_pdrop={dropout})
    config.resid_pdrop = config.embd_pdrop = 0
    accelerator = Accelerator(mixed_precision="{precision}")
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
SCORES_BYTES = 2 * 4 * 256 * 256 * 4  # of one layer


def peak(written, *options, dropout=0.1, precision="no", recomputes=""):  # noqa: F811
    script = written(GPT2.format(dropout=dropout, precision=precision, recomputes=recomputes))
    return rehearsed(script, *options)["peak_bytes"]


@pytest.mark.parametrize("recomputes", ["", RECOMPUTES])
def test_a_fused_attention_keeps_no_scores_where_it_drops_some(written, recomputes):  # noqa: F811
    peaks = {dropout: peak(written, "--gpu=RTX3090", dropout=dropout, recomputes=recomputes) for dropout in (0.1, 0)}
    assert peaks[0.1] == peaks[0]


def test_without_a_gpu_its_kernels_are_a_cpus_and_that_is_said(written):  # noqa: F811
    assert peak(written) > peak(written, "--gpu=RTX3090") + 2 * SCORES_BYTES
    done = study_virtual(written(GPT2.format(dropout=0.1, precision="no", recomputes="")))
    words = " ".join(done.stdout.split())
    assert "its attention has dropout, and a CPU keeps the scores: --gpu leaves them out" in words, words
    done = study_virtual(written(GPT2.format(dropout=0, precision="no", recomputes="")))
    assert "scores" not in done.stdout
