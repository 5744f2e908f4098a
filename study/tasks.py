"""The two tasks, IMDB and Wikitext: their rows, their models with the starting weights, their loss and their metric.

Rows are tokenised once and kept as tensors. Nothing falls back in silence: what cannot be had is a Stop that names it.
"""

import functools
import hashlib
import json
import math
import socket
import tempfile
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import datasets
import evaluate
import huggingface_hub
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy, pad
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.auto import modeling_auto

from study import corpus
from study.record import Stop
from study.settings import Settings
from study.shapes import SHAPES

SPLIT_SEED = 42  # the source document splits and shuffles with 42, whatever the seed of the run
HUB_DATA = {"imdb": ("stanfordnlp/imdb", None), "wikitext": ("Salesforce/wikitext", "wikitext-2-v1")}
OFFLINE = "give --data embedded with a built-in --model, or local folders (--data, --model, --tokenizer, --init random)"

Rows = dict[str, torch.Tensor]


class Accuracy(evaluate.Metric):
    """Share of right answers. Our own class, because `evaluate.load` fetches code from the hub."""

    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description=self.__doc__, citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}


class Perplexity(evaluate.Metric):
    """exp of the mean negative log-likelihood per token: `predictions` are means per row, `references` token counts."""

    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("float64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description=self.__doc__, citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        mean = np.average(np.asarray(predictions, np.float64), weights=np.asarray(references))
        return {"perplexity": math.exp(mean) if mean < 700 else None}


@dataclass(frozen=True)
class Data:
    """Tokenised rows for training and evaluation, and where they came from."""

    train: Rows
    eval: Rows
    vocabulary: int
    source: str

    @property
    def checksum(self) -> str:
        digest = hashlib.sha256()
        for rows in (self.train, self.eval):
            for name in sorted(rows):
                digest.update(rows[name].contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


# --- loss and metric -----------------------------------------------------------------------------------------------


def row_losses(settings: Settings, model, batch: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row, in fp32 whatever the model computes in, and what was predicted."""
    ids = batch["input_ids"]
    logits = model(input_ids=ids, attention_mask=_mask(settings, batch)).logits.float()
    if settings.task == "imdb":
        return cross_entropy(logits, batch["labels"], reduction="none"), logits.argmax(-1)
    # Every position but the last predicts the next. The last is left out by its target: leaving it out of the logits
    # would copy them, and they are the largest tensor there is.
    targets = pad(ids[:, 1:], (0, 1), value=-100)
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")
    losses = losses.view(ids.shape).sum(1) / (ids.shape[1] - 1)
    return losses, torch.zeros_like(losses, dtype=torch.long)


def _mask(settings: Settings, batch: Rows) -> torch.Tensor | None:
    """Who may look at whom: rows, 1, positions, positions.

    Made here and whole, because transformers would first look into a mask of its own, or search for packed rows where
    there is none, and that makes a GPU wait in every forward pass. None where the fused kernel knows by itself.
    """
    length = batch["input_ids"].shape[1]
    if settings.task == "imdb":
        allowed = batch["attention_mask"][:, None, None, :].bool().expand(-1, 1, length, -1)
    elif settings.attention == "sdpa":
        return None
    else:
        allowed = torch.ones(1, 1, length, length, dtype=torch.bool, device=batch["input_ids"].device).tril()
    if settings.attention == "sdpa":
        return allowed
    dtype = torch.bfloat16 if settings.precision == "bf16_cast" else torch.float32
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


def metric(settings: Settings, losses: np.ndarray, predictions: np.ndarray, rows: Rows) -> dict[str, float]:
    """Accuracy or perplexity over the evaluation rows."""
    if settings.task == "imdb":
        return Accuracy(keep_in_memory=True).compute(predictions=predictions, references=rows["labels"].numpy())
    tokens = np.full(len(losses), rows["input_ids"].shape[1] - 1)
    return Perplexity(keep_in_memory=True).compute(predictions=losses, references=tokens)


# --- rows ----------------------------------------------------------------------------------------------------------


def load_data(settings: Settings) -> Data:
    """The rows of a task, from the cache when they were prepared before."""
    if settings.data == "embedded":
        return _embedded(settings)
    source = _data_source(settings)
    tokenizer = _tokenizer(settings)
    key = {
        "task": settings.task,
        "source": source,
        "sequence": settings.sequence,
        "split": SPLIT_SEED,
        "rows": [settings.train_rows, settings.eval_rows],
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
    }
    cached = settings.cache_dir / "data" / f"{_hash(key)}.safetensors"
    if not cached.exists():
        rows = _imdb(settings, tokenizer) if settings.task == "imdb" else _wikitext(settings, tokenizer)
        with _made_beside(cached) as part:
            save_file({f"{part_}.{k}": v.contiguous() for part_, r in rows.items() for k, v in r.items()}, part)
    tensors = load_file(cached)
    split = {
        part: {k.split(".")[1]: v for k, v in tensors.items() if k.startswith(f"{part}.")} for part in ("train", "eval")
    }
    return Data(split["train"], split["eval"], len(tokenizer), source)


def _embedded(settings: Settings) -> Data:
    # The corpus has its own seed: two seeds of a run differ in weights and order, not in what there is to learn.
    if settings.task == "imdb":
        train = corpus.reviews(settings.train_rows, settings.sequence, SPLIT_SEED)
        test = corpus.reviews(settings.eval_rows, settings.sequence, SPLIT_SEED + 1)
    else:
        sequence = settings.sequence
        counts = {"train": settings.train_rows or 1600, "validation": settings.eval_rows}
        train, test = (
            {"input_ids": corpus.stream(n * sequence, SPLIT_SEED, part).reshape(n, sequence)}
            for part, n in counts.items()
        )
    tensors = [{name: torch.from_numpy(array) for name, array in rows.items()} for rows in (train, test)]
    return Data(*tensors, vocabulary=corpus.VOCABULARY, source="embedded")


def _data_source(settings: Settings) -> str:
    """A text that changes when the data does: the hub's name, or a folder with its files' sizes and times."""
    if settings.data == "hub":
        return "/".join(filter(None, HUB_DATA[settings.task]))
    folder = Path(settings.data)
    if not folder.is_dir():
        raise Stop(f"--data {settings.data} is not a folder", "give an existing folder, 'hub' or 'embedded'")
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return f"{folder.name} {_hash([(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files])}"


@functools.cache
def _ask_for_hub() -> None:
    """Knock once. Where nobody answers, use what was downloaded before: the libraries would retry for minutes."""
    if urllib.request.getproxies():
        return  # reached through somebody else, who is not to be tried in this way
    endpoint = urllib.parse.urlsplit(huggingface_hub.constants.ENDPOINT)
    port = endpoint.port or {"http": 80}.get(endpoint.scheme, 443)
    try:
        socket.create_connection((endpoint.hostname, port), timeout=5).close()
    except OSError:
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True


def _dataset(settings: Settings) -> datasets.DatasetDict:
    try:
        if settings.data == "hub":
            _ask_for_hub()
            name, config = HUB_DATA[settings.task]
            found = datasets.load_dataset(name, config)
        else:
            found = datasets.load_dataset(settings.data)
    except Exception as error:  # the libraries raise a dozen kinds here; each means that the data cannot be had
        what = f"the data set {HUB_DATA[settings.task][0]}" if settings.data == "hub" else f"--data {settings.data}"
        raise Stop(f"{what} cannot be read ({_one_line(error)})", OFFLINE) from error
    wanted = {"imdb": {"text", "label"}, "wikitext": {"text"}}[settings.task]
    parts = {"imdb": ("train",), "wikitext": ("train", "validation")}[settings.task]
    if not all(part in found and wanted <= set(found[part].column_names) for part in parts):
        raise Stop(
            f"--data {settings.data} lacks {' and '.join(parts)} with the columns {', '.join(sorted(wanted))}",
            f"give a data set in the layout of {HUB_DATA[settings.task][0]}",
        )
    return found


def _tokenizer(settings: Settings):
    name = settings.tokenizer or (SHAPES[settings.model]["hub"] if settings.model in SHAPES else settings.model)
    if name is None:
        name = SHAPES["gpt2"]["hub"]  # gpt-tiny is our own shape and reads with GPT-2's vocabulary
    try:
        if not Path(name).exists():
            _ask_for_hub()
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise Stop(f"the tokenizer {name} cannot be read ({_one_line(error)})", OFFLINE) from error


def _imdb(settings: Settings, tokenizer) -> dict[str, Rows]:
    """The source document's rows: a fifth of the train split held out, then 800 and 200 at random, padded."""
    split = _dataset(settings)["train"].train_test_split(test_size=0.2, seed=SPLIT_SEED)
    rows = {}
    for part, name, count in (("train", "train", settings.train_rows), ("eval", "test", settings.eval_rows)):
        have = len(split[name])
        if count > have:
            raise Stop(f"--{part}-rows {count} is more than the {have} there are", f"give at most {have}")
        chosen = split[name].shuffle(seed=SPLIT_SEED).select(range(count))
        encoded = tokenizer(
            list(chosen["text"]),
            padding="max_length",
            truncation=True,
            max_length=settings.sequence,
            return_tensors="pt",
        )
        rows[part] = {
            "input_ids": encoded["input_ids"],
            "attention_mask": encoded["attention_mask"],
            "labels": torch.tensor(chosen["label"]),
        }
    return rows


def _wikitext(settings: Settings, tokenizer) -> dict[str, Rows]:
    """All text of a split in one string of tokens, cut into blocks; the end that fills none is dropped."""
    found = _dataset(settings)
    rows = {}
    for part, name, count in (("train", "train", settings.train_rows), ("eval", "validation", settings.eval_rows)):
        ids = [
            i
            for row in tokenizer(list(found[name]["text"]), add_special_tokens=False, verbose=False)["input_ids"]
            for i in row
        ]
        have = len(ids) // settings.sequence
        if count is not None and count > have:
            raise Stop(f"--{part}-rows {count} is more than the {have} blocks there are", f"give at most {have}")
        blocks = torch.tensor(ids[: have * settings.sequence]).view(have, settings.sequence)
        rows[part] = {"input_ids": blocks[:count].clone()}
    return rows


# --- model ---------------------------------------------------------------------------------------------------------


def model_config(settings: Settings, vocabulary: int):
    """The model's architecture, with what the settings change in it."""
    if settings.model in SHAPES:
        shape = {key: value for key, value in SHAPES[settings.model].items() if key != "hub"}
        if shape["vocab_size"] is None:
            shape |= {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None}
        config = AutoConfig.for_model(**shape)
    else:
        try:
            if not Path(settings.model).exists():
                _ask_for_hub()
            config = AutoConfig.from_pretrained(settings.model)
        except Exception as error:
            raise Stop(
                f"--model {settings.model} is no built-in shape, no folder with a config.json, and not to be had from "
                f"the hub ({_one_line(error)})",
                f"give one of {', '.join(SHAPES)}, or a local folder",
            ) from error
    reads_both_ways = config.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if reads_both_ways != (settings.task == "imdb") or type(config) not in _classes(settings):
        other = "wikitext" if settings.task == "imdb" else "imdb"
        raise Stop(
            f"--model {settings.model} ({config.model_type}) does not fit task {settings.task}",
            f"give --task {other}, or another model",
        )
    if vocabulary > config.vocab_size:
        raise Stop(
            f"the data uses {vocabulary} token ids and --model {settings.model} knows {config.vocab_size}",
            "give the tokenizer that belongs to the model",
        )
    context = getattr(config, "max_position_embeddings", None)
    if context and settings.sequence > context:
        raise Stop(
            f"--sequence {settings.sequence} is more than the model's {context} positions", f"give at most {context}"
        )
    config.use_cache = False
    config._attn_implementation = _attention(settings, config)
    if settings.dropout is not None:
        for name in (
            "hidden_dropout_prob",
            "attention_probs_dropout_prob",
            "resid_pdrop",
            "embd_pdrop",
            "attn_pdrop",
            "attention_dropout",
            "hidden_dropout",
        ):
            if hasattr(config, name):
                setattr(config, name, settings.dropout)
    return config


def _attention(settings: Settings, config) -> str:
    """The name under which transformers finds the attention.

    "causal_sdpa" is its own fused attention under a name that has no mask function: none is made, and the causal kernel
    is asked for instead.
    """
    if settings.attention == "sdpa" and not model_class(settings, config)._supports_sdpa:
        raise Stop(f"transformers has no fused attention for {config.model_type}", "give --attention eager")
    if settings.sequence > (getattr(config, "sliding_window", None) or settings.sequence):
        raise Stop(
            f"--sequence {settings.sequence} is more than the model's attention window of {config.sliding_window}",
            f"give at most {config.sliding_window}",
        )  # our masks know of no window
    if settings.attention == "eager" or settings.task == "imdb":
        return settings.attention
    transformers.AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
    return "causal_sdpa"


def model_class(settings: Settings, config) -> type:
    return _classes(settings)[type(config)]


def _classes(settings: Settings):
    """transformers' own table from configs to the classes that do the task."""
    if settings.task == "imdb":
        return modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    return modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING


def on_meta(settings: Settings, config) -> torch.nn.Module:
    """The model without any memory behind it: for counting parameters and operations."""
    with torch.device("meta"):
        # The class itself, not an Auto class: under stage 3 those would partition what they build.
        return model_class(settings, config)(config)


def drawn_weights(settings: Settings, config) -> Path:
    """A checkpoint with weights drawn once for this model and seed. Whoever calls first makes it, alone.

    Every arm loads it. Drawing anew in each arm would give stage 3 other weights than the rest, because DeepSpeed
    partitions each parameter as it is drawn.
    """
    key = {
        "config": {k: v for k, v in config.to_dict().items() if "drop" not in k and k != "transformers_version"},
        "class": model_class(settings, config).__name__,
        "seed": settings.seed,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    folder = settings.cache_dir / "weights" / f"{Path(settings.model).name}-seed{settings.seed}-{_hash(key)}"
    if not folder.exists():
        from transformers.integrations import deepspeed as hf_deepspeed

        # Out of sight of DeepSpeed's stage 3, which would partition the parameters while they are drawn.
        registered = hf_deepspeed._hf_deepspeed_config_weak_ref
        hf_deepspeed.unset_hf_deepspeed_config()
        try:
            transformers.set_seed(settings.seed)
            with _made_beside(folder) as part:
                model_class(settings, config)(config).save_pretrained(part)
        finally:
            hf_deepspeed._hf_deepspeed_config_weak_ref = registered
    return folder


def build_model(settings: Settings, config, device: torch.device) -> torch.nn.Module:
    """The model with its starting weights; under stage 3 each rank keeps its own part as they are loaded."""
    dtype = torch.bfloat16 if settings.precision == "bf16_cast" else torch.float32
    auto = AutoModelForSequenceClassification if settings.task == "imdb" else AutoModelForCausalLM
    attention = config._attn_implementation
    if settings.init == "in_place":
        with device:
            model = auto.from_config(config, dtype=dtype, attn_implementation=attention)
    else:
        where = drawn_weights(settings, config) if settings.init == "random" else _published(settings)
        try:
            model = auto.from_pretrained(where, config=config, dtype=dtype, attn_implementation=attention)
        except Exception as error:
            raise Stop(
                f"no weights for --model {settings.model} ({_one_line(error)})",
                "give --init random to start from drawn weights, or a folder that holds weights",
            ) from error
    if settings.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def _published(settings: Settings) -> str:
    name = SHAPES[settings.model]["hub"] if settings.model in SHAPES else settings.model
    if name is None:
        raise Stop(f"--model {settings.model} has no published weights", "give --init random")
    if not Path(name).exists():
        _ask_for_hub()
    return name


# --- small things --------------------------------------------------------------------------------------------------


class _made_beside:
    """A path to make a file or folder at, which takes its name only once it is whole, even if two make it at once."""

    def __init__(self, target: Path):
        self.target = target

    def __enter__(self) -> Path:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.scratch = tempfile.TemporaryDirectory(dir=self.target.parent, prefix="part-")
        return Path(self.scratch.name) / self.target.name

    def __exit__(self, kind, error, trace):
        try:
            if kind is None:
                (Path(self.scratch.name) / self.target.name).replace(self.target)
        except OSError:
            if not self.target.exists():  # otherwise another process was first, with the same content
                raise
        finally:
            self.scratch.cleanup()


def _hash(thing) -> str:
    return hashlib.sha256(json.dumps(thing, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _one_line(error: Exception) -> str:
    if huggingface_hub.constants.HF_HUB_OFFLINE and isinstance(error, OSError):
        return "the hub does not answer, and it is not among what was downloaded before"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}{'...' if len(text) > 160 else ''}"
