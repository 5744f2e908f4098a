"""The rows of a task: read and tokenised once, then cached as tensors; or generated."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.functional import pad

from study.core import cache
from study.core.errors import Stop
from study.core.models.step import FOLLOWING, IGNORED, inputs
from study.core.settings import Settings
from study.core.shapes import VOCABULARY
from study.training import models, tasks

Rows = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Data:
    """Tokenised rows for training and evaluation, and where they came from."""

    train: Rows
    eval: Rows
    vocabulary: int | None  # None: the model's own
    source: str

    @property
    def train_rows(self) -> int:
        return len(next(iter(self.train.values())))

    @property
    def checksum(self) -> str:
        digest = hashlib.sha256()
        with unset_fake_temporarily():  # under --init none these tensors could not be read
            for rows in (self.train, self.eval):
                for name in sorted(rows):
                    digest.update(rows[name].numpy().tobytes())
        return digest.hexdigest()[:16]


def part_of_rows(rows: Rows, part: int, parts: int) -> Rows:
    """Return one of several equal parts of the rows' tokens, with their positions and the token that follows each."""
    ids = rows["input_ids"]
    length = ids.shape[-1] // parts
    columns = slice(part * length, (part + 1) * length)
    following = pad(ids[..., 1:], (0, 1), value=IGNORED)  # of a part's last token it stands in the next part
    positions = torch.arange(columns.start, columns.stop).expand(*ids.shape[:-2], 1, -1)  # the same in all rows
    tokens = {"input_ids": ids[..., columns].clone(), FOLLOWING: following[..., columns].clone()}
    return tokens | {"position_ids": positions}


def load_data(settings: Settings) -> Data:
    """Return the rows of a task, from the cache if they are in it."""
    if settings.task == "synthetic":
        return _synthetic(settings)
    models.model_config(settings, None)  # refuses longer rows than the model reads, before they are made
    if settings.data == "embedded":
        return _embedded(settings)
    source = tasks.data_source(settings)
    tokenizer = tasks.load_tokenizer(settings)
    counts = {"train": settings.train_rows, "eval": settings.eval_rows}
    # Whatever decides the rows. The seed of the run does not: it decides their order.
    key = [settings.task, source, settings.sequence, tasks.SPLIT_SEED, counts, tokenizer.backend_tokenizer.to_str()]

    def write(folder: Path) -> None:
        rows_of = tasks.review_rows if settings.task == "imdb" else tasks.text_blocks
        for part, split in tasks.dataset(settings).items():
            rows = rows_of(settings, tokenizer, split, counts[part])
            found = len(rows["input_ids"])
            if found < (counts[part] or 0):
                raise Stop(f"--{part}-rows {counts[part]} is more than the {found} there are", f"give at most {found}")
            save_file(rows, folder / f"{part}.safetensors")

    entry = cache.entry(settings.cache_dir / "data" / cache.fingerprint(key), write)
    train, rows = (load_file(entry / f"{part}.safetensors") for part in counts)
    return Data(train, rows, len(tokenizer), source)


def _embedded(settings: Settings) -> Data:
    # The corpus has its own seed: runs with different seeds differ in weights and order, but not in their data.
    seed = tasks.SPLIT_SEED
    counts = {"train": settings.train_rows or 1600, "validation": settings.eval_rows}
    if settings.task == "imdb":
        parts = [tasks.reviews(rows, settings.sequence, seed + i) for i, rows in enumerate(counts.values())]
    else:
        streams = [tasks.stream(rows * settings.sequence, seed, part) for part, rows in counts.items()]
        parts = [{"input_ids": tokens.reshape(-1, settings.sequence)} for tokens in streams]
    train, rows = ({name: torch.from_numpy(array) for name, array in part.items()} for part in parts)
    return Data(train, rows, VOCABULARY, source="embedded")


def _synthetic(settings: Settings) -> Data:
    """Return random rows of the shape that the model takes, as many as a virtual rank reads in a step."""
    config = models.model_config(settings, vocabulary=None)
    with torch.random.fork_rng(devices=[]):  # the run's own numbers stay what they would be without these rows
        torch.manual_seed(tasks.SPLIT_SEED)
        rows = settings.train_rows or settings.micro_batch * settings.accumulation
        columns = inputs(config, rows, settings.sequence)
    return Data(columns, {}, vocabulary=None, source=f"synthetic {' and '.join(columns)} for {config.model_type}")
