"""Parts of a user's own, chosen by "package.module:Class"."""

import jax
import numpy as np
import pytest
from numpy_network import Network
from small_models import VOCAB, as_float64, packed_batch, random_params, small_config, small_model

from nag_jax.models.transformer import build_model
from nag_jax.parameters import flatten

BATCH = packed_batch([[5, 4], [1, 7]], 8)


def user(name):
    return f"user_parts.parts:{name}"


def nats(model, params, step=10**6):
    run = jax.jit(lambda p: model.evaluate_batch(p, BATCH, step, True)["nats"])
    return np.asarray(run(params))  # waits: callers then change parameters in place


class UserNetwork(Network):
    """The NumPy network with the user's parts in place of the package's."""

    def branch(self, name, x, w, segment_ids):
        if name == "attention":
            return w["factor"] * super().branch(name, x, w, segment_ids)
        return x @ w["kernel"]


@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_attention_and_feedforward(weight, x64):
    """In a NAG model; a router's weight multiplies the gain, since the update has no scale."""
    config = small_config(
        compute_dtype="float64",
        attention__kind=user("DoubledAttention"),
        attention__num_heads=2,
        attention__num_kv_heads=1,
        attention__head_dim=6,
        feedforward__kind=user("Diagonal"),
        feedforward__weight=weight,
    )
    model = build_model(config, VOCAB)
    params = as_float64(random_params(model))
    assert flatten(model.infos)["stage_0/blocks/attention/branch/factor"].role == "scale"
    network = UserNetwork(config.model, VOCAB, params)
    if weight:
        network.params["stage_0"]["blocks"]["feedforward"]["connection"]["alpha"] *= weight
    expected = network.nats(BATCH)
    if weight:
        network.params["stage_0"]["blocks"]["feedforward"]["connection"]["alpha"] /= weight
    np.testing.assert_allclose(nats(model, params), expected, rtol=1e-8, atol=1e-10)


def test_prenorm_multiplies_the_branch_by_the_weight(x64):
    """A weight of 1/4 equals a kernel four times smaller."""
    keys = {
        "compute_dtype": "float64",
        "connection__kind": "prenorm",
        "feedforward__kind": user("Diagonal"),
    }
    weighted = small_model(**keys, feedforward__weight=0.25)
    plain = small_model(**keys, feedforward__weight=0.0)
    params = as_float64(random_params(weighted))
    first = nats(weighted, params)
    params["stage_0"]["blocks"]["feedforward"]["branch"]["kernel"] *= 0.25
    np.testing.assert_allclose(first, nats(plain, params), rtol=1e-12, atol=1e-13)


def test_connection(x64):
    """Half of every branch: the same as pre-norm with output projections half as large."""
    own = small_model(compute_dtype="float64", connection__kind=user("HalfPreNorm"))
    plain = small_model(compute_dtype="float64", connection__kind="prenorm")
    params = as_float64(random_params(own))
    first = nats(own, params)
    blocks = params["stage_0"]["blocks"]
    blocks["attention"]["branch"]["output"] *= 0.5
    blocks["feedforward"]["branch"]["down"] *= 0.5
    np.testing.assert_allclose(first, nats(plain, params), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "name, words",
    [
        ("Undeclared", "feedforward/branch/extra has no logical axes and role"),
        ("UnknownAxis", "unknown logical axis 'wavelength'; known axes: layers, embed"),
        ("UnknownRole", "feedforward/branch/kernel.*unknown parameter role 'colour'"),
        ("HandMadeAxis", "feedforward/branch/kernel.*unknown logical axis 'wavelength'"),
    ],
)
def test_a_parameter_without_a_right_record_is_refused(name, words):
    with pytest.raises(ValueError, match=words):
        small_model(feedforward__kind=user(name))


def test_a_record_may_be_plain_metadata():
    infos = flatten(small_model(feedforward__kind=user("HandMade")).infos)
    info = infos["stage_0/blocks/feedforward/branch/shift"]
    assert (info.axes, info.role, info.rows, info.centred) == (
        ("layers", "embed"),
        "bias",
        (),
        False,
    )
