"""Moments and the temporaries of an update by hand, for two matrices and a vector."""

import pytest

from study.predict.optimizer_states import moments_bytes, update_makes_bytes
from study.predict.trace.tape import Tensor

MATRIX = Tensor("layer.0.weight", (100, 80), "layer.0")
EMBEDDINGS = Tensor("embed_tokens.weight", (50, 20), "embeddings")
VECTOR = Tensor("layer.0.bias", (10,), "layer.0")
TENSORS = [MATRIX, EMBEDDINGS, VECTOR]
ALL = 8000 + 1000 + 10

# Moments of 4 bytes an element; what an update makes beside them.
BY_HAND = {
    "adamw": (4 * 2 * ALL, 0),
    "foreach": (4 * 2 * ALL, 4 * ALL),
    "single_tensor": (4 * 2 * ALL, 4 * 8000),
    "sgd": (4 * ALL, 0),
    "adafactor": (4 * (100 + 80 + 50 + 20 + 10), 4 * 8000),
    "muon": (4 * (8000 + 2 * 1000 + 2 * 10), 0),  # the embeddings are AdamW's
    # 8,000 bytes twice, with scales for 32 blocks (31.25), and tables; 1,010 elements keep fp32.
    "adamw_8bit": (2 * (8000 + 4 * 32) + 2 * 256 * 4 + 2 * 4 * 1010, 0),
}


@pytest.mark.parametrize("optimizer", BY_HAND)
def test_states_are_those_by_hand(optimizer):
    moments, made = BY_HAND[optimizer]
    assert moments_bytes(optimizer, TENSORS, 4) == moments
    assert update_makes_bytes(optimizer, TENSORS, 4) == made
    if optimizer != "adamw_8bit":
        assert moments_bytes(optimizer, TENSORS, 2) == moments / 2


def test_adafactors_squares_of_a_vector_count_where_it_is_the_largest():
    assert update_makes_bytes("adafactor", [VECTOR], 4) == 4 * 2 * 10
    assert update_makes_bytes("single_tensor", [VECTOR], 4) == 4 * 10
    assert update_makes_bytes("single_tensor", [], 4) == 0


@pytest.mark.parametrize(("elements", "held"), [(4095, 8 * 4095), (4096, 2 * (4096 + 4 * 16) + 2048)])
def test_bitsandbytes_keeps_small_tensors_in_fp32(elements, held):
    assert moments_bytes("adamw_8bit", [Tensor("a", (elements,), "head")], 4) == held
