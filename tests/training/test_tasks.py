"""The two tasks: losses and metrics by hand, rows exactly as the source document's, weights drawn once."""

import json
import math
import os
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.convert_slow_tokenizer import bytes_to_unicode

from study.core.errors import Stop
from study.core.settings import Settings, TrainerFlags, resolve
from study.core.shapes import VOCABULARY
from study.training import models, tasks
from study.training.data import load_data, load_file
from tests.conftest import table
from tests.predict.families import config_of
from tests.shaped import KEPT


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path, monkeypatch):
    """What `datasets` unpacks goes with the test, not into the user's home."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


def settings_for(task: str, **more) -> Settings:
    return resolve(TrainerFlags(task=task, **more), gpu=False)


@pytest.mark.parametrize("rows", [1, 7, 129, 5000])
def test_metrics_of_evaluate_are_those_of_numpy_to_the_bit(rows):
    """Means of other types, or in another order, differ in the last bits: records of old runs would not compare."""
    random = np.random.default_rng(rows)
    losses, classes = random.normal(3, 1, rows), random.integers(0, 2, (2, rows))
    perplexity = tasks.metric(settings_for("wikitext"), losses, losses, {})
    assert perplexity == {"perplexity": math.exp(float(losses.mean()))}
    labels = {"labels": torch.tensor(classes[1])}
    accuracy = tasks.metric(settings_for("imdb"), losses, classes[0].astype(float), labels)
    assert accuracy == {"accuracy": float(np.mean(classes[0] == classes[1]))}
    assert tasks.metric(settings_for("wikitext"), losses + 1000, losses, {}) == {"perplexity": None}


def test_metrics_need_no_network_no_folder_and_no_lock(tmp_path, monkeypatch):
    """By default `evaluate` has a folder in the user's cache, and in it a file and a lock for each process."""
    import evaluate

    from study.training.evaluation import Accuracy, Perplexity

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", tmp_path / "metrics")
    monkeypatch.setattr(socket.socket, "connect", pytest.fail)
    monkeypatch.setattr(socket, "getaddrinfo", pytest.fail)
    scores = Accuracy(), Perplexity()
    assert all(isinstance(score, evaluate.Metric) for score in scores)
    assert scores[0].compute(predictions=[1, 0], references=[1, 1]) == {"accuracy": 0.5}
    assert scores[1].compute(losses=[0.0, 0.0]) == {"perplexity": 1.0}
    assert not list(tmp_path.rglob("*")), "it wrote something"


def test_a_sequence_beyond_the_window_of_attention_is_refused_but_for_values_that_nobody_reads():
    """Half of the layers of Gemma 2 attend 4,096 tokens of its 8,192. Our masks have no window."""
    longer = {"model": "gemma2-9b", "sequence": 4097}
    with pytest.raises(Stop, match="more than the model's 4096 tokens of attention window"):
        models.model_config(settings_for("wikitext", **longer), None)
    assert models.model_config(settings_for("synthetic", **longer), None).sliding_window == 4096
    assert models.model_config(settings_for("wikitext", **longer | {"sequence": 4096}), None).sliding_window == 4096


# --- losses --------------------------------------------------------------------------------------------------------


def model_of(settings: Settings) -> torch.nn.Module:
    """The model as the trainer builds it, without dropout."""
    torch.manual_seed(settings.seed)
    return models.build_model(settings, models.model_config(settings, VOCABULARY), torch.device("cpu")).eval()


def logits_of_twin(model: torch.nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    """By the same weights in a model that transformers builds from its own defaults, with its own attention masks."""
    config = type(model.config).from_dict(model.config.to_dict())
    config._attn_implementation = "eager"
    twin = type(model)(config)
    twin.load_state_dict(model.state_dict())
    return twin.eval()(**inputs).logits.double()


@pytest.mark.parametrize("kind", ["gpt2", "opt"])  # the latter counts positions by a mask of two dimensions
@torch.no_grad()
def test_the_loss_of_text_is_of_the_next_token(tmp_path, kind):
    """By hand, on the logits of an ordinary model with the same weights: no position sees what it is to predict."""
    (tmp_path / "config.json").write_text(json.dumps(config_of(kind, vocab_size=2048)))
    settings = settings_for("wikitext", model=str(tmp_path), init="in_place", sequence=24, attention="sdpa")
    model = model_of(settings)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # far from uniform, so that a wrong mask would show
    ids = torch.from_numpy(tasks.stream(3 * 24, seed=0, part="train").reshape(3, 24))
    losses, predictions = tasks.row_losses(settings, model, {"input_ids": ids})
    logits = logits_of_twin(model, input_ids=ids)
    shares = logits.exp() / logits.exp().sum(-1, keepdim=True)
    by_hand = (-shares[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2).log()).mean(1).tolist()
    assert losses.tolist() == pytest.approx(by_hand, rel=1e-4)
    assert len(set(by_hand)) == 3
    assert predictions.shape == losses.shape


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_the_loss_of_a_review_is_of_its_label(attention):
    """By hand, and blind to what stands in the padding."""
    settings = settings_for("imdb", init="in_place", sequence=16, attention=attention)
    model = model_of(settings)
    batch = {name: torch.from_numpy(array) for name, array in tasks.reviews(6, 16, seed=0).items()}
    losses, predictions = tasks.row_losses(settings, model, batch)
    logits = logits_of_twin(model, input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    odds = logits.gather(1, 1 - batch["labels"][:, None]) - logits.gather(1, batch["labels"][:, None])
    assert losses.tolist() == pytest.approx(torch.log1p(odds.exp()).flatten().tolist(), rel=1e-4)
    assert predictions.tolist() == logits.argmax(1).tolist()
    padding = batch["attention_mask"] == 0
    assert padding.any()
    filled = batch | {"input_ids": torch.where(padding, 99, batch["input_ids"])}
    assert tasks.row_losses(settings, model, filled)[0].tolist() == pytest.approx(losses.tolist(), rel=1e-5)


# --- rows: embedded ------------------------------------------------------------------------------------------------


def test_the_rows_are_those_of_the_kept_runs():
    """To the byte: they were seen to hold the rules by which tasks.py makes them."""
    for task, checksum in {(each["requested"]["task"], each["observed"]["data_checksum"]) for each in KEPT}:
        assert load_data(settings_for(task, sequence=64, eval_rows=32)).checksum == checksum


def test_nothing_is_evaluated_on_what_was_seen():
    data = load_data(settings_for("imdb"))
    train, rows = ({tuple(row) for row in part["input_ids"].tolist()} for part in (data.train, data.eval))
    assert (len(train), len(rows), len(train & rows)) == (800, 200, 0)


@pytest.mark.parametrize("task", ["imdb", "wikitext"])
def test_the_data_does_not_depend_on_the_seed(task):
    """Two seeds of a run learn from the same rows; fewer rows are other rows, and the checksum says so."""
    sizes = {"train_rows": 40, "eval_rows": 10, "sequence": 16}
    data = load_data(settings_for(task, seed=1, **sizes))
    checksum = data.checksum
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert data.checksum == checksum, "--init none reads the same rows"
    assert checksum == load_data(settings_for(task, seed=2, **sizes)).checksum
    assert checksum != load_data(settings_for(task, seed=1, **sizes | {"train_rows": 39})).checksum


# --- rows: a folder ------------------------------------------------------------------------------------------------

WORDS = ["good", "bad", "film", "book", "the", "a", "was"]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> dict[str, str]:
    """Data and tokenizers in the layout of the real ones: `imdb`, `wikitext`, `bert`, `gpt2`."""
    root = shutil.copytree(Path(__file__).with_name("small"), tmp_path_factory.mktemp("data") / "small")
    return {path.name: str(path) for path in root.iterdir()}


def of_small(small, task: str, cache: Path, **more) -> Settings:
    paths = {"data": small[task], "tokenizer": small["bert" if task == "imdb" else "gpt2"], "cache_dir": cache}
    sizes = {"train_rows": 30, "eval_rows": 8, "sequence": 8} if task == "imdb" else {"eval_rows": 4, "sequence": 8}
    return settings_for(task, **paths | sizes | more)


def test_reviews_from_a_folder(small, tmp_path):
    """A fifth is held out with seed 42, both parts are shuffled with 42, and rows are cut or filled to length."""
    from datasets import load_dataset  # takes seconds, which each worker would need

    data = load_data(of_small(small, "imdb", tmp_path))
    split = load_dataset(small["imdb"])["train"].train_test_split(0.2, seed=42)
    assert data.vocabulary == 5 + len(WORDS)
    for rows, part, count in ((data.train, "train", 30), (data.eval, "test", 8)):
        chosen = split[part].shuffle(seed=42).select(range(count))
        assert rows["labels"].tolist() == list(chosen["label"])
        texts = [[2, *(5 + WORDS.index(word) for word in text.split()[:6]), 3] for text in chosen["text"]]
        assert rows["input_ids"].tolist() == [ids + [0] * (8 - len(ids)) for ids in texts], "[CLS] words [SEP]"
        assert rows["attention_mask"].tolist() == [[1] * len(ids) + [0] * (8 - len(ids)) for ids in texts]


def test_text_from_a_folder(small, tmp_path):
    """Blocks put together are the text again, up to an end that fills no block."""
    data = load_data(of_small(small, "wikitext", tmp_path))
    lines = (Path(small["wikitext"]) / "train.jsonl").read_text().splitlines()
    text = "".join(json.loads(line)["text"] for line in lines)
    order = list(bytes_to_unicode())
    stream = [order.index(byte) for byte in text.encode()]
    assert len(stream) % 8, "an end is left over"
    assert data.train["input_ids"].flatten().tolist() == stream[: len(stream) // 8 * 8]
    assert tuple(data.eval["input_ids"].shape) == (4, 8)


@pytest.mark.parametrize("task", ["imdb", "wikitext"])
def test_rows_are_prepared_once_and_other_rows_anew(small, tmp_path, task, monkeypatch):
    first, read, reads = load_data(of_small(small, task, tmp_path)), tasks.dataset, []
    monkeypatch.setattr(tasks, "dataset", lambda settings: reads.append(settings) or read(settings))
    assert load_data(of_small(small, task, tmp_path)).checksum == first.checksum
    assert reads == [], "they are in the cache"
    for more in ({"sequence": 6}, {"eval_rows": 3}, {"train_rows": 9}):
        assert load_data(of_small(small, task, tmp_path, **more)).checksum != first.checksum
    os.utime(next(Path(small[task]).glob("train.*")), (1, 1))
    assert load_data(of_small(small, task, tmp_path)).source != first.source


@pytest.mark.parametrize(("task", "more", "what"), table("training/refused.toml")["rows"])
def test_rows_that_cannot_be_had_are_a_stop(small, tmp_path, task, more, what):
    more = {name: small.get(value, value) for name, value in more.items()}
    with pytest.raises(Stop, match=what):
        load_data(of_small(small, task, tmp_path, **more))
    assert not list(tmp_path.rglob("*.safetensors")), "nothing half made is kept"


# --- weights -------------------------------------------------------------------------------------------------------


def test_weights_are_drawn_once(tmp_path):
    """Later runs use them, whatever else differs in the run; another seed has others; and a model starts from them."""

    def drawn(**more) -> Path:
        settings = settings_for("imdb", cache_dir=tmp_path, **more)
        return models.drawn_weights(settings, models.model_config(settings, VOCABULARY))

    folder = drawn()
    written = (folder / "model.safetensors").stat().st_mtime_ns
    for more in ({"dropout": 0.5}, {"attention": "eager"}, {"precision": "bf16_cast"}):
        assert drawn(**more) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    weights, others = (load_file(path / "model.safetensors") for path in (folder, drawn(seed=43)))
    assert not all(torch.equal(weights[name], others[name]) for name in weights)
    held = dict(model_of(settings_for("imdb", cache_dir=tmp_path)).named_parameters())
    assert held.keys() <= weights.keys()
    assert all(torch.equal(held[name], weights[name]) for name in held), "all of them, the head too, bit for bit"


def test_damaged_weights_are_drawn_again(tmp_path):
    settings = settings_for("imdb", cache_dir=tmp_path)
    file = models.drawn_weights(settings, models.model_config(settings, VOCABULARY)) / "model.safetensors"
    written = file.read_bytes()
    file.write_bytes(written[:-64] + bytes(64))
    assert file.read_bytes() != written
    model_of(settings)
    assert file.read_bytes() == written


def test_a_model_without_weights_says_so(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": 32, "num_attention_heads": 2}')
    with pytest.raises(Stop, match=f"the weights of {tmp_path} cannot be read"):
        model_of(settings_for("imdb", model=str(tmp_path), init="pretrained", sequence=8))
