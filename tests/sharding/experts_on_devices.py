"""Runs experts on meshes of this process's devices and checks them against NumPy in float64.

Started by `test_experts` with eight simulated devices. The CPU has no `ragged_all_to_all`: a
stand-in written from its documentation runs in its place, so that offsets and sizes are checked.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from small_models import quick_compilation

from nag_jax.models.linear import Numerics, contract_grouped
from nag_jax.parameters import declare, info_of
from nag_jax.sharding import experts
from nag_jax.sharding.rules import MESH_AXES, parameter_spec

EXPERTS, WIDTH, HIDDEN = 8, 16, 12
UP, DOWN = ("expert", "embed", "hidden"), ("expert", "hidden", "embed")


def documented_exchange(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """`jax.lax.ragged_all_to_all` as its documentation has it; NaN where sizes disagree."""
    devices, me = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    gathered = [
        jax.lax.all_gather(array, axis_name)
        for array in (operand, input_offsets, send_sizes, output_offsets)
    ]
    pieces = len(input_offsets) // devices
    row = jnp.arange(output.shape[0])
    result = output
    for source in range(devices):
        data, starts, sizes, targets = (array[source] for array in gathered)
        for piece in range(pieces):
            i = me * pieces + piece
            from_start = row - targets[i]
            inside = (from_start >= 0) & (from_start < sizes[i])
            sent = data[jnp.clip(starts[i] + from_start, 0, len(data) - 1)]
            agreed = recv_sizes[source * pieces + piece] == sizes[i]
            fits = targets[i] + sizes[i] <= len(row)
            sent = jnp.where(agreed & fits, sent, jnp.nan)
            result = jnp.where(inside[:, None], sent, result)
    return result


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def expected(weights, x, chosen, shares, d_y):
    """Output and gradients of weights, x and shares, expert by expert."""
    gate, up, down = (weights[name].astype(np.float64) for name in ("gate", "up", "down"))
    x, shares, d_y = (array.astype(np.float64) for array in (x, shares, d_y))
    y, d_x, d_shares = np.zeros(x.shape), np.zeros(x.shape), np.zeros(shares.shape)
    d_gate, d_up, d_down = np.zeros(gate.shape), np.zeros(up.shape), np.zeros(down.shape)
    for e in range(len(gate)):
        b, t, j = np.nonzero(chosen == e)
        rows, share = x[b, t], shares[b, t, j][:, None]
        g, u = rows @ gate[e], rows @ up[e]
        s = sigmoid(g)
        hidden = g * s * u
        out = hidden @ down[e]
        np.add.at(y, (b, t), share * out)
        d_shares[b, t, j] = (d_y[b, t] * out).sum(-1)
        d_out = share * d_y[b, t]
        d_down[e] = hidden.T @ d_out
        d_hidden = d_out @ down[e].T
        d_g = d_hidden * u * (s + g * s * (1 - s))
        d_u = d_hidden * g * s
        d_gate[e], d_up[e] = rows.T @ d_g, rows.T @ d_u
        np.add.at(d_x, (b, t), d_g @ gate[e].T + d_u @ up[e].T)
    return y, {"gate": d_gate, "up": d_up, "down": d_down}, d_x, d_shares


def swiglu(weights, rows, sizes):
    def product(name, inputs):
        return contract_grouped(f"moe/{name}", inputs, weights[name], sizes, Numerics(), "blocked")

    return product("down", jax.nn.silu(product("gate", rows)) * product("up", rows))


def as_parameters(weights):
    up = {"rows": ("embed",), "columns": ("hidden",)}
    down = {"rows": ("hidden",), "columns": ("embed",)}
    return {
        "gate": declare(weights["gate"], UP, "matrix", **up),
        "up": declare(weights["up"], UP, "matrix", **up),
        "down": declare(weights["down"], DOWN, "matrix", **down),
    }


@functools.partial(jax.jit, static_argnames="exchange")
def value_and_gradients(weights, x, chosen, shares, d_y, exchange):
    def run(weights, x, shares):
        return experts.run_experts(
            swiglu, as_parameters(weights), x, chosen, shares, exchange=exchange
        )

    y, pull_back = jax.vjp(run, weights, x, shares)
    return y, *pull_back(d_y)


def routings(rows, length, k, rng):
    """Choices without an expert twice in a token, under a name."""
    order = np.argsort(rng.random((rows, length, EXPERTS)), axis=-1)[..., :k].astype(np.int32)
    hot = order.copy()
    hot[..., 0] = 3
    hot[..., 1:] = np.where(hot[..., 1:] == 3, EXPERTS, hot[..., 1:])  # nowhere
    nowhere = np.where(rng.random(order.shape) < 0.4, EXPERTS, order)
    return {
        "any": order,
        "one hot expert": hot,
        "some nowhere": nowhere.astype(np.int32),
        "all nowhere": np.full_like(order, EXPERTS),
    }


def inputs(rows, length, k):
    rng = np.random.default_rng(rows + k)
    weights = {
        "gate": rng.normal(size=(EXPERTS, WIDTH, HIDDEN)),
        "up": rng.normal(size=(EXPERTS, WIDTH, HIDDEN)),
        "down": rng.normal(size=(EXPERTS, HIDDEN, WIDTH)),
    }
    weights = {name: (w / np.sqrt(w.shape[1])).astype(np.float32) for name, w in weights.items()}
    x, d_y = rng.normal(size=(2, rows, length, WIDTH)).astype(np.float32)
    shares = rng.normal(size=(rows, length, k)).astype(np.float32)
    return weights, x, shares, d_y, routings(rows, length, k, rng)


def check(mesh, exchange, rows, k, length=5):
    """Value and gradients for each routing, on a mesh or, without one, on one device."""
    weights, x, shares, d_y, by_name = inputs(rows, length, k)
    placed = weights
    if mesh is not None:
        placed = {
            name: jax.device_put(
                weights[name],
                NamedSharding(mesh, parameter_spec(info_of(parameter, name), mesh, name)),
            )
            for name, parameter in as_parameters(weights).items()
        }
        x, shares, d_y = (
            jax.device_put(array, NamedSharding(mesh, P())) for array in (x, shares, d_y)
        )
    for name, chosen in by_name.items():
        if name == "all nowhere":
            x = x * np.nan  # of no expert, so it must not matter
        got = value_and_gradients(placed, x, chosen, shares, d_y, exchange=exchange)
        want = expected(weights, np.asarray(x), chosen, np.asarray(shares), np.asarray(d_y))
        for array, ideal in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(
                array, ideal, rtol=0, atol=2e-6 * max(np.abs(ideal).max(), 1), err_msg=name
            )


MESHES = {  # lengths of MESH_AXES
    (1, 1, 1, 8): [("gather", 8, 2), ("ragged", 8, 2), ("ragged", 8, 8), ("gather", 3, 2)],
    (2, 1, 2, 2): [("gather", 8, 3), ("ragged", 8, 3), ("gather", 3, 2)],
    (1, 4, 2, 1): [("gather", 8, 2)],
    (2, 1, 1, 4): [("gather", 16, 1), ("ragged", 16, 3)],
}


def main():
    for lengths, cases in MESHES.items():
        devices = np.asarray(jax.devices()).reshape(lengths)
        mesh = Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
        with jax.set_mesh(mesh):
            for exchange, rows, k in cases:
                check(mesh, exchange, rows, k)
                print("checked", lengths, exchange, rows, k)


if __name__ == "__main__":
    jax.lax.ragged_all_to_all = documented_exchange
    with quick_compilation():
        main()
