"""The inputs of a training step for each kind of model, and the loss of each row."""

import torch
from torch.nn.functional import cross_entropy, pad
from transformers import PretrainedConfig

from study.core.models.config import kind_of

Batch = dict[str, torch.Tensor]
# Model types that take a mask of rows and positions, and expand it themselves. OPT also counts positions by it.
OWN_MASKS = ("bloom", "opt", "deberta", "deberta-v2", "longformer", "big_bird", "esm")
IGNORED = -100  # the label of a position without a loss, as cross_entropy has it
IMAGE_SIZE = 224
FOLLOWING = "following"  # in batches of parts of rows: the next token of each position, which may be in another part


def inputs(config: PretrainedConfig, rows: int, sequence: int) -> Batch:
    """Return random tensors like those of a data set for this kind of model, with `sequence` tokens in a text."""
    kind = kind_of(config)
    classes = config.num_labels or 0
    if kind == "vision":
        seen = getattr(config, "vision_config", config)  # CLIP has a config for each of its halves
        size = getattr(seen, "image_size", IMAGE_SIZE)  # a ResNet takes any
        if not isinstance(size, list | tuple):
            size = (size, size)
        pixels = torch.randn(rows, seen.num_channels, *size)
        return {"pixel_values": pixels, "labels": torch.randint(0, classes, (rows,))}
    ids = torch.randint(0, config.get_text_config(decoder=True).vocab_size, (rows, sequence))
    if kind == "speech":
        sound = torch.randn(rows, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": sound, "labels": ids}
    if kind == "seq2seq":
        return {"input_ids": ids, "labels": ids.clone()}
    if kind == "encoder":
        labels = torch.randint(0, classes, (rows,))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return {"input_ids": ids}


def logits_and_losses(
    config: PretrainedConfig,
    model,
    batch: Batch,
    dtype: torch.dtype,
    upcast: bool = True,
    row_tokens: int | None = None,
) -> tuple:
    """Return the logits, in fp32 if `upcast`, and the loss of each row.

    `dtype` is that of the weights. If a batch has parts of rows of `row_tokens` tokens, the mean of the parts' losses
    is the loss of the row.
    """
    kind = kind_of(config)
    fed: dict[str, torch.Tensor | None] = {
        name: values.to(dtype) if values.is_floating_point() else values
        for name, values in batch.items()
        if name not in ("labels", FOLLOWING)
    }
    if kind in ("decoder", "encoder"):
        fed["attention_mask"] = mask(config, batch, dtype)
    if kind in ("seq2seq", "speech"):
        # The decoder reads the labels shifted by one position.
        start = getattr(config, "decoder_start_token_id", None) or getattr(config, "pad_token_id", None) or 0
        fed["decoder_input_ids"] = pad(batch["labels"][:, :-1], (1, 0), value=start).clamp(min=0)
    logits = model(**fed).logits
    if upcast:
        logits = logits.float()
    if kind in ("encoder", "vision"):
        return logits, cross_entropy(logits, batch["labels"], reduction="none")
    labels = next_tokens(batch) if kind == "decoder" else batch["labels"]
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    predicted: float = labels.shape[1]
    if kind == "decoder":  # the last token of a whole row predicts nothing; each part bears its share of that
        predicted -= predicted / (row_tokens or predicted)
    return logits, losses.view(labels.shape).sum(1) / predicted


def next_tokens(batch: Batch) -> torch.Tensor:
    """Return the target of each position of a decoder. Every position except the last predicts the next token."""
    # The last one is ignored: to cut the logits would copy them, and they are the largest tensor.
    if FOLLOWING in batch:
        return batch[FOLLOWING]
    return pad(batch["input_ids"][:, 1:], (0, 1), value=IGNORED)


def mask(config: PretrainedConfig, batch: Batch, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the attention mask: rows, 1, positions, positions. None if the fused kernel is causal by itself."""
    # It is built here, because transformers would read the values of a smaller mask, or search for packed rows without
    # a mask, and both make a GPU wait in every forward pass. The mask has no window.
    if config.model_type in OWN_MASKS or getattr(config, "alibi", False):  # Falcon's alibi needs a mask of rows, too
        return batch.get("attention_mask")
    length = batch["input_ids"].shape[1]
    eager = config._attn_implementation == "eager"
    if kind_of(config) == "encoder":
        allowed = batch["attention_mask"][:, None, None, :].bool().expand(-1, 1, length, -1)
    elif not eager or not hasattr(config, "num_attention_heads"):  # Mamba has no attention
        return None
    else:
        allowed = torch.ones(1, 1, length, length, dtype=torch.bool, device=batch["input_ids"].device).tril()
    if not eager:
        return allowed
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
