"""`study conform`: hold ways of sharding to one process, on the same weights and data, with the same arithmetic."""

import sys
import tempfile
from pathlib import Path

import tyro

from study.conform import output, scripts
from study.conform.suite import ADAPTERS, PROPERTIES, Adapter, Property, Ranks, Result, run, smallest
from study.core.errors import Stop
from study.core.options import AsJson
from study.core.tables import say, say_wrapped, show
from study.core.validation import nearest


def conform(
    names: tyro.conf.Positional[tuple[str, ...]] = (),
    /,
    *,
    adapter: Path | None = None,
    only: str = "",
    out: Path | None = None,
    shrink: bool = True,
    as_json: AsJson = False,
) -> dict | None:
    """Is a sharded training equal to one process? Each property is tried on two gloo ranks, some on one or four.

    Without names, the adapters of this study are listed, and the properties with where they come from. A property
    holds, fails, is refused by the library in its words, or is not applicable. The exit code is 1 if one fails. Each
    failure is made smaller, and with --out it is written as a script.

    Args:
        names: The adapters of this study to run, or all.
        adapter: Run the adapter in this file instead. It is Python code, and runs with your rights: run only code that
            you trust. It defines build, forward_backward, step, whole_weights, and if it can gradient_norm, save,
            load and schedule. examples/toy_adapter.py is one.
        only: Run only properties whose name contains this text.
        out: Write JSON, JUnit XML, a badge, and a script for each failure into this folder.
        shrink: Make failures smaller.
        as_json: Print the results as JSON instead of lines.
    """
    chosen = chosen_adapters(names, adapter)
    properties = [each for name, each in PROPERTIES.items() if only in name]
    if not properties:
        raise Stop(f"no property has {only!r} in its name", "study conform lists them")
    if not chosen:
        show([{"adapter": each.name, "what": each.about} for each in ADAPTERS.values()])
        show([{"property": each.name, "says": each.sentence, "from": each.source} for each in properties])
        return None
    results = {each.name: _results(each, properties, out, shrink, quiet=as_json) for each in chosen}
    fine = not any(output.count(each)["fails"] for each in results.values())
    if as_json:
        written = {each.name: output.as_json(each, results[each.name], output.installed()) for each in chosen}
        return {"fine": fine} | written
    say("")
    show(output.rows(results))
    if len(results) > 1:
        say("", "What does not hold everywhere:")
        show(output.matrix(results))
    sys.exit(0 if fine else 1)


def chosen_adapters(names: tuple[str, ...], file: Path | None = None) -> list[Adapter]:
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


def _results(adapter: Adapter, properties: list[Property], out: Path | None, shrink: bool, quiet: bool) -> list[Result]:
    versions = output.installed()

    def tell(result: Result) -> None:
        if quiet:
            return
        say(output.line(result))
        if known := output.explanation(result, versions):
            say_wrapped(f"{known.kind}: {known}", indent=" " * 16, first=" " * 16)

    if not quiet:
        say("", f"{adapter.name}: {adapter.about or adapter.file}")
    with tempfile.TemporaryDirectory() as logs, Ranks(None, Path(logs, "log.txt")) as ranks:
        results = run(adapter, properties, ranks, tell, shrink)
    if out:
        output.write(out, adapter, results, versions)
        for result in results:
            if result.status == "fails":
                _write_script(out / "scripts", adapter, result, versions)
    return results


def _write_script(folder: Path, adapter: Adapter, result: Result, versions: output.Versions) -> None:
    each = smallest(result)
    seen = output.named(versions)
    about = f"Expected: {each.sentence[0].lower()}{each.sentence[1:]}. Asked in: {each.source}.\n\n"
    about += f"Seen ({seen}, {adapter.about or adapter.name}): {result.words}"
    folder.mkdir(exist_ok=True)
    text = scripts.script(adapter, each, about)
    (folder / f"{adapter.name}-{each.name}.py").write_text(text, encoding="utf-8")
