"""`library_defaults.json` has the keys, types and defaults of the installed libraries."""

import library_defaults

from study.core.library_defaults import known_libraries


def test_the_file_is_what_its_tool_writes():
    assert known_libraries() == library_defaults.exported()
