"""What enters the loss of a micro-batch: its targets beside its inputs. Counts of a few micro-batches are kept.

Targets and inputs of tokens are compared place by place: a language model predicts the next one.
"""

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch

from study.measure import roles
from study.records.sections import Targets
from study.watch import graph

FIRST = 5  # micro-batches are read, before the instruments look, and then those of RARE times a power of 2
RARE = (8, 12)
SHORTEST = 4  # sequence
OFFSETS = (0, 1, 2)  # of a target from its input: the same place, the next one, and what is shifted twice
ALIKE = 0.9
IGNORED = -100  # transformers'
FEW_KINDS = 2  # of tokens


def is_due(number: int) -> bool:
    """Return whether the micro-batch with this number, from 1 on, is read."""
    return number <= FIRST or any(number % first == 0 and (number // first).bit_count() == 1 for first in RARE)


@dataclass
class Special:
    """What the config of a model says of its tokens."""

    pad: int | None = None
    begin: int | None = None
    ends: set[int] = field(default_factory=set)
    is_causal: bool = False
    is_pair: bool = False  # of an encoder and a decoder
    takes_mask: bool = False
    unknown: int | None = None  # of a tokenizer


def special_of(model) -> Special:
    """Return the special tokens of a model of transformers, with or without adapters."""
    modules = list(roles.base_model(model).modules())
    known = [each for each in modules if hasattr(getattr(each, "config", None), "get_text_config")]
    if not known:
        pads = [getattr(each, "padding_idx", None) for each in modules]
        return Special(next((each for each in pads if each is not None), None))
    plain: Any = known[0]  # somebody's own module may be around it
    config = plain.config
    text = config.get_text_config()
    ends = getattr(text, "eos_token_id", None)
    name = type(plain).__name__
    return Special(
        getattr(text, "pad_token_id", None),
        getattr(text, "bos_token_id", None),
        {*(ends if isinstance(ends, list) else [ends])} - {None},
        is_causal="CausalLM" in name or "LMHead" in name,
        is_pair=bool(getattr(config, "is_encoder_decoder", False)),
        takes_mask="attention_mask" in inspect.signature(plain.forward).parameters,
    )


@dataclass
class TokensIn:
    """The tokens of a micro-batch, as the model gets them."""

    ids: torch.Tensor | None = None  # None, if there are none or several
    mask: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    rows: int = 0


def tokens_in(args: Any, kwargs: dict[str, Any], given: list[torch.Tensor]) -> TokensIn:
    """Return the tokens among the inputs of a model, by their names or by shapes. `given`: all tensors of both.

    It reads no value, for which a GPU would have to be waited for.
    """
    named = dict(kwargs)
    for each in args:
        named |= each if isinstance(each, dict) else {}
    named = {name: each for name, each in named.items() if torch.is_tensor(each) and each.ndim}
    tokens = [each for each in given if each.ndim == 2 and each.dtype in (torch.int64, torch.int32)]
    ids = named.get("input_ids")
    if ids is None:
        ids = tokens[0] if len(tokens) == 1 else None
    elif ids.ndim != 2 or "decoder_input_ids" in named:
        ids = None
    mask = named.get("attention_mask")
    mask = mask if mask is not None and mask.ndim == 2 else None
    rows = len((tokens or given)[0]) if given else 0
    return TokensIn(ids, mask, named.get("labels"), named.get("position_ids"), rows)


@dataclass
class Answers:
    """The targets of a micro-batch, and which of them its loss counts."""

    targets: torch.Tensor
    counted: torch.Tensor
    is_shifted: bool  # by the model, out of our sight: they are as long as its inputs

    def by_row(self, rows: int, length: int) -> "Answers | None":
        """Return the targets of each row of tokens; None, if they are not targets of tokens."""
        if self.targets.numel() % rows or abs(self.targets.numel() // rows - length) > 2:
            return None
        first = int(self.is_shifted)
        targets = self.targets.reshape(rows, -1)[:, first:]
        return Answers(targets, self.counted.reshape(rows, -1)[:, first:], self.is_shifted)


def read(seen: Targets, loss: torch.Tensor, batch: TokensIn, special: Special) -> None:
    """Add what enters the loss of a micro-batch. This reads values, and so waits for a GPU."""
    seen.read += 1
    losses = graph.losses_in(loss)
    seen.broadcast += graph.is_broadcast(loss, losses)
    seen.mixed += any(map(graph.is_mixed, losses))
    seen.no_logarithms += any(map(graph.is_no_logarithm, losses))
    seen.probabilities = next(filter(None, map(graph.probabilities_into, losses)), seen.probabilities)
    answers = _answers(losses, batch, special)
    if answers is None:
        return
    _count_answers(seen, answers, batch, special)
    if batch.ids is None or special.is_pair or batch.ids.shape[1] < SHORTEST:
        return
    ids = batch.ids.detach().cpu()
    runs = padding_by_runs(ids, special)
    _count_tokens(seen, ids, runs, batch.positions, special)
    answers = answers.by_row(*ids.shape)
    if answers is None:
        return
    padding = _count_padding(seen, ids, runs, batch.mask, special)
    is_end = torch.isin(ids, torch.tensor(sorted(special.ends) or [-1])) & ~padding
    _compare(seen, answers, ids, padding, is_end)
    if special.begin is not None and special.begin != special.pad:
        start = torch.argmax((~padding).long(), 1, keepdim=True).clamp(max=ids.shape[1] - 2)
        first, second = (ids.gather(1, start + place) == special.begin for place in (0, 1))
        seen.two_starts += int((first & second).sum())


def _answers(losses: list[Any], batch: TokensIn, special: Special) -> Answers | None:
    """Return the targets of the first loss of classes, or the labels that a causal model shifts itself."""
    classes = [each for each in map(graph.targets_of, losses) if each is not None]
    targets, ignored = classes[0] if classes else (None, IGNORED)
    is_shifted = not classes and special.is_causal and batch.labels is not None
    targets = batch.labels if is_shifted else targets
    if targets is None or targets.is_floating_point():
        return None
    targets = targets.detach().cpu()
    return Answers(targets, targets != ignored, is_shifted)


def _count_answers(seen: Targets, answers: Answers, batch: TokensIn, special: Special) -> None:
    targets, counted = answers.targets, answers.counted
    seen.ignored += int((~counted).sum())
    seen.counted += int(counted.sum())
    seen.without_targets += not counted.any()
    if targets.ndim == 1 and len(targets) == batch.rows >= SHORTEST and len(targets.unique()) == 1:
        seen.uniform.append(int(targets[0]))
    if special.is_pair and batch.rows and targets.numel() % batch.rows == 0:
        runs = padding_by_runs(targets.reshape(batch.rows, -1), special)
        seen.padding += int((runs & counted.reshape(batch.rows, -1)).sum())


def _count_tokens(
    seen: Targets, ids: torch.Tensor, runs: torch.Tensor, positions: torch.Tensor | None, special: Special
) -> None:
    seen.tokens += int((~runs).sum())
    if positions is not None and positions.ndim == 2:
        seen.positions_alike += bool((positions == positions[:, :1]).all())
    if special.unknown is not None and special.unknown not in {special.pad, special.begin, *special.ends}:
        seen.unknown += int(ids.eq(special.unknown).sum())


def _count_padding(
    seen: Targets, ids: torch.Tensor, runs: torch.Tensor, mask: torch.Tensor | None, special: Special
) -> torch.Tensor:
    """Return which tokens are padding: those that the mask hides, or repeats at the ends of rows if it hides words."""
    padding, hidden = runs, torch.zeros_like(runs)
    if mask is not None and mask.shape == ids.shape:
        hidden = mask.cpu() == 0
        if len(ids[hidden].unique()) > FEW_KINDS:  # padding is of one kind, whatever the config says
            seen.hidden += int((hidden & ~runs).sum())
        else:
            padding = hidden
    seen.rows += len(padding)
    seen.padded += int(padding.sum())
    # Tokens before padding do not see it in a causal model.
    seen_padding = runs & ~hidden
    sees = seen_padding[:, 0].any() if special.is_causal else 2 * seen_padding.sum() > runs.sum()
    seen.unmasked += bool(sees and special.takes_mask and special.pad is not None)
    return padding


def padding_by_runs(ids: torch.Tensor, special: Special) -> torch.Tensor:
    """Return what rows begin or end with more than once. The first of several ends is no padding."""
    pad = special.pad if special.pad is not None else int(ids[:, -1].mode().values)
    is_pad = (ids == pad).long()
    before = is_pad.cumprod(1).bool()
    after = is_pad.flip(1).cumprod(1).flip(1).bool()
    if pad in special.ends:
        after[:, 1:] &= after[:, :-1].clone()
    runs = before | after
    runs &= runs.sum(1, keepdim=True) > 1
    # A token that nobody calls padding is that if many rows end in it, and not all of them equally long.
    lengths = runs.sum(1)
    is_known = special.pad is not None or (lengths.median() > 0 and len(lengths.unique()) > 2)
    return runs & is_known


def _compare(seen: Targets, answers: Answers, ids: torch.Tensor, padding: torch.Tensor, is_end: torch.Tensor) -> None:
    """Count the targets that are inputs at each offset, that are padding, and the ends that are not learned."""
    targets, counted = answers.targets, answers.counted
    counts = []
    for offset in OFFSETS:
        width = min(targets.shape[1], ids.shape[1] - offset)
        of_ids = slice(offset, offset + width)
        counts_too, of_padding, of_end = counted[:, :width], padding[:, of_ids], is_end[:, of_ids]
        real = counts_too & ~of_padding
        same = real & (targets[:, :width] == ids[:, of_ids])
        found = (same, real, counts_too & of_padding, of_end, of_end & counts_too)
        counts.append([int(each.sum()) for each in found])
    equal, compared, pads, ends, learned = zip(*counts, strict=True)
    seen.equal = [before + now for before, now in zip(seen.equal, equal, strict=True)]
    seen.compared = [before + now for before, now in zip(seen.compared, compared, strict=True)]
    shares = [now / most if most else 0.0 for now, most in zip(equal, compared, strict=True)]
    best = shares.index(max(shares))
    seen.padding += pads[best if max(shares) >= ALIKE else 0]
    if best == 1 and shares[1] >= ALIKE:
        seen.ends += ends[1]
        seen.ends_learned += learned[1]
        seen.rows_ignored += int((~counted.any(1)).sum())
