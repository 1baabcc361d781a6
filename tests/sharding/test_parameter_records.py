"""Every parameter's record, and where the rules put each leaf on abstract meshes."""

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from small_models import small_model

from nag_jax.kinds import REGISTRY
from nag_jax.parameters import AXES, ROLES, ParamInfo, declare, flatten
from nag_jax.sharding import rules

ATTENTION = {
    "query": (("layers", "embed", "heads", "head_dim"), (1,), (2, 3)),
    "key": (("layers", "embed", "kv_heads", "head_dim"), (1,), (2, 3)),
    "value": (("layers", "embed", "kv_heads", "head_dim"), (1,), (2, 3)),
    "output": (("layers", "heads", "head_dim", "embed"), (1, 2), (3,)),
}
UP = (("layers", "embed", "hidden"), (1,), (2,))
DOWN = (("layers", "hidden", "embed"), (1,), (2,))
EXPERT_UP = (("layers", "expert", "embed", "hidden"), (2,), (3,))
EXPERT_DOWN = (("layers", "expert", "hidden", "embed"), (2,), (3,))
EXPERTS = {"gate": EXPERT_UP, "up": EXPERT_UP, "down": EXPERT_DOWN}
FEEDFORWARD = {
    "mlp": {"up": UP, "down": DOWN},
    "swiglu": {"gate": UP, "up": UP, "down": DOWN},
    "moe": EXPERTS,
    "moe_zaya": EXPERTS,
}
OF_ROUTER = ("layers", "router_width")
ROUTERS = {
    "moe": {"weight": (("layers", "embed", "choices"), "router")},
    "moe_zaya": {
        "down": (("layers", "embed", "router_width"), "router"),
        "down_bias": (OF_ROUTER, "router"),
        "depth_scale": (OF_ROUTER, "scale"),
        "norm/scale": (OF_ROUTER, "scale"),
        "first": ((*OF_ROUTER, "router_width"), "router"),
        "first_bias": (OF_ROUTER, "router"),
        "second": ((*OF_ROUTER, "router_width"), "router"),
        "second_bias": (OF_ROUTER, "router"),
        "last": ((*OF_ROUTER, "choices"), "router"),
    },
}
NORM = {"norm/scale": (("layers", "embed"), "scale")}
CONNECTION = {
    "nag": {
        "alpha": (("layers",), "gate"),
        "modulator/beta_raw": (("layers",), "gate"),
        "modulator/bias": (("layers", "directions"), "gate"),
        "modulator/mixture_logits": (("layers", "directions"), "gate"),
        "modulator/weight": (("layers", "embed", "directions"), "gate"),
    },
    "prenorm": NORM,
    "residual_free": NORM,
    "gated_prenorm": NORM
    | {"router/weight": (("layers", "embed"), "gate"), "router/bias": (("layers",), "gate")},
}
FINAL_NORM = {"final_norm/scale": (("embed",), "scale")}
ENDS = {
    "nag": {"log_encode_gain": ((), "scale")},
    "prenorm": FINAL_NORM,
    "residual_free": FINAL_NORM,
    "gated_prenorm": FINAL_NORM,
}


def mesh_of(data=1, fsdp=1, tensor=1, expert=1):
    shape = (data, fsdp, tensor, expert)
    return AbstractMesh(shape, rules.MESH_AXES, axis_types=(AxisType.Auto,) * 4)


@pytest.mark.parametrize("feedforward", REGISTRY["model.feedforward"])
@pytest.mark.parametrize("connection", REGISTRY["model.connection"])
def test_every_leaf_of_every_kind(connection, feedforward):
    """Axes, role, and the sides of matrices, at their places in the stacked leaf."""
    infos = flatten(
        small_model(
            connection__kind=connection, feedforward__kind=feedforward, attention__qk_norm=True
        ).infos
    )
    expected = {"table/rows": (("vocabulary", "embed"), "embedding", (), ())}
    branches = {"attention": ATTENTION, "feedforward": FEEDFORWARD[feedforward]}
    for name, matrices in branches.items():
        for leaf, (axes, rows, columns) in matrices.items():
            expected[f"stage_0/blocks/{name}/branch/{leaf}"] = (axes, "matrix", rows, columns)
        for leaf, record in CONNECTION[connection].items():
            expected[f"stage_0/blocks/{name}/connection/{leaf}"] = (*record, (), ())
    for leaf, record in ROUTERS.get(feedforward, {}).items():
        expected[f"stage_0/blocks/feedforward/branch/router/{leaf}"] = (*record, (), ())
    for leaf in ("query_norm", "key_norm"):
        path = f"stage_0/blocks/attention/branch/{leaf}/scale"
        expected[path] = (("layers", "head_dim"), "scale", (), ())
    for leaf, record in ENDS[connection].items():
        expected[f"ends/{leaf}"] = (*record, (), ())
    assert {p: (i.axes, i.role, i.rows, i.columns) for p, i in infos.items()} == expected
    for path, info in infos.items():
        assert set(info.axes) <= set(AXES) and info.role in ROLES
        assert len(info.shape) == len(info.axes)
        assert info.centred == (path == "table/rows" and connection == "nag")
        assert ("layers" in info.axes) == path.startswith("stage_0")


def test_free_head_and_fixed_beta():
    infos = flatten(small_model(connection__kind="prenorm", connection__head="free").infos)
    assert (infos["ends/head"].axes, infos["ends/head"].role) == (("vocabulary", "embed"), "head")
    assert infos["ends/head"].shape[0] == 13  # never padded
    infos = flatten(small_model(connection__beta_trainable=False).infos)
    assert not any("beta" in path for path in infos)


ON_TENSOR = ("heads", "kv_heads", "hidden", "vocabulary")


@pytest.mark.parametrize(
    "shape", [(8,), (4, 2), (2, 4), (1,), (1, 4, 2), (2, 1, 2, 2), (1, 2, 2, 2)], ids=str
)
def test_shardings_on_abstract_meshes(shape):
    """The width is split over fsdp and expert; heads, hidden units and vocabulary over tensor."""
    mesh = mesh_of(*shape)
    model = small_model(attention__num_heads=4, attention__num_kv_heads=2, d_model=32)
    shardings = flatten(rules.parameter_shardings(model.infos, mesh))
    for path, info in flatten(model.infos).items():
        shard = shardings[path].shard_shape(info.shape)
        for axis, length, part in zip(info.axes, info.shape, shard, strict=True):
            split = 1
            if axis == "embed":
                split = mesh.shape["fsdp"] * mesh.shape["expert"]
            elif axis in ON_TENSOR and length % mesh.shape["tensor"] == 0:
                split = mesh.shape["tensor"]
            assert part * split == length, (path, axis)


def spec_of(axes, shape, mesh):
    info = ParamInfo(axes, "matrix", (0,), (1,), False, shape, "float32")
    return rules.parameter_spec(info, mesh, "w")


def test_an_axis_that_does_not_divide_stays_whole():
    assert spec_of(("embed", "hidden"), (6, 8), mesh_of(2, 4)) == P(None, None)
    assert spec_of(("embed", "hidden"), (6, 8), mesh_of(4, 2)) == P("fsdp", None)
    assert spec_of(("embed", "hidden"), (6, 8), mesh_of(2, 3, 4, 4)) == P("fsdp", "tensor")
    assert spec_of(("embed", "kv_heads"), (9, 2), mesh_of(1, 3, 4, 2)) == P("fsdp", None)


def test_experts_are_split_over_their_own_axis():
    axes, mesh = ("layers", "expert", "embed", "hidden"), mesh_of(1, 2, 2, 4)
    assert spec_of(axes, (3, 8, 16, 6), mesh) == P(None, "expert", "fsdp", "tensor")
    assert spec_of(axes, (3, 6, 16, 6), mesh) == P(None, None, "fsdp", "tensor")
    assert spec_of(("embed", "hidden"), (16, 6), mesh) == P(("fsdp", "expert"), "tensor")
    assert spec_of(("hidden", "hidden"), (16, 16), mesh) == P("tensor", None)


def test_an_axis_without_a_rule_is_refused_by_path():
    info = ParamInfo(("colour",), "scale", (), (), False, (8,), "float32")
    with pytest.raises(ValueError, match="a/b has logical axis 'colour', which has no rule"):
        rules.parameter_shardings({"a": {"b": info}}, mesh_of(2, 2))


def test_batches_are_split_over_all_axes_but_tensor():
    assert rules.batch_sharding(mesh_of(4, 2)).shard_shape((16, 9)) == (2, 9)
    assert rules.batch_sharding(mesh_of(2, 1, 2, 2)).shard_shape((16, 9)) == (4, 9)
    assert rules.batch_shards(mesh_of(3, 5, 2, 7)) == 105


@pytest.mark.parametrize(
    "axes, role, sides, words",
    [
        (("embed", "wings"), "scale", {}, "unknown logical axis 'wings'"),
        (("embed", "hidden"), "matrices", {}, "unknown parameter role 'matrices'"),
        (("embed",), "scale", {}, "1 axis names"),
        (("embed", "hidden"), "matrix", {}, "rows and columns are named for matrices"),
        (
            ("embed", "hidden"),
            "scale",
            {"rows": ("embed",), "columns": ("hidden",)},
            "for matrices only",
        ),
        (
            ("embed", "hidden"),
            "matrix",
            {"rows": ("embed",), "columns": ("heads",)},
            "must be among the axes",
        ),
    ],
)
def test_wrong_declarations(axes, role, sides, words):
    with pytest.raises(ValueError, match=words):
        declare(jax.numpy.zeros((2, 3)), axes, role, **sides)
