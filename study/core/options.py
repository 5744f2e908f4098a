"""Reads options from the command line with tyro. A mistake in them is one sentence, as everywhere else."""

import contextlib
import difflib
import itertools
import re
from collections.abc import Callable

import tyro
from tyro import _errors as mistakes  # private, as below: pyproject.toml says with which versions it was tried
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from study.core.arms import all_paths
from study.core.errors import LONGEST_NAME, BadOption, Stop
from study.core.files import beside
from study.core.text import say, wrapped

OPTIONS = ConstructorRegistry()
tyro._experimental_options["utf8_boxes"] = False  # boxes make a help a third longer
UNITS = {"": 1, "k": 1024, "m": 1e6, "b": 1e9}  # 8k tokens are 8192, and a model of 7B has 7e9 parameters
LIKE = 0.7  # similarity of a misspelt option: `bla` is to `all` 0.67
MOST = 1e15  # more is a typing error
OPTION = r"(?<![\w-])--[a-z][a-z0-9-]*"
# By a word that people type in place of an option: answers. The first one counts of which a command takes each option.
MEANT = beside(__file__, "meant.toml")


def parsed(command: Callable, *config, **options):
    """Call a command, or build a dataclass, with the options of the command line. Raise Stop for a mistake in them.

    The help shows `--gpu STR` where None is the default.
    """
    words = list(itertools.takewhile(lambda word: word != "--", options.get("args") or ()))
    config = (tyro.conf.DisallowNone, *config)

    def usage() -> str:
        return tyro.extras.get_parser(command, prog=options.get("prog"), registry=OPTIONS, config=config).format_help()

    def refuse(event: mistakes.ParseErrorEvent) -> None:
        if stop := _mistake(event, words, {*re.findall(OPTION, usage())}):
            raise BadOption(stop.what, stop.remedy)

    if {"-h", "--help"} & {*words}:
        say(*on_one_screen(usage()))
        raise SystemExit(0)
    with mistakes.on_parse_error(refuse):
        return tyro.cli(command, config=config, registry=OPTIONS, **options)


def _mistake(event: mistakes.ParseErrorEvent, words: list[str], known: set[str]) -> Stop | None:
    """Return what is wrong in words of a command that takes these options. None: tyro says it."""
    remedy = f"{event.prog} --help explains the options"
    for place, word in enumerate(words):  # what else is wrong may follow from that
        if word.startswith("--") and word.partition("=")[0].replace("_", "-") not in known:
            return _unknown(event.prog, word, words[place + 1 :], known, remedy)
    match event:
        case mistakes.UnrecognizedArgs(tokens=[word, *following]):
            return _unknown(event.prog, word, following, known, remedy)
        case mistakes.MissingArgs(missing_arguments=[missing, *_]):
            return Stop(f"{event.prog} needs {_name(missing.arg)}", remedy)
        case mistakes.InvalidChoice(argument=argument) | mistakes.BadValue(argument=argument) if _choices(argument):
            return Stop(f"{_name(argument)} must be one of {', '.join(_choices(argument))}", remedy)
        case mistakes.BadValue(argument=argument):
            return Stop(f"{_name(argument)} must have a value", remedy)
        case mistakes.InstantiationFailure(argument=argument, message=message) if argument:
            return Stop(f"{_name(argument)} {message[message.find('must') :]}", remedy)
    return None


def _unknown(prog: str, word: str, following: list[str], known: set[str], remedy: str) -> Stop:
    """Return the mistake of a word that a command does not take, with what was meant."""
    typed, _, value = word.partition("=")
    name = typed.replace("_", "-")
    if not word.startswith("-") and word.endswith((".json", ".yaml", ".yml")):
        if "--config" in known:
            return Stop(f"{prog} takes no {word:.80}", f"give it as --config {word:.80}")
        name = "--config"
    answers = [each.replace("{}", value or " ".join(following[:1])) for each in MEANT.get(name, ())]
    answers = [each for each in answers if known.issuperset(re.findall(OPTION, each))]
    answers = [each for each in answers if all_paths().keys() >= {*re.findall(r"--arm (\w+)", each)}]
    if word in all_paths() and "--arm" in known:
        answers = [f"did you mean '--arm {word}'?"]
    answers.append(_nearest_option(name, known) or remedy)
    return Stop(f"{prog} takes no {word:.80}", answers[0])


def _nearest_option(typed: str, known: set[str]) -> str:
    """Return a question about the option that was meant; empty if none is like it. The dashes are like any option's."""
    name = typed.strip("-").lower()
    bare = {each.strip("-"): each for each in sorted(known, key=len)}
    begun = [each for each in bare if len(name) > 2 and (each.startswith(name) or name.startswith(f"{each}-"))]
    close = begun or difflib.get_close_matches(name[:LONGEST_NAME], bare, 1, LIKE)
    return f"did you mean {bare[close[0]]!r}?" if close else ""


def on_one_screen(text: str) -> list[str]:
    """Return tyro's help with a short title for each group, and without defaults that say nothing."""
    text = re.sub(r"\x1b\[[\d;]*m", "", text)
    text = re.sub(r"\(default:\s*(?:None|False|'')?\)", "", text)
    text = text.replace("  [[STR [STR ...]]]", "  [TEXT|FILE ...]  ").replace("[[STR [STR ...]]]", "[TEXT|FILE ...]")
    lines: list[str] = []
    for line in _joined(text.replace(" Example: `", "\nExample: `").splitlines()):
        if re.fullmatch(" -+ *", line):
            lines[-1] = f"{lines[-1].strip().removesuffix(' options').capitalize()}:"
        elif re.fullmatch("  -+", line):
            lines.pop()  # the head of a group says what its title does
        elif line.startswith((" ", "Example: ")):
            lines.append(line.rstrip())
        else:
            lines += wrapped(line, "", "")
    description = lines.index("Positional arguments:" if "Positional arguments:" in lines else "Options:")
    return [*lines[:description], *filter(None, lines[description:])]


def _joined(lines: list[str]) -> list[str]:
    """Return lines with those of a paragraph in one. tyro ends one before each that begins with an option."""
    paragraphs: list[str] = []
    before = ""
    for line in lines:
        if before and line and not before.startswith((" ", "usage: ")) and not line.startswith((" ", "Example: ")):
            paragraphs[-1] += f" {line}"
        else:
            paragraphs.append(line)
        before = line
    return paragraphs


def _choices(argument) -> list[str]:
    """Return the values that an option may have, sorted; none if it takes any."""
    return sorted({*(argument.lowered.choices or ())} - {"None"})


def _name(argument) -> str:
    return argument.lowered.name_or_flags[-1]


@OPTIONS.primitive_rule
def number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Read numbers as people write them: 8k, 7B, 1e9."""
    kind = info.type
    if kind not in (int, float):
        return None

    def read(words: list[str]) -> float:
        digits, unit, _ = re.split("([kmb]?)$", words[0].lower(), maxsplit=1)
        with contextlib.suppress(ValueError):
            value = float(digits) * UNITS[unit]
            if abs(value) <= MOST and kind(value) == value:  # not of nan, nor of inf
                return kind(value)
        raise ValueError(
            f"must be a {'whole ' if kind is int else ''}number up to 1e15, such as 8, 8k or 7B (got {words[0]!r:.80})"
        )

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )
