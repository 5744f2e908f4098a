"""`library_defaults.json` has the keys, types and defaults of the installed libraries."""

import library_defaults

from study.core import arms


def test_the_file_is_what_its_tool_writes():
    assert arms.known_libraries() == library_defaults.exported()
