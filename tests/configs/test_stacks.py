"""The stack that words describe: of any length, in any script."""

import pytest

from study.configs.mistakes import recognised
from study.configs.stacks import described
from study.core.errors import Stop
from study.known.which_apply import Flags


@pytest.mark.parametrize("letter", ["x", "\u8bad"])
@pytest.mark.parametrize("length", [85, 199, 200, 4000])
def test_a_text_in_quotes_may_be_longer_than_the_name_of_a_file(letter, length):
    """A name has 255 bytes at most, and a letter has up to four of them."""
    stack, _ = described((f"deepspeed==0.18.2 zero stage 3\n{letter * length}\n",), Flags())
    assert (str(stack.releases["deepspeed"]), stack.said["stage"]) == ("0.18.2", 3)


@pytest.mark.parametrize("name", ["train.py", "run.sh", "train.ipynb"])
def test_a_script_in_place_of_a_config_is_called_one(name, tmp_path):
    (tmp_path / name).write_text("x = {'a': 1}\nfor y: z:\n")
    with pytest.raises(Stop) as stop:
        recognised(tmp_path / name)
    assert stop.value.what.endswith(f"{name} is a script, and no config")
    assert stop.value.remedy.startswith("give it without --config, as a file")
