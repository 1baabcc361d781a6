"""In bfloat16 no product, forward or backward, has a wider operand beside a bfloat16 one.

Such a product costs a TPU three passes of its matrix units, and keeps a GPU off them altogether.
"""

import jax
import numpy as np
import pytest
from small_models import packed_batch, random_params, small_model

from nag_jax.training.step import batch_sums

MODELS = {
    "nag, ccgqa, moe": {
        "model.attention.kind": "ccgqa",
        "model.feedforward.kind": "moe",
        "model.connection.kind": "nag",
    },
    "prenorm, gqa, swiglu": {
        "model.attention.kind": "gqa",
        "model.feedforward.kind": "swiglu",
        "model.connection.kind": "prenorm",
    },
    "residual-free": {"model.connection.kind": "residual_free"},
}


def products(jaxpr):
    """Operand dtypes of every matrix product of a jaxpr, with its place."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "ragged_dot_general", "conv_general_dilated"):
            dtypes = tuple(str(x.aval.dtype) for x in equation.invars[:2])
            yield dtypes, str(equation.source_info.name_stack)
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from products(inner)


@pytest.mark.parametrize("overrides", MODELS.values(), ids=MODELS)
def test_no_product_mixes_widths(overrides):
    model = small_model(overrides, compute_dtype="bfloat16")
    params, batch = random_params(model), packed_batch([[5, 4], [9]], 8)

    def loss(params):
        balance = model.initial_balance()
        return batch_sums(model, params, balance, batch, 0, taps=False)["nats"]

    found = list(products(jax.make_jaxpr(jax.grad(loss))(params).jaxpr))
    assert {np.dtype(dtypes[0]).name for dtypes, _ in found} >= {"bfloat16"}
    assert [one for one in found if one[0][0] != one[0][1]] == []
