"""Small trainings, each broken as people break them in the field, or healthy: field.py FOLDER NAME ..."""

import copy
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from study.watch import WatchCallback, watch

STEPS = 16
WIDTH = 16
CLASSES = 4
LENGTH = 16  # of a sequence
WORDS = 40  # of a vocabulary
PAD, BOS, EOS = 0, 1, 2
FIRST = 3  # word


def made(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sequences(rows: int, length: int = LENGTH) -> torch.Tensor:
    """Return sequences that can be learned: each word is a few after the one before."""
    first = torch.randint(FIRST, WORDS, (rows, 1), generator=made())
    pace = torch.randint(1, 4, (rows, 1), generator=made(2))
    return FIRST + (first - FIRST + pace * torch.arange(length)) % (WORDS - FIRST)


def gpt2(**changes) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    special = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    sizes = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | special | changes))


def bert(kind=transformers.BertForSequenceClassification, **changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    sizes |= {"vocab_size": WORDS, "pad_token_id": PAD, "num_labels": CLASSES}
    return kind(transformers.BertConfig(**sizes | changes))


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    numbers = {word: number for number, word in enumerate([*special.values(), *map(str, range(FIRST, WORDS))])}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


# --- with a Trainer: model, rows, and what else it is given


class Sorted(transformers.Trainer):
    def _get_train_sampler(self, *_, **__):
        return SequentialSampler(self.train_dataset)


def classified(rows: int) -> list[dict]:
    return [{"input_ids": each, "labels": int(each[1] % CLASSES)} for each in sequences(rows)]


def texts(rows: int) -> list[list[int]]:
    """Return texts of unequal lengths, each with its end."""
    lengths = torch.randint(4, LENGTH, (rows,), generator=made(3)).tolist()
    return [[*each[:length].tolist(), EOS] for each, length in zip(sequences(rows), lengths, strict=True)]


def padded(rows: list[dict], left: bool = False, mask: bool = True, labels: int = -100) -> dict[str, torch.Tensor]:
    """Return a batch of rows of unequal lengths, padded to the longest."""
    longest = max(len(row["input_ids"]) for row in rows)

    def column(name: str, fill: int) -> torch.Tensor:
        fills = [[fill] * (longest - len(row["input_ids"])) for row in rows]
        return torch.tensor([f + row[name] if left else row[name] + f for row, f in zip(rows, fills, strict=True)])

    batch = {"input_ids": column("input_ids", PAD), "labels": column("labels", labels)}
    if mask:
        batch["attention_mask"] = (batch["input_ids"] != PAD).long()
    return batch


def of_texts(rows: int) -> list[dict]:
    return [{"input_ids": each, "labels": each} for each in texts(rows)]


def no_mask() -> dict:
    """The collator pads on the left, and gives no attention_mask."""
    return {"model": gpt2(), "rows": of_texts(STEPS * 4), "collate": lambda rows: padded(rows, left=True, mask=False)}


def eval_is_train() -> dict:
    rows = classified(STEPS * 4)
    return {"model": bert(), "rows": rows, "eval_dataset": rows, "eval_strategy": "steps", "eval_steps": 10}


def sorted_rows() -> dict:
    return {"model": bert(), "rows": sorted(classified(STEPS * 4), key=lambda row: row["labels"]), "kind": Sorted}


def end_ignored() -> dict:
    """The padding is the end of a text, so the collator ignores both."""
    words = tokenizer()
    words.pad_token = words.eos_token
    collate = transformers.DataCollatorForLanguageModeling(words, mlm=False)
    rows = [{"input_ids": each} for each in texts(STEPS * 4)]
    return {"model": gpt2(pad_token_id=EOS), "rows": rows, "collate": collate}


def warmup_never_ends() -> dict:
    return {"model": bert(), "rows": classified(STEPS * 4), "warmup_steps": 500}


# --- what outsiders broke


def all_ignored() -> dict:
    return {"model": gpt2(), "rows": [row | {"labels": [-100] * len(row["input_ids"])} for row in whole()]}


def shifted_twice() -> dict:
    rows = [row | {"labels": [*row["input_ids"][1:], -100]} for row in whole()]
    return {"model": gpt2(), "rows": rows}


def whole(rows: int = STEPS * 4) -> list[dict]:
    return [{"input_ids": each, "labels": each} for each in sequences(rows).tolist()]


def padding_learned() -> dict:
    return {"model": gpt2(), "rows": of_texts(STEPS * 4), "collate": lambda rows: padded(rows, labels=PAD)}


def frozen_head() -> dict:
    model = bert()
    model.classifier.requires_grad_(False)
    return {"model": model, "rows": classified(STEPS * 4)}


class Softmax(transformers.BertForSequenceClassification):
    def __init__(self, config):
        super().__init__(config)
        self.classifier = torch.nn.Sequential(self.classifier, torch.nn.Softmax(-1))


def softmax_first() -> dict:
    return {"model": bert(Softmax), "rows": classified(STEPS * 4)}


def not_masked() -> dict:
    return {"model": bert(transformers.BertForMaskedLM), "rows": whole()}


def cut_answers() -> dict:
    """Of a third of the rows nothing is left of the answer."""
    rows = of_texts(STEPS * 4)
    for number, row in enumerate(rows):
        count = len(row["input_ids"])
        row["labels"] = [-100] * count if number % 3 == 0 else [-100] * 2 + row["input_ids"][2:]
    return {"model": gpt2(), "rows": rows, "collate": padded}


def frozen_score() -> dict:
    """Adapters for a classifier, without `task_type`: the new head stays as it began."""
    return {"model": adapted(bert()), "rows": classified(STEPS * 4)}


class WithoutRate(transformers.Trainer):
    def create_optimizer(self, *args):
        head = {id(each) for each in self.model.classifier.parameters()}
        body = [each for each in self.model.parameters() if id(each) not in head]
        self.optimizer = torch.optim.AdamW([{"params": body}], lr=1e-3)
        return self.optimizer


def head_without_rate() -> dict:
    """The head was made after the groups of the optimizer."""
    return {"model": bert(), "rows": classified(STEPS * 4), "kind": WithoutRate}


def adapted(model, **given):
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["query", "c_attn"], **given))


def padded_answers() -> dict:
    """The collator pads the labels of an encoder and a decoder with the token for padding."""
    return {"model": t5(), "rows": of_texts(STEPS * 4), "collate": lambda rows: padded(rows, labels=PAD)}


def tiny_rate() -> dict:
    return {"model": bert(), "rows": classified(STEPS * 4), "learning_rate": 1e-9}


def inverted_mask() -> dict:
    def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
        batch = padded(rows)
        return batch | {"attention_mask": 1 - batch["attention_mask"]}

    return {"model": bert(transformers.BertForTokenClassification), "rows": of_classes(), "collate": collate}


def of_classes() -> list[dict]:
    """Return texts with a class of each token."""
    return [row | {"labels": [each % CLASSES for each in row["input_ids"]]} for row in of_texts(STEPS * 4)]


def unfrozen() -> dict:
    """Somebody unfreezes the embeddings, and hits all."""
    return {"model": adapted(gpt2()).requires_grad_(True), "rows": whole()}


def frozen_adapters() -> dict:
    """Adapters that were loaded to be used, not trained, below a head that somebody unfroze."""
    model = adapted(bert(), task_type="SEQ_CLS")
    model.requires_grad_(False)
    model.base_model.model.classifier.modules_to_save.requires_grad_(True)
    return {"model": model, "rows": classified(STEPS * 4)}


def words_unknown() -> dict:
    """The tokenizer knows half of the words."""
    words = tokenizer()
    words.unk_token = str(WORDS - 1)
    ids = sequences(STEPS * 4)
    ids[ids > WORDS // 2] = WORDS - 1
    rows = [{"input_ids": each, "labels": each} for each in ids.tolist()]
    return {"model": gpt2(), "rows": rows, "words": words}


def places_alike() -> dict:
    return {"model": gpt2(), "rows": [row | {"position_ids": [0] * LENGTH} for row in whole()]}


def decayed() -> dict:
    return {"model": gpt2(), "rows": whole(), "weight_decay": 100.0}


def clipped_away() -> dict:
    return {"model": gpt2(), "rows": whole(), "optim": "sgd", "max_grad_norm": 1e-4, "learning_rate": 0.1}


# --- healthy ones


def healthy_lm() -> dict:
    """Padded on the right and on the left, with a mask."""
    return {
        "model": gpt2(),
        "rows": of_texts(STEPS * 4),
        "collate": lambda rows: padded(rows, left=len(rows[0]["labels"]) % 2 == 0),
    }


def healthy_masked() -> dict:
    """15 % of the tokens are predicted, and the labels of 85 % are -100."""
    words = tokenizer()
    words.add_special_tokens({"mask_token": "<3>"})
    collate = transformers.DataCollatorForLanguageModeling(words, mlm_probability=0.15)
    rows = [{"input_ids": each} for each in sequences(STEPS * 4).tolist()]
    model = bert(transformers.BertForMaskedLM, vocab_size=WORDS + 1)
    return {"model": model, "rows": rows, "collate": collate}


def healthy_answers() -> dict:
    """The labels of the question are -100, and it has an end of its own."""
    rows = [{"input_ids": [5, 6, EOS, *each], "labels": [-100] * 3 + each} for each in texts(STEPS * 4)]
    return {"model": gpt2(), "rows": rows, "collate": padded}


def healthy_packed() -> dict:
    """Texts in one row after the other, whose positions begin anew."""
    stream = [word for text in texts(STEPS * 12) for word in text]
    rows = [{"input_ids": (row := stream[20 * number :][:20]), "labels": row} for number in range(STEPS * 4)]
    for row in rows:
        ends = [0, *(place + 1 for place, each in enumerate(row["input_ids"][:-1]) if each == EOS)]
        row["position_ids"] = [place - max(end for end in ends if end <= place) for place in range(20)]
    return {"model": gpt2(), "rows": rows}


def healthy_frozen_body() -> dict:
    """The body was trained before: it has other weights than those that it is made with."""
    model = bert()
    for each in model.bert.parameters():
        each.requires_grad_(False).add_(0.01 * torch.randn(each.shape, generator=made(5)))
    return {"model": model, "rows": classified(STEPS * 4)}


def healthy_adapters() -> dict:
    return {"model": adapted(gpt2()), "rows": whole()}


def healthy_second_adapter() -> dict:
    """A second adapter trains above a first one that stays."""
    import peft

    model = adapted(gpt2())
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["c_attn"]))
    model.set_adapter("second")
    return {"model": model, "rows": whole()}


def healthy_recipe() -> dict:
    """SGD that is clipped far below its norm, with more decay than usual, and places from 1 on."""
    places = list(range(1, LENGTH + 1))
    rows = [row | {"position_ids": places} for row in whole()]
    return {
        "model": gpt2(),
        "rows": rows,
        "optim": "sgd",
        "max_grad_norm": 0.02,
        "learning_rate": 0.3,
        "weight_decay": 0.1,
    }


def healthy_rare_words() -> dict:
    """Some words are unknown, and the token for them pads as well."""
    words = tokenizer()
    words.unk_token = words.pad_token
    return {"model": gpt2(), "rows": of_texts(STEPS * 4), "collate": padded, "words": words}


def healthy_smoothed() -> dict:
    return {"model": gpt2(), "rows": whole(), "label_smoothing_factor": 0.1}


class Distilled(transformers.Trainer):
    teacher = None

    def compute_loss(self, model, inputs, *args, **kwargs):
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.teacher(**inputs).logits.softmax(-1)
        loss = outputs.loss + functional.kl_div(outputs.logits.log_softmax(-1), wanted, reduction="batchmean")
        return (loss, outputs) if kwargs.get("return_outputs") else loss


def healthy_distilled() -> dict:
    Distilled.teacher = bert().eval()
    return {"model": bert(), "rows": classified(STEPS * 4), "kind": Distilled}


def healthy_frozen_words() -> dict:
    """Embeddings are frozen, and so are the last weights that are tied to them."""
    model = gpt2()
    model.transformer.wte.requires_grad_(False)
    return {"model": model, "rows": whole()}


def healthy_rare_class() -> dict:
    """One row in 20 has another class than the others."""
    rows = classified(STEPS * 4)
    return {
        "model": bert(num_labels=2),
        "rows": [row | {"labels": int(number % 20 == 7)} for number, row in enumerate(rows)],
    }


def t5() -> transformers.T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=WORDS, decoder_start_token_id=PAD, **sizes)
    )


def healthy_pair() -> dict:
    """An encoder and a decoder that learn to copy."""
    return {"model": t5(), "rows": of_texts(STEPS * 4), "collate": padded}


def healthy_tokens() -> dict:
    """A class of each token."""
    return {"model": bert(transformers.BertForTokenClassification), "rows": of_classes(), "collate": padded}


def with_trainer(
    folder: Path, model, rows, collate=None, kind=transformers.Trainer, eval_dataset=None, words=None, **given
):
    arguments = {"max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "use_cpu": True}
    arguments |= {"save_strategy": "no", "report_to": [], "disable_tqdm": True} | given
    trainer = kind(
        model,
        transformers.TrainingArguments(str(folder / "out"), **arguments),
        train_dataset=rows,
        eval_dataset=eval_dataset,
        data_collator=collate or transformers.default_data_collator,
        processing_class=words,
        callbacks=[WatchCallback(folder)],
    )
    trainer.train()


def with_trl(folder: Path, name: str) -> None:
    """TRL: texts that begin with two of <bos>, or pairs that are cut so early that they are alike."""
    import datasets
    import trl

    rows = sequences(STEPS * 4).tolist()
    given = {"max_steps": STEPS, "per_device_train_batch_size": 4, "use_cpu": True, "bf16": False}
    given |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-3}
    last = {"callbacks": [WatchCallback(folder)], "processing_class": tokenizer()}
    model = gpt2()
    if name == "pairs_alike":
        data = [
            {
                "prompt": " ".join(map(str, row)),
                "chosen": f" {' '.join(map(str, row[:3]))} 5 6",
                "rejected": f" {' '.join(map(str, row[:3]))} 7",
            }
            for row in rows
        ]
        arguments = trl.DPOConfig(str(folder / "out"), max_length=LENGTH + 3, **given)
        trl.DPOTrainer(model, gpt2(), args=arguments, train_dataset=datasets.Dataset.from_list(data), **last).train()
        return
    start = {"two_starts": [BOS, BOS], "healthy_trl": [BOS]}[name]
    data = [{"input_ids": [*start, *row, EOS]} for row in rows]
    arguments = trl.SFTConfig(str(folder / "out"), max_length=2 * LENGTH, **given)
    trl.SFTTrainer(model, arguments, train_dataset=datasets.Dataset.from_list(data), **last).train()


# --- loops of one's own


class Rows(TensorDataset):
    """Rows whose class is a function of them, and so is a number."""

    def __init__(self, rows: int = STEPS * 8):
        inputs = torch.randn(rows, WIDTH, generator=made())
        results = inputs @ torch.randn(WIDTH, CLASSES, generator=made(2))
        super().__init__(inputs, results.argmax(1), results[:, 0])


def layers(outputs: int = CLASSES) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.ReLU(), torch.nn.Linear(32, outputs))


def log_softmax_of_the_batch(model, inputs, classes, numbers):
    return functional.nll_loss(functional.log_softmax(model(inputs), dim=0), classes)


def broadcast(model, inputs, classes, numbers):
    return functional.mse_loss(model(inputs), numbers)


def softmax_by_hand(model, inputs, classes, numbers):
    return functional.cross_entropy(model(inputs).softmax(1), classes)


def sigmoid_twice(model, inputs, classes, numbers):
    return functional.binary_cross_entropy_with_logits(
        model(inputs).sigmoid(), functional.one_hot(classes, CLASSES).float()
    )


def healthy_regression(model, inputs, classes, numbers):
    return (model(inputs).squeeze(1) - numbers).abs().mean()


def healthy_distances(model, inputs, classes, numbers):
    """Each row is compared with each, on purpose."""
    results = model(inputs)
    return (results.unsqueeze(1) - results.unsqueeze(0)).pow(2).mean() + functional.mse_loss(results, torch.tensor(1.0))


class Words(torch.nn.Module):
    """A language model of one's own: it knows the last two words."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(WORDS, WIDTH, padding_idx=PAD)
        self.last = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        words = self.words(ids)
        return self.last((words + words.roll(1, 1)).relu())


def of_words(folder: Path, name: str) -> None:
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = sequences(STEPS * 8)
    if name == "padding_by_hand":
        ids = ids * (torch.arange(LENGTH) < torch.randint(4, LENGTH, (len(ids), 1), generator=made(4)))
    loader = DataLoader(TensorDataset(ids), 8, shuffle=True)
    ahead = {"shifted_by_hand": 2, "unshifted_by_hand": 0}.get(name, 1)
    with watch(model=model, optimizer=optimizer, run_dir=folder):
        for (batch,) in loader:
            logits = model(batch[:, : LENGTH - ahead])
            functional.cross_entropy(logits.flatten(0, 1), batch[:, ahead:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()


def usual(model, inputs, classes, numbers):
    return functional.cross_entropy(model(inputs), classes)


def by_hand(folder: Path, name: str) -> None:
    model = layers(1 if name in ("broadcast", "healthy_regression", "healthy_distances") else CLASSES)
    if name == "all_zero":
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0.01)
    averaged = copy.deepcopy(layers()) if name == "average_never_updated" else model
    loss_of = globals().get(name, usual)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    epochs = 3 if name in ("not_shuffled", "healthy_epochs") else 1
    loader = DataLoader(Rows(STEPS * 8 // epochs), 8, shuffle=name not in ("not_shuffled",))
    with watch(model=model, optimizer=optimizer, run_dir=folder):
        for _ in range(epochs):
            for batch in loader:
                loss_of(model, *batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            averaged.eval()
            with torch.no_grad():
                averaged(batch[0])
            averaged.train()


WITH_TRAINER = {
    each.__name__: each
    for each in (
        *(no_mask, eval_is_train, sorted_rows, end_ignored, warmup_never_ends),
        *(all_ignored, shifted_twice, padding_learned, frozen_head, softmax_first, not_masked, cut_answers),
        *(frozen_score, head_without_rate, inverted_mask, unfrozen, padded_answers, tiny_rate),
        *(frozen_adapters, words_unknown, healthy_second_adapter, healthy_rare_words),
        *(places_alike, decayed, clipped_away, healthy_recipe),
        *(healthy_lm, healthy_masked, healthy_answers, healthy_packed, healthy_frozen_body, healthy_adapters),
        *(healthy_smoothed, healthy_distilled, healthy_frozen_words, healthy_rare_class, healthy_pair, healthy_tokens),
    )
}
WITH_TRL = ("two_starts", "pairs_alike", "healthy_trl")
OWN = (
    *("log_softmax_of_the_batch", "broadcast", "average_never_updated", "not_shuffled", "all_zero"),
    *("softmax_by_hand", "sigmoid_twice", "shifted_by_hand", "unshifted_by_hand", "padding_by_hand"),
    *("healthy_epochs", "healthy_words", "healthy_regression", "healthy_distances"),
)


def train(folder: Path, name: str) -> None:
    torch.set_num_threads(1)  # two would wait for each other
    if name in WITH_TRAINER:
        with_trainer(folder, **WITH_TRAINER[name]())
    elif name in WITH_TRL:
        with_trl(folder, name)
    elif "words" in name or name.endswith(("shifted_by_hand", "padding_by_hand")):
        of_words(folder, name)
    else:
        by_hand(folder, name)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        train(Path(sys.argv[1]) / name, name)
