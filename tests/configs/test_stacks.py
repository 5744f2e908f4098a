"""The stack that words describe: of any length, in any script."""

import pytest

from study.configs.stacks import described
from study.known.which_apply import Flags


@pytest.mark.parametrize("letter", ["x", "\u8bad"])
@pytest.mark.parametrize("length", [85, 199, 200, 4000])
def test_a_text_in_quotes_may_be_longer_than_the_name_of_a_file(letter, length):
    """A name has 255 bytes at most, and a letter has up to four of them."""
    stack, _ = described((f"deepspeed==0.18.2 zero stage 3\n{letter * length}\n",), Flags())
    assert (str(stack.releases["deepspeed"]), stack.said["stage"]) == ("0.18.2", 3)
