"""`study conform`: hold ways of sharding to one process, on the same weights and data, with the same arithmetic."""

import functools
import importlib.util
import sys
import tempfile
from pathlib import Path

import tyro

from study.conform import output, scripts
from study.conform.properties import Property, read
from study.conform.suite import ADAPTERS, Adapter, Ranks, Result, run
from study.errors import Stop
from study.io.tables import say, say_wrapped, show
from study.io.validation import nearest
from study.machine.operators import provide_libaio
from study.machine.software import put_programs_on_path
from study.spec.options import AsJson


def conform(
    names: tyro.conf.Positional[tuple[str, ...]] = (),
    /,
    *,
    adapter: Path | None = None,
    only: str = "",
    overlay: Path | None = None,
    out: Path | None = None,
    list_properties: bool = False,
    shrink: bool = True,
    as_json: AsJson = False,
) -> dict | None:
    """Is a sharded training equal to one process? Each property is tried on two gloo ranks, some on one or four.

    Without names, the adapters of this study are listed. A property holds, fails, is refused by the library in its
    words, or is not applicable. The exit code is 1 if one fails. Each failure is made smaller, and with --out it is
    written as a script.

    Args:
        names: The adapters of this study to run, or all.
        adapter: Run the adapter in this file instead. It is Python code, and runs with your rights: run only code that
            you trust. It defines build, forward_backward, step, whole_weights, and if it can gradient_norm, save and
            load. examples/toy_adapter.py is one.
        only: Run only properties whose name contains this text.
        overlay: A folder with a release of a library, from pip install --no-deps --target. It is used instead of the
            installed one. Its operators are compiled beside it, once, in a minute.
        out: Write JSON, JUnit XML, a badge, and a script for each failure into this folder.
        list_properties: List the properties and where they come from, and run nothing.
        shrink: Make failures smaller.
        as_json: Print the results as JSON instead of lines.
    """
    if list_properties:
        return _list(as_json)
    chosen = chosen_adapters(names, adapter)
    if not chosen:
        show([{"adapter": each.name, "what": each.about} for each in ADAPTERS.values()])
        return None
    properties = [each for each in read() if only in each.name]
    if not properties:
        raise Stop(f"no property has {only!r} in its name", "study conform --list-properties lists them")
    if overlay and not overlay.is_dir():
        raise Stop(f"{overlay} is not a folder", f"pip install --no-deps --target {overlay} deepspeed==0.18.1")
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError(name="torch")
    put_programs_on_path()
    provide_libaio()
    results: dict[str, list[Result]] = {}
    versions = output.installed() if overlay is None else output.installed() | _in_overlay(overlay)
    tell = _silent if as_json else functools.partial(_tell, versions)
    with tempfile.TemporaryDirectory() as logs:
        for each in chosen:
            say(*([] if as_json else ["", f"{each.name}: {each.about or each.file}"]))
            with Ranks(overlay, Path(logs, "log.txt")) as ranks:
                results[each.name] = run(each, properties, ranks, tell, shrink)
            if out:
                output.write(out, each, results[each.name], versions)
                _write_scripts(out, each, results[each.name], properties, versions)
    fine = not any(result.status == "fails" for every in results.values() for result in every)
    if as_json:
        return {"fine": fine} | {
            name: output.as_json(each, results[name], versions) for each in chosen for name in [each.name]
        }
    _summarize(results)
    sys.exit(0 if fine else 1)


def _summarize(results: dict[str, list[Result]]) -> None:
    say("")
    show(output.rows(results))
    if len(results) > 1:
        say("", "What does not hold everywhere:")
        show(output.matrix(results))


def chosen_adapters(names: tuple[str, ...], file: Path | None) -> list[Adapter]:
    """Return the adapters of these names, or the one in a file."""
    if file is not None:
        if names:
            raise Stop("names and --adapter are given", "give one of them")
        if not file.is_file():
            raise Stop(f"there is no file {file}", "name a Python file with the functions of an adapter")
        return [Adapter(file.stem, str(file.resolve()))]
    if names == ("all",):
        return list(ADAPTERS.values())
    for name in names:
        if name not in ADAPTERS:
            raise Stop(f"{name!r} is not an adapter", nearest(name, ADAPTERS))
    return [ADAPTERS[name] for name in names]


def _list(as_json: bool) -> dict | None:
    rows = [{"property": each.name, "says": each.sentence, "from": each.source} for each in read()]
    if as_json:
        return {"properties": rows}
    show(rows)
    return None


def _silent(result: Result) -> None:
    pass


def _tell(versions: dict[str, str | None], result: Result) -> None:
    say(output.line(result))
    if known := output.explanation(result, output.explanations(), versions):
        say_wrapped(f"{known.kind}: {known.why}", indent=" " * 16, first=" " * 16)


def _in_overlay(folder: Path) -> dict[str, str | None]:
    """Return the versions of the libraries in an overlay."""
    found = (path.name.removesuffix(".dist-info").rpartition("-") for path in folder.glob("*.dist-info"))
    return {name: release for name, _, release in found if name in output.LIBRARIES}


def _write_scripts(
    out: Path, adapter: Adapter, results: list[Result], properties: list[Property], versions: dict
) -> None:
    """Write a script for each failure."""
    by_name = {each.name: each for each in properties}
    for result in results:
        if result.status != "fails":
            continue
        each = by_name[result.property]
        case = each.case | (result.shrunk or {})
        seen = ", ".join(f"{name} {release}" for name, release in versions.items() if release)
        about = f"Expected: {each.sentence[0].lower()}{each.sentence[1:]}. Asked in: {each.source}.\n\n"
        about += f"Seen ({seen}, {adapter.about or adapter.name}): {result.words}"
        text = scripts.script(adapter.file, adapter.settings, each.check, case, result.ranks, about)
        (out / "scripts").mkdir(exist_ok=True)
        (out / "scripts" / f"{adapter.name}-{each.name}.py").write_text(text, encoding="utf-8")
