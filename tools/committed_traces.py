"""Writes `study/predict/trace/committed.zip`: traces small models of families, and built-in shapes, and finds terms.

python tools/committed_traces.py FOLDER

Each member is kept in the folder. Those that are not there yet are traced, which takes hours. Each number is fitted to
a few samples as an exact sum of at most three terms for each of two numbers of rows. What has no such sum is left out,
and is traced when it is asked for. A model of a family with many layers repeats its third, so the fourth has to do the
same.
"""

import argparse
import functools
import itertools
import json
import random
import sys
import zipfile
from collections.abc import Iterable
from math import prod
from pathlib import Path

import numpy

from study.core.shapes import NO_FUSED_ATTENTION, SHAPES, config_of
from study.predict.trace import committed, tracing
from study.predict.trace.options import TraceOptions
from study.predict.trace.sections import MarkingRecorder, TapeSection, cut, repeats
from study.predict.trace.tape import Tape
from study.predict.trace.transformer import Transformer

MOST_TERMS = 3
# The products of dimensions in which sizes are sums, beside 1. t stands for the tokens of a row.
TERMS = {
    "bert": "h f a w v p hh hf hv hp t th tf ta tv thh thf thv tw tt tta tth",
    "gpt2": "h f a w v p hh hf hv hp t th tf ta tv thh thf thv tw tt tta tth",
    "llama": "h f a g w aw gw v p haw hgw hf hv t th tf ta tg tw taw tgw tv thaw thgw thf thv tt tta ttaw",
    None: "t tt",
}
OF_ADAPTERS = "k hk fk tk thk tfk awk gwk tawk tgwk"  # the sizes of their matrices, and of what these compute
PRECISIONS = ("bf16_cast", "bf16_gathered", "bf16", "fp32")
ALL_PRECISIONS = ("gptj", "gpt_neox", "gemma2")  # as these have always been known without torch, and runs need a CPU's
WINDOWS = ("deberta-v2-xlarge", "vit-giant")  # shapes that only windows on a GPU train: traced when they are asked for
SAMPLES = 5
ROWS = ((1,), (2, 3))
MANY = committed.MANY_LAYERS


def all_options(
    attention: str, cuda: bool, precisions: tuple[str, ...], both_linears: bool = True
) -> list[TraceOptions]:
    """Return the passes that commands ask for, of one token."""
    options = []
    for precision, checkpointing in itertools.product(precisions, (False, True)):
        linears = (False, True) if both_linears and precision != "bf16_gathered" else (False,)
        options += [TraceOptions(1, precision, attention, checkpointing, "whole", linear, cuda) for linear in linears]
    return options


def with_adapters(quantized_bits: tuple[int, ...] = (0, 4)) -> list[TraceOptions]:
    """Return the passes of adapters, also beside 4 bits: under autocast, and in 16 bits as DeepSpeed and FSDP2."""
    options = []
    for checkpointing, bits in itertools.product((True, False), quantized_bits):
        plain = TraceOptions(1, "bf16_cast", "sdpa", checkpointing, cuda=True, quantized_bits=bits)
        options += [plain, plain._replace(zero3_linear=True), plain._replace(precision="bf16", frozen="bf16")]
    return options


class Source:
    """The models from which a member is fitted."""

    def __init__(self, config: dict, dropout: float | None, options: list[TraceOptions], rank: int | None = None):
        self.config = config
        self.dropout = dropout
        self.options = options
        self.rank = rank  # of adapters at each linear layer
        self.member = Transformer.of(config, "", dropout=dropout, lora_rank=rank).member
        self.name = self.member.name
        self.family = config["model_type"] if self.member.layers else None
        terms = TERMS.get(self.family, TERMS["llama"])
        if rank:
            terms += f" {OF_ADAPTERS}"
        self.plain_terms = ["", *terms.split()]
        self.terms = self.plain_terms + [f"r{term}" for term in self.plain_terms]
        self.entries: dict[str, int] = {}
        self.sums: dict[tuple[int, ...], int] = {}
        self.sections: dict[tuple[tuple[int, ...], ...], int] = {}

    @functools.cached_property
    def samples(self) -> list[tuple[Transformer, dict[str, int]]]:
        """Models, and the values of the letters of the terms."""
        chance = random.Random(29)
        if self.family:
            return [self.sample(chance) for _ in range(SAMPLES)]
        model = Transformer.of(self.config, self.name, dropout=self.dropout)
        most = tracing.look(model).limit or 2048
        return [(model, {"t": min(most, tokens)}) for tokens in (24, 56, 104, 2048)]

    def sample(self, chance: random.Random) -> tuple[Transformer, dict[str, int]]:
        """Return a model of the family whose dimensions are drawn."""
        drawn = {letter: chance.randrange(50, 900) for letter in "fv"}
        drawn |= {"t": chance.randrange(17, 90), "p": chance.randrange(100, 400), "w": 8 * chance.randrange(2, 7)}
        sharing = committed.sharing(self.member.dimensions)
        groups = 1 if sharing == "one" else chance.randrange(2, 6)
        heads = groups * chance.randrange(2, 5) if sharing else groups
        drawn |= {"a": heads, "g": groups, "h": heads * drawn["w"]}
        if "g" in self.member.dimensions:  # a Llama: the width of its heads is a number of its own
            drawn["h"] = heads * chance.randrange(9, 60)
        names = committed.DIMENSIONS[self.config["model_type"]]
        sizes = {name: drawn[letter] for letter, name in names.items() if letter != "layers"}
        config = self.config | sizes | {"pad_token_id": 0}
        if self.rank:  # not of the same chance: the other numbers stay those of the model without adapters
            drawn["k"] = random.Random(drawn["t"]).randrange(3, 40)
        return Transformer.of(config, self.name, dropout=self.dropout, lora_rank=drawn.get("k")), drawn

    def write(self) -> dict:
        """Trace all passes, and return the member."""
        passes: dict[str, list] = {}
        for options in self.options:
            try:
                passes |= {committed.key(options, rows[0]): self._pass(options, rows) for rows in ROWS}
            except NoSum as error:
                sys.stderr.write(f"{self.name} {options[1:]}: {error}\n")
        look = self._look()
        entries = [json.loads(entry) for entry in self.entries]
        found = {"terms": self.terms, "sums": [*self.sums], "entries": entries, "sections": [*self.sections]}
        return found | {"look": look, "passes": passes}

    def _look(self) -> list:
        looks = [tracing.look(model) for model, _ in self.samples]
        first = looks[0]
        if self.family is None:
            return _as_in_the_file(first)
        tensors = []
        for (name, shape, block, trains), *others in zip(*(look.tensors for look in looks), strict=True):
            if block in ("embeddings", "layer.0", "head"):
                sizes = zip(shape, *(other[1] for other in others), strict=True)
                tensors.append([name, [*map(self._sum, sizes)], block, trains])
        look = first._asdict() | {"tensors": tensors}
        for name in ("buffers_bytes", "limit", "vocabulary"):
            look[name] = self._sum(tuple(getattr(each, name) for each in looks))
        return _as_in_the_file(look.values())

    def _pass(self, options: TraceOptions, rows: tuple[int, ...]) -> list[tuple[str, int, int]]:
        """Return the plan of a pass: of each section its name, its layer and its number in the file.

        Each of its numbers is fitted to all samples with these numbers of rows.
        """
        tapes: list[Tape] = []
        for model, drawn in self.samples:
            tapes += tracing.whole(model, options._replace(sequence=drawn["t"]), rows, MarkingRecorder)
        divided = [cut(tape) for tape in tapes]
        if any(len(sections) != len(divided[0]) for sections in divided):
            raise NoSum("the samples do other operations")
        if self.family and not all(map(repeats, divided)):
            raise NoSum("two layers in the middle do other operations")
        return [(same[0].name, same[0].layer, self._section(same)) for same in zip(*divided, strict=True)]

    def _section(self, same: tuple[TapeSection, ...]) -> int:
        """Return the number of a section that all samples have."""
        skeletons, sizes = zip(*(zip(*map(_without_sizes, each.entries), strict=True) for each in same), strict=True)
        if any(skeleton != skeletons[0] for skeleton in skeletons):
            raise NoSum("the samples do other operations")
        stored = []
        for skeleton, *of_samples in zip(skeletons[0], *sizes, strict=True):
            number = self.entries.setdefault(json.dumps(skeleton), len(self.entries))
            stored.append((number, *map(self._sum, zip(*of_samples, strict=True))))
        return self.sections.setdefault(tuple(stored), len(self.sections))

    def _sum(self, numbers: tuple[int, ...]) -> int:
        """Return the number of a sum that gives these numbers.

        There is one for each sample; or there are two, of which the second has one row more.
        """
        counts = len(numbers) // len(self.samples)
        first, second = (self._fitted(numbers[place::counts]) for place in (0, counts - 1))
        factors = dict(first)
        for place in {**first, **second}:
            if more := second.get(place, 0) - first.get(place, 0):
                factors[len(self.plain_terms) + place] = more
        pairs = [(factor, place) for place, factor in factors.items()]
        return self.sums.setdefault(tuple(itertools.chain(*pairs)), len(self.sums))

    @functools.cache  # noqa: B019 a process has few sources
    def _fitted(self, numbers: tuple[int, ...]) -> dict[int, int]:
        """Return the factors of the fewest terms whose sum is a number, on all samples, by the terms' places."""
        if not any(numbers):
            return {}
        for count in range(1, min(MOST_TERMS, len(self.plain_terms)) + 1):
            chosen, matrices, inverses = self._combinations(count)
            factors = numpy.rint(inverses @ numbers).astype(int)
            sums = numpy.einsum("cst,ct->cs", matrices, factors)
            for place in numpy.flatnonzero((sums == numbers).all(axis=1)):
                return dict(zip(chosen[place].tolist(), factors[place].tolist(), strict=True))
        raise NoSum(f"{numbers} is no sum of {MOST_TERMS} terms")

    @functools.cache  # noqa: B019
    def _combinations(self, count: int) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
        """Return the places of so many terms, their values on the samples, and the inverses of these."""
        chosen = numpy.array([*itertools.combinations(range(len(self.plain_terms)), count)])
        matrices = self._table[:, chosen].transpose(1, 0, 2)  # combinations, samples, terms
        return chosen, matrices, numpy.linalg.pinv(matrices)

    @functools.cached_property
    def _table(self) -> numpy.ndarray:
        """The terms' values on each sample."""
        rows = [[prod(values[letter] for letter in term) for term in self.plain_terms] for _, values in self.samples]
        return numpy.array(rows)


def _as_in_the_file(look: Iterable) -> list:
    """Return a look with an empty place between the limit and the vocabulary, and without what all members can."""
    *others, vocabulary, _ = look
    return [*others, None, vocabulary]


def _without_sizes(entry: tuple) -> tuple[list, list[int]]:
    """Divide an entry as `committed` joins it."""
    kind, *rest = entry
    if kind in ("freed", "gradient"):
        return [*entry], []
    if kind == "made":
        size, in_backward = rest
        return [kind, in_backward], [size]
    if kind == "kernel":
        what, flops = rest
        name, sizes = what or (None, ())
        return [kind, name], [*sizes, flops]
    return [*entry[:-1]], [entry[-1]]


class NoSum(Exception):
    """A number that is no sum of terms."""


def sources() -> list[Source]:
    """Return all members, the most useful first."""
    gpt2 = config_of("gpt2") | {"n_layer": MANY}
    bert = config_of("bert-base") | {"num_hidden_layers": MANY}
    llama = config_of("llama3-8b") | {"num_hidden_layers": MANY, "head_dim": 128}
    gpu, cpu = (all_options("sdpa", cuda, PRECISIONS) for cuda in (True, False))
    eager = all_options("eager", True, ("bf16_cast", "bf16", "fp32"), both_linears=False)
    gelu = {"activation_function": "gelu"}
    tied = {"tie_word_embeddings": True}
    same_heads = {"num_key_value_heads": 32}
    members = [
        Source(llama, None, gpu),
        Source(gpt2, None, gpu + eager + cpu),
        Source(bert, None, gpu + eager + cpu),
        Source(gpt2 | {"n_layer": 2}, None, gpu + cpu),
        Source(bert | {"num_hidden_layers": 2}, None, gpu + cpu),
        Source(bert | {"num_hidden_layers": 2}, 0.0, all_options("sdpa", False, ("fp32",))),
        Source(gpt2 | gelu, None, eager + gpu[:6]),
        Source(gpt2 | gelu, 0.0, all_options("sdpa", True, ("bf16_gathered",))),
        Source(llama | same_heads, None, gpu),
        # What a rank of as many ranks as groups computes of divided layers.
        Source(
            llama | {"num_key_value_heads": 1},
            None,
            all_options("sdpa", True, PRECISIONS[:1], both_linears=False),
        ),
        Source(llama | tied, None, gpu),
        Source(llama | tied | same_heads, None, gpu),
    ]
    qwens = [config_of(name) | {"num_hidden_layers": MANY} for name in ("qwen2.5-7b", "qwen3-8b")]
    qwens += [qwen | tied for qwen in qwens]  # those of up to 4 billion parameters
    members += [Source(qwen, None, gpu) for qwen in qwens]
    for config in (llama, llama | same_heads, llama | tied, *qwens):
        members.append(Source(config, None, with_adapters(), rank=8))
    members.append(Source(gpt2, None, with_adapters((0,)), rank=8))
    for name in SHAPES:
        config = config_of(name)
        # Those are traced in seconds, or of a family.
        if name in WINDOWS or name.endswith("-micro") or committed.member(config, None).layers:
            continue
        family = config["model_type"]
        attention = "eager" if family in NO_FUSED_ATTENTION else "sdpa"
        options = all_options(attention, True, PRECISIONS[:2])
        if family in ALL_PRECISIONS:
            options = all_options(attention, True, PRECISIONS) + all_options(attention, False, PRECISIONS[:1])
        members.append(Source(config, None, options))
    return members


def main(folder: Path) -> None:
    """Trace the members that a folder lacks, and write all, and the versions of the packages, into the file."""
    for source in sources():
        path = folder / source.name
        if not path.exists():
            content = source.write()
            path.write_text(json.dumps(content, separators=(",", ":")))
            sys.stderr.write(f"{source.name}: {len(content['passes'])} passes\n")
    members = {path.name: path.read_text() for path in sorted(folder.iterdir())}
    members["versions"] = json.dumps(committed.installed())
    with zipfile.ZipFile(committed.PATH, "w", zipfile.ZIP_LZMA) as archive:
        for name, text in members.items():
            archive.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_LZMA)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
