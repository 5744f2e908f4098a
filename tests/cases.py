"""One test over a whole table, which names every case that fails.

As a test of its own each case costs every worker a millisecond of collecting, and one worker some more of running.
Cases that take long, start processes or may be skipped stay tests of their own: `pytest.mark.parametrize`.
"""

import functools
import inspect
from collections.abc import Callable, Iterable

import pytest

asked = {"-k": ""}  # see conftest.py
# Those of pytest are no exceptions of Python's kind. A case that is skipped among others would not be seen to be.
FAILURES = (Exception, BaseExceptionGroup, pytest.fail.Exception, pytest.skip.Exception)


def for_each(names: str | tuple[str, ...], cases: Iterable, ids: Iterable[str] | Callable | None = None) -> Callable:
    """Like `pytest.mark.parametrize`, but one test. `-k` with what stands in names of cases runs those alone."""
    names = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names
    rows = [(case,) if len(names) == 1 else tuple(case) for case in cases]
    assert rows, f"no case of {', '.join(names)}"
    if ids is None or callable(ids):
        name = ids or (lambda value: None)
        ids = ["-".join(str(name(value) or getattr(value, "__name__", value)) for value in row) for row in rows]
    table = [(case, dict(zip(names, row, strict=True))) for case, row in zip(ids, rows, strict=True)]

    def over(test: Callable) -> Callable:
        @functools.wraps(test)
        def all_cases(**given) -> None:
            word = asked["-k"].lower()
            run = [(case, row) for case, row in table if word and word in case.lower()] or table
            failed: dict[str, BaseException] = {}
            for number, (case, row) in enumerate(run):
                with pytest.MonkeyPatch.context() as patch:
                    try:
                        test(**given | of_one_case(given, patch, number) | row)
                    except FAILURES as error:
                        error.add_note(f"That was the case {case!r} of {test.__name__}.")
                        failed[f"{number}: {case[:80]!r}"] = error
            if failed:
                about = f"{len(failed)} of {len(run)} cases fail, {', '.join(failed)}"
                raise BaseExceptionGroup(about, [*failed.values()])

        fixtures = [each for name, each in inspect.signature(test).parameters.items() if name not in names]
        all_cases.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
        vars(all_cases).update(dict.fromkeys(case for case, _ in table))  # -k finds a test by these words as well
        return all_cases

    return over


def of_one_case(given: dict, patch: pytest.MonkeyPatch, number: int) -> dict:
    """What pytest makes anew for each test: an empty folder, patches that are undone, and nothing printed yet."""
    anew: dict = {}
    if "monkeypatch" in given:
        anew["monkeypatch"] = patch
    if "tmp_path" in given:
        anew["tmp_path"] = given["tmp_path"] / str(number)
        anew["tmp_path"].mkdir()
    if "capsys" in given:
        given["capsys"].readouterr()
    return anew
