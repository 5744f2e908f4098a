"""How options are read from the command line: tyro, with help and errors for people who do not know Python's types."""

import re
import typing
from collections.abc import Callable
from types import NoneType

import docstring_parser
import tyro
from tyro import _errors as parsing
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from study.errors import Stop
from study.spec.validation import nearest

OPTIONS = ConstructorRegistry()
NUMBERS = {int: ("INT", "a whole number"), float: ("FLOAT", "a number")}


def parsed(command: Callable, **options):
    """What tyro makes of the command line. A mistake in it is a Stop, of the same form as every other."""

    def refuse(event: parsing.ParseErrorEvent) -> None:
        """Kinds that are not here, tyro tells in its own way."""
        more = f"{event.prog} --help explains the options"
        match event:
            case parsing.MissingArgs(unrecognized_tokens=[], missing_arguments=missing):
                raise _missing(event.prog, missing[0].arg)
            case parsing.MissingArgs(unrecognized_tokens=[word, *_]) | parsing.UnrecognizedArgs(tokens=[word, *_]):
                raise _not_known(event.prog, word.partition("=")[0], command)
            case parsing.BadValue(argument=argument, reason="too_few_values"):
                raise Stop(f"{_flag(argument)} is given without a value", more)
            case parsing.InvalidChoice(argument=argument, value=value, choices=choices):
                raise Stop(f"{_flag(argument) or event.prog} cannot be {value!r}", nearest(value, choices))
            case parsing.InstantiationFailure(argument=argument, message=message) if argument is not None:
                raise Stop(f"{_flag(argument) or event.prog}: {message}", more)

    with parsing.on_parse_error(refuse):
        return tyro.cli(command, registry=OPTIONS, **options)


def _missing(prog: str, argument) -> Stop:
    if argument.lowered.choices:
        words = f"one of {', '.join(argument.lowered.choices)}"
    else:
        words = " ".join(str(argument.field.helptext or f"{prog} --help explains it").split()).removesuffix(".")
    return Stop(f"{prog} needs {_flag(argument) or 'one more word'}", f"give {words[0].lower()}{words[1:]}")


def _not_known(prog: str, word: str, command: Callable) -> Stop:
    """The known options are those that the help shows."""
    if not word.startswith("--"):
        return Stop(f"{prog} takes no {word!r}", f"leave it out, or see {prog} --help")
    usage = tyro.extras.get_parser(command, registry=OPTIONS).format_help()
    options = re.findall(r"(?<![\w-])--[a-z][a-z-]*", usage)
    return Stop(f"{prog} has no option {word}", nearest(word, options, otherwise=f"{prog} --help explains the options"))


def _flag(argument) -> str:
    """Nothing for a word that has none."""
    return "" if argument.is_positional() else argument.lowered.name_or_flags[0]


def with_plain_help(options: type) -> type:
    """A class whose attributes have docstrings of several lines, with these where tyro joins their lines.

    tyro 1.0 looks for lines that go on before it takes their indentation away, and breaks each where it was broken.
    """
    said = docstring_parser.parse_from_object(options).params
    lines = [f"    {each.arg_name}: {' '.join((each.description or '').split())}" for each in said]
    options.__doc__ = "\n".join([(options.__doc__ or "").partition("\n\nArgs:")[0], "", "Args:", *lines])
    return options


@OPTIONS.primitive_rule
def optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """`--gpu STR`, where tyro says `--gpu {None}|STR`. Who wants None leaves the option out."""
    members = typing.get_args(info.type)
    if NoneType not in members:
        return None
    rest = typing.Union[tuple(member for member in members if member is not NoneType)]  # noqa: UP007 (not an annotation)
    given = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(rest, info.markers))
    if not isinstance(given, PrimitiveConstructorSpec):
        return None
    return PrimitiveConstructorSpec(
        nargs=given.nargs,
        metavar=given.metavar,
        instance_from_str=given.instance_from_str,
        is_instance=lambda value: value is None or given.is_instance(value),
        str_from_instance=lambda value: ["none"] if value is None else given.str_from_instance(value),
        choices=given.choices,
    )


@OPTIONS.primitive_rule
def number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """A number; the message for anything else says what was expected."""
    if info.type not in NUMBERS:
        return None
    metavar, _ = NUMBERS[info.type]
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=_reader(info.type),
        is_instance=lambda value: isinstance(value, int | info.type) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )


def _reader(kind: type) -> Callable[[list[str]], float]:
    def read(words: list[str]) -> float:
        try:
            return kind(words[0])
        except ValueError:
            raise ValueError(f"expected {NUMBERS[kind][1]} (got {words[0]!r})") from None

    return read
