"""Host memory while a model is loaded: what it needs at most, and what an advice says about it."""

from study.predict.advise import advise
from study.predict.architecture import named
from study.predict.estimate import HOST_PROCESS_BYTES, loading_bytes
from study.predict.question import Question
from study.report.advice import in_words

WEIGHTS = 4 * 124_439_808  # of gpt2


def test_beside_gpus_only_copies_in_another_type_are_in_host_memory():
    assert loading_bytes(named("gpt2"), 8, weight_bytes=2) == 8 * HOST_PROCESS_BYTES
    assert loading_bytes(named("gpt2"), 8, weight_bytes=4) == 8 * (HOST_PROCESS_BYTES + WEIGHTS)


def test_an_advice_warns_of_a_host_that_cannot_load():
    for memory, warns in (("256GB", True), ("1TB", False)):
        question = Question.of(named("llama3-8b"), 8, "H100", precision="fp32", host_memory=memory)
        said = in_words(advise(question))
        assert any("To load it" in line for line in said) == warns
