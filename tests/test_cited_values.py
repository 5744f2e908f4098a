"""What a claim cites stands in the sentence that it cites: the number, in any unit, or the word."""

import itertools
import re
from collections.abc import Iterator

from study.ledger import files
from study.ledger.model import Check

NUMBER = re.compile(r"(\d+(?:,\d{3})*(?:\.\d+)?)\s?(%|[kKMBT]\b|[mbtr]+illion\b)?")
FACTORS = {"%": 0.01, "k": 1e3, "M": 1e6, "m": 1e6, "B": 1e9, "b": 1e9, "T": 1e12, "t": 1e12, "K": 1e3}
WORDS = {"half": 0.5, "one": 1, "two": 2, "twice": 2, "doubles": 2, "three": 3, "four": 4, "Pos+g": 2}
READ_OFF = "figure"  # a value that was read off a drawing stands beside the place, because the caption does not have it
WITHIN = 0.007  # a ratio of two printed numbers, rounded to two or three digits


def numbers(text: str) -> Iterator[float]:
    """Each number as it stands, and with its unit."""
    for digits, unit in NUMBER.findall(text):
        number = float(digits.replace(",", ""))
        yield from (number, number * FACTORS.get(unit[:1], 1))
    yield from (number for word, number in WORDS.items() if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text))


def stands_in(value: object, sentence: str, where: str) -> bool:
    if isinstance(value, str):
        words = [word for word in re.findall(r"[\w-]+", value.lower()) if len(word) > 2]
        return any(re.search(rf"\b{re.escape(word.removesuffix('s'))}", sentence.lower()) for word in words)
    printed = [*numbers(sentence)]
    if READ_OFF in where:
        read_off = [*printed, *numbers(where)]
        printed = read_off + [a / b for a, b in itertools.permutations(read_off, 2) if b]
    as_shares = [number * 100 for number in printed]  # 26 of 125 are 20.8 %
    return any(abs(number - value) <= WITHIN * abs(value) for number in [*printed, *as_shares])


def cited() -> list[tuple[str, Check]]:
    """The checks of the whole ledger that cite a value."""
    claims = files.read_all()
    checks = [(claim.id, check) for claim in claims for check in (*claim.checks, claim.until_tested) if check]
    return [(name, each) for name, each in checks if each.check == "cited" and each.arguments.get("value") is not None]


def test_a_cited_value_stands_in_the_cited_sentence():
    found = cited()
    assert len(found) >= 30
    wrong = {
        name: (given["value"], given["sentence"], given["where"])
        for name, check in found
        if not stands_in((given := check.arguments)["value"], given["sentence"], given["where"])
    }
    assert wrong == {}
