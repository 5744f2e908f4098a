"""The two tasks: losses and metrics by hand, rows exactly as the source document's, weights drawn once."""

import itertools
import json
import math
import os
import pickle
from pathlib import Path

import datasets
import evaluate
import numpy as np
import pytest
import torch
import transformers
from conftest import SHARED
from torch._subclasses.fake_tensor import FakeTensorMode

from study.errors import Stop
from study.spec.settings import Flags, Settings, resolve
from study.spec.shapes import VOCABULARY
from study.training import models, tasks
from study.training.data import ROWS, SPLIT_SEED, load_data, load_file, save_file

needs_data = pytest.mark.skipif(
    not (SHARED / "data" / "imdb").is_dir(), reason=f"real data and vocabularies are not there: {SHARED}"
)
NO_CODE = "it needs Python code of its own, and the study never runs code"


@pytest.fixture(scope="module", autouse=True)
def own_datasets_cache(tmp_path_factory):
    """What `datasets` unpacks goes with the test, not into the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


def settings_for(task: str, **more) -> Settings:
    return resolve(Flags(task=task, **more), gpu=False)


# --- metrics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("formula", "predictions", "references", "by_hand"),
    [
        (tasks.accuracy, [1, 0, 1, 1], [1, 0, 0, 1], 0.75),
        (tasks.accuracy, [0, 0], [1, 1], 0.0),
        (tasks.perplexity, [math.log(4)] * 2, [4, 4], pytest.approx(4)),
        (tasks.perplexity, np.log([2, 8]), [4, 4], pytest.approx(4)),  # the geometric mean
        (tasks.perplexity, np.log([2, 32]), [3, 1], pytest.approx(4)),  # (3 ln 2 + 1 ln 32) / 4
        (tasks.perplexity, [1000.0], [1], None),
        (tasks.perplexity, [math.inf], [1], None),
        (tasks.perplexity, [math.nan], [1], None),
    ],
)
def test_metrics_by_hand(formula, predictions, references, by_hand):
    assert formula(predictions, references) == {formula.__name__: by_hand}


def test_real_data_is_judged_by_evaluate(monkeypatch):
    """Not a digit differs from the formula alone, which the embedded corpus is judged by."""
    calls = []
    compute = evaluate.Metric.compute

    def counted(metric, **values):
        """evaluate adds to this docstring."""
        calls.append(metric.formula)
        return compute(metric, **values)

    monkeypatch.setattr(evaluate.Metric, "compute", counted)
    rng = np.random.default_rng(0)
    losses, predictions = rng.random(50) * 9, rng.integers(0, 2, 50)
    rows = {"labels": torch.from_numpy(rng.integers(0, 2, 50)), "input_ids": torch.zeros(50, 7, dtype=torch.long)}
    for task in ("imdb", "wikitext"):
        formula, metric = (
            tasks.metric(settings_for(task, data=data), losses, predictions, rows) for data in ("embedded", "hub")
        )
        assert formula == metric
    assert calls == [tasks.accuracy, tasks.perplexity]


# --- losses --------------------------------------------------------------------------------------------------------


def model_of(settings: Settings) -> torch.nn.Module:
    """The model as the trainer builds it, without dropout."""
    torch.manual_seed(settings.seed)
    return models.build_model(settings, models.model_config(settings, VOCABULARY), torch.device("cpu")).eval()


def plain_twin(model: torch.nn.Module) -> torch.nn.Module:
    """The same weights in a model that transformers builds from its own defaults, with its own attention masks."""
    config = type(model.config).from_dict(model.config.to_dict())
    config._attn_implementation = "eager"
    twin = type(model)(config)
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def next_token_losses(logits: torch.Tensor, ids: torch.Tensor) -> list[float]:
    """Minus the logarithm of the share that each position gives to the next token, in double precision."""
    shares = logits.double().exp() / logits.double().exp().sum(-1, keepdim=True)
    of_next = shares[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    return (-of_next.log()).mean(1).tolist()


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
NEOX = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
NEOX |= {"max_position_embeddings": 64}
CAUSAL = {  # small configs of each kind of causal model that is built in
    "gpt2": GPT2 | {"bos_token_id": None, "eos_token_id": None},
    "gptj": GPT2 | {"rotary_dim": 8, "tie_word_embeddings": False},
    "gpt_neox": NEOX,
    "gemma2": NEOX | {"num_key_value_heads": 1, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 32},
}


@pytest.mark.parametrize(
    ("kind", "attention"),
    [*itertools.product(("gpt2", "gpt_neox"), ("sdpa", "eager")), ("gptj", "eager"), ("gemma2", "eager")],
)
def test_the_loss_of_text_is_of_the_next_token(tmp_path, kind, attention):
    """By hand, on the logits of an ordinary model with the same weights: no position sees what it is to predict."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 2048} | CAUSAL[kind]))
    settings = settings_for("wikitext", model=str(tmp_path), init="in_place", sequence=24, attention=attention)
    model = model_of(settings)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # far from uniform, so that a wrong mask would show
    ids = torch.from_numpy(tasks.stream(3 * 24, seed=0, part="train").reshape(3, 24))
    with torch.no_grad():
        losses, predictions = tasks.row_losses(settings, model, {"input_ids": ids})
        by_hand = next_token_losses(plain_twin(model)(input_ids=ids).logits, ids)
    assert losses.tolist() == pytest.approx(by_hand, rel=1e-4)
    assert len(set(by_hand)) == 3
    assert predictions.shape == losses.shape


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_loss_of_a_review_is_of_its_label(attention):
    """By hand, and blind to what stands in the padding."""
    settings = settings_for("imdb", init="in_place", sequence=16, attention=attention)
    model = model_of(settings)
    batch = {name: torch.from_numpy(array) for name, array in tasks.reviews(6, 16, seed=0).items()}
    padding = batch["attention_mask"] == 0
    assert padding.any()
    with torch.no_grad():
        losses, predictions = tasks.row_losses(settings, model, batch)
        logits = plain_twin(model)(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.double()
        odds = logits.gather(1, 1 - batch["labels"][:, None]) - logits.gather(1, batch["labels"][:, None])
        assert losses.tolist() == pytest.approx(torch.log1p(odds.exp()).flatten().tolist(), rel=1e-4)
        assert predictions.tolist() == logits.argmax(1).tolist()
        filled = batch | {"input_ids": torch.where(padding, 99, batch["input_ids"])}
        assert tasks.row_losses(settings, model, filled)[0].tolist() == pytest.approx(losses.tolist(), rel=1e-5)
        unmasked = batch | {"attention_mask": torch.ones_like(batch["attention_mask"])}
        assert tasks.row_losses(settings, model, unmasked)[0].tolist() != pytest.approx(losses.tolist(), rel=1e-5)


def test_losses_are_fp32_whatever_the_model_computes_in():
    settings = settings_for("wikitext", init="in_place", sequence=16, precision="bf16_cast")
    model = model_of(settings)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    ids = torch.from_numpy(tasks.stream(32, seed=0, part="train").reshape(2, 16))
    assert tasks.row_losses(settings, model, {"input_ids": ids})[0].dtype == torch.float32


# --- rows: embedded ------------------------------------------------------------------------------------------------


def test_embedded_rows():
    data = load_data(settings_for("imdb"))
    assert (data.vocabulary, data.source) == (VOCABULARY, "embedded")
    shapes = {"input_ids": (800, 128), "attention_mask": (800, 128), "labels": (800,)}
    assert {name: tuple(rows.shape) for name, rows in data.train.items()} == shapes
    assert len(data.eval["labels"]) == 200
    train = {tuple(row) for row in data.train["input_ids"].tolist()}
    assert not train & {tuple(row) for row in data.eval["input_ids"].tolist()}, "nothing is evaluated on what was seen"
    text = load_data(settings_for("wikitext", sequence=32, train_rows=50, eval_rows=10))
    stream = tasks.stream(50 * 32, SPLIT_SEED, "train").reshape(50, 32)
    assert text.train.keys() == {"input_ids"}
    assert (text.train["input_ids"].numpy() == stream).all()
    assert tuple(text.eval["input_ids"].shape) == (10, 32)


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


def write_lines(path: Path, rows: list[dict]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path.parent)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> dict[str, str]:
    """Data and tokenizers in the layout of the real ones, made here: `imdb`, `wikitext`, `bert`, `gpt2`."""
    root = tmp_path_factory.mktemp("small")
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, int(rng.integers(2, 12)))) for _ in range(50)]
    write_lines(root / "imdb" / "train.jsonl", [{"text": text, "label": i % 2} for i, text in enumerate(texts)])
    for split, count in (("train", 40), ("validation", 10)):
        articles = [f" = article {i} = \n" if i % 3 else "" for i in range(count)]
        write_lines(root / "wikitext" / f"{split}.jsonl", [{"text": text} for text in articles])
    vocabulary = {letter: i for i, letter in enumerate([*byte_letters(), "<|endoftext|>"])}
    files = {
        "bert/vocab.txt": "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]),
        "bert/config.json": '{"model_type": "bert"}',
        "gpt2/vocab.json": json.dumps(vocabulary),
        "gpt2/merges.txt": "#version: 0.2\n",
        "gpt2/config.json": '{"model_type": "gpt2"}',
    }
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return {path.name: str(path) for path in root.iterdir()}


def byte_letters() -> list[str]:
    """GPT-2's letter for each byte: itself where it prints, else the next free one from 256 on."""
    prints = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in prints else next(others)) for byte in range(256)]


def of_small(small, task: str, cache: Path, **more) -> Settings:
    paths = {"data": small[task], "tokenizer": small["bert" if task == "imdb" else "gpt2"], "cache_dir": cache}
    sizes = {"train_rows": 30, "eval_rows": 8, "sequence": 8} if task == "imdb" else {"eval_rows": 4, "sequence": 8}
    return settings_for(task, **paths | sizes | more)


def test_reviews_from_a_folder(small, tmp_path):
    """A fifth is held out with seed 42, both parts are shuffled with 42, and rows are cut or filled to length."""
    data = load_data(of_small(small, "imdb", tmp_path))
    split = datasets.load_dataset(small["imdb"])["train"].train_test_split(0.2, seed=42)
    assert data.vocabulary == 5 + len(WORDS)
    for rows, part, count in ((data.train, "train", 30), (data.eval, "test", 8)):
        chosen = split[part].shuffle(seed=42).select(range(count))
        assert rows["labels"].tolist() == list(chosen["label"])
        columns = rows["input_ids"].tolist(), rows["attention_mask"].tolist(), chosen["text"]
        for ids, mask, text in zip(*columns, strict=True):
            words = [2, *(5 + WORDS.index(word) for word in text.split()[:6]), 3]  # [CLS] words [SEP]
            assert ids == words + [0] * (8 - len(words))
            assert mask == [1] * len(words) + [0] * (8 - len(words))


def test_text_from_a_folder(small, tmp_path):
    """Blocks put together are the text again, up to an end that fills no block."""
    data = load_data(of_small(small, "wikitext", tmp_path))
    text = "".join(datasets.load_dataset(small["wikitext"])["train"]["text"])
    stream = list(text.encode())  # the vocabulary is in the order of the bytes
    assert len(stream) % 8, "an end is left over"
    assert data.train["input_ids"].flatten().tolist() == stream[: len(stream) // 8 * 8]
    assert tuple(data.eval["input_ids"].shape) == (4, 8)


@pytest.mark.parametrize("task", ["imdb", "wikitext"])
def test_prepared_rows_are_used_again(small, tmp_path, task, capsys):
    """The second time the file is read, unless it is broken."""
    settings = of_small(small, task, tmp_path)
    checksum = load_data(settings).checksum
    (entry,) = (tmp_path / "data").iterdir()
    written = (entry / ROWS).stat()
    planted = {name: tensor.clone() for name, tensor in load_file(entry / ROWS).items()}
    planted["train.input_ids"].fill_(7)
    save_file(planted, entry / ROWS)
    os.utime(entry / ROWS, ns=(written.st_atime_ns, written.st_mtime_ns))  # otherwise it counts as broken
    assert set(load_data(settings).train["input_ids"].flatten().tolist()) == {7}
    (entry / ROWS).write_bytes(b"garbage")
    assert load_data(settings).checksum == checksum
    assert f"The cache entry {entry} is broken" in capsys.readouterr().out


@pytest.mark.parametrize("more", [{"sequence": 6}, {"eval_rows": 3}, {"train_rows": 9}])
@pytest.mark.parametrize("task", ["imdb", "wikitext"])
def test_other_rows_are_prepared_anew(small, tmp_path, task, more):
    first = load_data(of_small(small, task, tmp_path))
    second = load_data(of_small(small, task, tmp_path, **more))
    assert first.checksum != second.checksum
    assert len(list((tmp_path / "data").iterdir())) == 2


def test_changed_data_is_prepared_anew(small, tmp_path):
    rows = [json.loads(line) for line in (Path(small["imdb"]) / "train.jsonl").read_text().splitlines()]
    folder = write_lines(tmp_path / "imdb" / "train.jsonl", rows)
    settings = of_small(small | {"imdb": folder}, "imdb", tmp_path / "cache")
    first = load_data(settings)
    write_lines(tmp_path / "imdb" / "train.jsonl", [row | {"label": 1} for row in rows])
    os.utime(tmp_path / "imdb" / "train.jsonl", (1, 1))
    second = load_data(settings)
    assert first.source != second.source
    assert first.checksum != second.checksum


@pytest.mark.parametrize(
    ("task", "more", "what"),
    [
        ("imdb", {"train_rows": 41}, "--train-rows 41 is more than the 40 rows there are"),
        ("imdb", {"eval_rows": 11}, "--eval-rows 11 is more than the 10 rows there are"),
        ("wikitext", {"eval_rows": 1000}, r"--eval-rows 1000 is more than the \d+ blocks there are"),
        ("wikitext", {"train_rows": 1000}, r"--train-rows 1000 is more than the \d+ blocks there are"),
        ("imdb", {"data": "no/such/folder"}, "--data no/such/folder is not a folder"),
        ("imdb", {"data": "x" * 5000}, "is not a folder"),
        ("imdb", {"data": "wikitext"}, "lacks train with the columns label, text"),
        ("imdb", {"tokenizer": "./no-such-folder"}, r"the tokenizer \./no-such-folder cannot be read"),
        ("imdb", {"tokenizer": "gpt2"}, "has no padding token"),
    ],
)
def test_rows_that_cannot_be_had_are_a_stop(small, tmp_path, task, more, what):
    more = {name: small.get(value, value) for name, value in more.items()}
    with pytest.raises(Stop, match=what) as caught:
        load_data(of_small(small, task, tmp_path, **more))
    assert caught.value.remedy
    assert not list(tmp_path.rglob("*.safetensors")), "nothing half made is kept"


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"text": "good", "label": 2}, "has the label 2, and task imdb has two"),
        ({"text": "good", "label": None}, "has the label None, and task imdb has two"),
        ({"text": "good", "label": "good"}, "cannot be read|has the label 'good'"),
        ({"text": None, "label": 1}, "has 'None' in the column text"),
    ],
)
def test_rows_of_another_kind_are_a_stop(small, tmp_path, row, what):
    folder = write_lines(tmp_path / "imdb" / "train.jsonl", [row] * 50)
    with pytest.raises(Stop, match=what):
        load_data(of_small(small | {"imdb": folder}, "imdb", tmp_path / "cache"))


class Bomb:
    """Its pickle writes a file when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["imdb.py", "train.pkl", "train.pickle", "train.pth", "train.tar", "empty"])
def test_code_in_a_data_folder_is_not_run(small, tmp_path, name):
    """A loading script, and pickles that would leave a file behind."""
    folder, ran = tmp_path / "imdb", tmp_path / "ran"
    pickle.loads(pickle.dumps(Bomb(ran))).close()
    assert ran.exists(), "the premise: loading the pickle runs it"
    ran.unlink()
    folder.mkdir()
    if name.endswith(".py"):
        (folder / name).write_text(f"open({str(ran)!r}, 'w')")
    elif name != "empty":
        (folder / name).write_bytes(pickle.dumps(Bomb(ran)))
    with pytest.raises(Stop, match="cannot be read"):
        load_data(of_small(small | {"imdb": str(folder)}, "imdb", tmp_path / "cache"))
    assert not ran.exists()


# --- rows: the real ones -------------------------------------------------------------------------------------------


def real(task: str, data: str, model: str, tokenizer: str, cache: Path, **more) -> Settings:
    paths = {"data": str(SHARED / "data" / data), "tokenizer": str(SHARED / "models" / tokenizer), "cache_dir": cache}
    return settings_for(task, model=model, **paths, **more)


@needs_data
def test_real_reviews_are_the_source_documents(tmp_path):
    """800 and 200 of IMDB, as its script chooses and tokenises them."""
    settings = real("imdb", "imdb", "bert-large", "bert-large-uncased", tmp_path, sequence=128)
    data = load_data(settings)
    split = datasets.load_dataset(settings.data)["train"].train_test_split(test_size=0.2, seed=42)
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings.tokenizer)
    for rows, part, count in ((data.train, "train", 800), (data.eval, "test", 200)):
        chosen = split[part].shuffle(seed=42).select(range(count))
        encoded = tokenizer(chosen["text"][:], padding="max_length", truncation=True, max_length=128)
        assert rows["input_ids"].tolist() == encoded["input_ids"]
        assert rows["attention_mask"].tolist() == encoded["attention_mask"]
        assert rows["labels"].tolist() == chosen["label"][:]
        assert 0.4 < rows["labels"].double().mean() < 0.6
    assert data.vocabulary == 30522


@needs_data
def test_real_text_is_the_token_stream(tmp_path):
    """Blocks of 256 put together are what the text is row by row; and decoded, they are the text. Of its beginning."""
    (tmp_path / "text").mkdir()
    for name, split in datasets.load_dataset(str(SHARED / "data" / "wikitext-2")).items():
        split.select(range(1500)).to_parquet(tmp_path / "text" / f"{name}-00000-of-00001.parquet")
    settings = real("wikitext", tmp_path / "text", "gpt2", "gpt2", tmp_path, sequence=256)
    data = load_data(settings)
    splits = datasets.load_dataset(settings.data)
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings.tokenizer)
    stream = itertools.chain.from_iterable(tokenizer(text)["input_ids"] for text in splits["validation"]["text"])
    assert data.eval["input_ids"].flatten().tolist() == list(itertools.islice(stream, 100 * 256))
    text = "".join(splits["train"]["text"])
    decoded = tokenizer.decode(data.train["input_ids"].flatten().tolist()).rstrip("\N{REPLACEMENT CHARACTER}")
    assert text.startswith(decoded)
    assert len(tokenizer(text[len(decoded) :])["input_ids"]) < 256 + 8, "less than a block is left"
    assert data.vocabulary == 50257


# --- weights -------------------------------------------------------------------------------------------------------


def weights_of(settings: Settings) -> tuple[Path, dict]:
    folder = models.drawn_weights(settings, models.model_config(settings, VOCABULARY))
    return folder, {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}


def same(some: dict, others: dict) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


@pytest.mark.parametrize("task", ["imdb", "wikitext"])
def test_weights_are_drawn_once(tmp_path, task):
    """Later runs use them, whatever else differs in the run; another seed has others; and a model starts from them."""
    settings = settings_for(task, cache_dir=tmp_path / "a")
    config = models.model_config(settings, VOCABULARY)
    before = config.to_dict()
    folder, drawn = weights_of(settings)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert models.drawn_weights(settings, config) == models.drawn_weights(settings, config) == folder
    assert config.to_dict() == before, "drawing and saving write into the config, which is part of the key"
    for more in ({"dropout": 0.5}, {"attention": "eager"}, {"precision": "bf16_cast"}, {"checkpointing": True}):
        assert weights_of(settings_for(task, cache_dir=tmp_path / "a", **more))[0] == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    other, redrawn = weights_of(settings_for(task, cache_dir=tmp_path / "a", seed=43))
    assert not same(drawn, redrawn)
    assert set(folder.parent.iterdir()) == {folder, other}, "no scraps"
    assert same(drawn, weights_of(settings_for(task, cache_dir=tmp_path / "b"))[1])
    held = dict(model_of(settings).named_parameters())
    assert held.keys() <= drawn.keys()
    assert all(torch.equal(held[name], drawn[name]) for name in held), "all of them, the head too, bit for bit"


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_drawn_weights_that_are_broken_are_drawn_again(tmp_path, file, capsys):
    settings = settings_for("imdb", cache_dir=tmp_path)
    folder, drawn = weights_of(settings)
    (folder / file).write_bytes((folder / file).read_bytes()[:100])
    again, redrawn = weights_of(settings)
    assert again == folder
    assert same(redrawn, drawn)
    assert f"The cache entry {folder} is broken" in capsys.readouterr().out


@pytest.mark.parametrize("error", [OSError("bad header"), torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_drawn_weights_that_cannot_be_loaded_are_named(error, tmp_path, monkeypatch):
    """--init random, which it is, is no remedy. A lack of memory has its own status."""
    settings = settings_for("imdb", cache_dir=tmp_path)
    folder, _ = weights_of(settings)

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(transformers.BertForSequenceClassification, "from_pretrained", fail)
    with pytest.raises(Stop if isinstance(error, OSError) else type(error)) as caught:
        model_of(settings)
    if isinstance(error, OSError):
        assert f"the drawn weights in {folder} cannot be loaded" in caught.value.what
        assert "--cache-dir" in caught.value.remedy
        assert "--init" not in caught.value.remedy


def test_the_code_of_a_model_or_a_tokenizer_is_neither_run_nor_asked_about(small, tmp_path, monkeypatch):
    """On a terminal where somebody would say yes."""
    folder = tmp_path / "model"
    folder.mkdir()
    code = {"model_type": "martian", "auto_map": {"AutoConfig": "own.Config", "AutoTokenizer": ["own.Tokenizer", None]}}
    (folder / "config.json").write_text(json.dumps(code))
    (folder / "tokenizer_config.json").write_text(json.dumps(code))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    questions = []
    monkeypatch.setattr("builtins.input", lambda question="": questions.append(question) or "y")
    with pytest.raises(Stop, match=r"has Python code of its own \(own.py\), which was not run"):
        models.model_config(settings_for("imdb", model=str(folder)), VOCABULARY)
    with pytest.raises(Stop, match=NO_CODE):
        load_data(of_small(small | {"bert": str(folder)}, "imdb", tmp_path))
    assert questions == []
    assert not (tmp_path / "ran").exists()


def test_a_model_without_weights_says_so(tmp_path):
    with pytest.raises(Stop, match="--model gpt-tiny has no published weights"):
        model_of(settings_for("wikitext", init="pretrained", cache_dir=tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": 32, "num_attention_heads": 2}')
    with pytest.raises(Stop, match=f"no weights for --model {tmp_path}"):
        model_of(settings_for("imdb", model=str(tmp_path), init="pretrained", sequence=8))
