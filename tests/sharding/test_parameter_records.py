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
FEEDFORWARD = {"mlp": {"up": UP, "down": DOWN}, "swiglu": {"gate": UP, "up": UP, "down": DOWN}}
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
}
FINAL_NORM = {"final_norm/scale": (("embed",), "scale")}
ENDS = {
    "nag": {"log_encode_gain": ((), "scale")},
    "prenorm": FINAL_NORM,
    "residual_free": FINAL_NORM,
}


def mesh_of(data, fsdp):
    return AbstractMesh((data, fsdp), rules.MESH_AXES, axis_types=(AxisType.Auto,) * 2)


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


@pytest.mark.parametrize("data, fsdp", [(8, 1), (4, 2), (2, 4), (1, 1)])
def test_shardings_on_abstract_meshes(data, fsdp):
    """The model width is split over fsdp in every leaf that has it; nothing else is split."""
    model = small_model()
    shardings = flatten(rules.parameter_shardings(model.infos, mesh_of(data, fsdp)))
    for path, info in flatten(model.infos).items():
        expected = P(*("fsdp" if axis == "embed" else None for axis in info.axes))
        assert shardings[path].spec == expected, path
        shard = shardings[path].shard_shape(info.shape)
        split = fsdp if "embed" in info.axes else 1
        assert jax.numpy.prod(jax.numpy.array(shard)) * split == info.size or not info.shape


def test_an_axis_that_does_not_divide_stays_whole():
    info = ParamInfo(("embed", "hidden"), "matrix", (0,), (1,), False, (6, 8), "float32")
    assert rules.parameter_spec(info, mesh_of(2, 4), "w") == P(None, None)
    assert rules.parameter_spec(info, mesh_of(4, 2), "w") == P("fsdp", None)


def test_an_axis_without_a_rule_is_refused_by_path():
    info = ParamInfo(("colour",), "scale", (), (), False, (8,), "float32")
    with pytest.raises(ValueError, match="a/b has logical axis 'colour', which has no rule"):
        rules.parameter_shardings({"a": {"b": info}}, mesh_of(2, 2))


def test_batches_are_split_over_both_axes():
    assert rules.batch_sharding(mesh_of(4, 2)).shard_shape((16, 9)) == (2, 9)


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
