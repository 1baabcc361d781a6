"""The config tree: every leaf of every config, kinds, types, mistakes, combinations and JSON."""

import pathlib
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nag_jax import config as config_lib
from nag_jax import kinds
from nag_jax.dotted import flatten
from nag_jax.errors import UserError
from nag_jax.models.skipping import NoSkipping
from nag_jax.validation import RULES
from nag_jax.values import parse

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
ARGUMENTS = {
    "moe_small": ["", "smoke", "feedforward=moe_zaya"],
    "nag_adamw": ["", "smoke", "schedule=constant"],
    "nag_mod_small": ["", "smoke", "rate=0.4,sublayers=attention", "connection=gated_prenorm"],
    "optimizers_small": [
        "",
        "smoke",
        *(
            f"optimizer={kind},connection=nag"
            for kind in ("adamw", "muon", "shampoo", "kl_shampoo", "sign", "spectral")
        ),
        "optimizer=muon,connection=prenorm",
    ],
    "own_data": [
        "source=text,tokenizer=bytes",
        "source=jsonl,tokenizer=tokenizers_json",
        "source=parquet,tokenizer=sentencepiece",
        "source=huggingface,tokenizer=tiktoken",
        "smoke",
    ],
    "residual_free_small": [
        "",
        "smoke",
        "depth=48",
        "initialisation=gaussian",
        "initialisation=xavier",
        "initialisation=kaiming",
    ],
}
SPECS = [
    f"{path}:{arg}"
    for path in sorted(CONFIGS.glob("*.py"))
    for arg in ARGUMENTS.get(path.stem, ["", "smoke"])
]
# What a config of the user's own data needs from the command line.
FILES = ["data.source.paths=x.txt", "data.source.dataset=x", "data.tokenizer.path=x"]


OWN = f"{__name__}:OwnAttention"


class OwnAttention:
    """A user's own kind."""

    context_flops = None

    def __call__(self, x, keep, context):
        raise NotImplementedError

    @staticmethod
    def defaults():
        return {"num_heads": 0, "window": 3, "names": ("a",), "inner": {"slope": 0.5}}


class Bare:
    """A class without the members of a kind."""

    @staticmethod
    def defaults():
        return {}


class WithRoles(Bare):
    """A kind with parameters of a role that no other kind has."""

    @staticmethod
    def rate_multipliers():
        return {"conv": 0.5}


class WrongRates(Bare):
    """A kind whose rate is no number."""

    @staticmethod
    def rate_multipliers():
        return {"conv": "fast"}


class NoDefaults:
    """A class that is no kind."""


class Shared:
    """A kind that redefines a shared key."""

    @staticmethod
    def defaults():
        return {"learning_rate": 1.0}


class Untyped:
    """A kind whose key has no type."""

    @staticmethod
    def defaults():
        return {"window": None}


def resolve_spec(spec, command_line=()):
    return config_lib.resolve(config_lib.load_config_file(spec), command_line)


def short(spec):
    return spec.rpartition("/")[2]


def changed_keys(a, b):
    return {line.partition(":")[0] for line in config_lib.diff(a, b)}


def refusal(call, *args, **kwargs):
    """The sentence of the UserError that a call raises."""
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


INTEGERS = (
    "checkpoint.keep_steps",
    "model.feedforward.num_experts",
    "model.feedforward.top_k",
)


def other(key, value):
    """The text of another value of the same type, and that value."""
    if isinstance(value, bool):
        return str(not value).lower(), not value
    if isinstance(value, int):
        return str(value + 1), value + 1
    if isinstance(value, float):
        return str(value + 0.25), value + 0.25
    if isinstance(value, str):
        return "other", "other"
    return ("7,8", (7, 8)) if key in INTEGERS else ("b,c", ("b", "c"))


@pytest.mark.parametrize("spec", SPECS, ids=short)
def test_every_leaf_can_be_overridden_and_changes_nothing_else(spec):
    before = resolve_spec(spec)
    overrides = config_lib.load_config_file(spec)
    for key, value in flatten(before).items():
        node = key.removesuffix(".kind")
        if key != node:
            for kind in [*kinds.REGISTRY[node], OWN]:
                after = config_lib.resolve(overrides, [f"{key}={kind}"])
                assert flatten(after)[key] == kind
                assert ({key} if kind != value else set()) <= changed_keys(before, after)
                allowed = (f"{node}.", f"{kinds.RATE_MULTIPLIER}.")
                assert all(k.startswith(allowed) for k in changed_keys(before, after))
            continue
        text, expected = other(key, value)
        after = config_lib.resolve(overrides, [f"{key}={text}"])
        got = flatten(after)[key]
        assert (got, type(got)) == (expected, type(value)), key
        assert changed_keys(before, after) == {key}


@pytest.mark.parametrize("spec", SPECS, ids=short)
def test_every_config_is_valid_and_survives_json(spec):
    needed = [text for text in FILES if text.partition("=")[0] in flatten(resolve_spec(spec))]
    config = resolve_spec(spec, needed)
    config_lib.validate(config)
    config_lib.validate_devices(config, 8)
    again, missing = config_lib.read_json(config_lib.to_json(config))
    assert missing == []
    assert {k: (v, type(v)) for k, v in flatten(again).items()} == {
        k: (v, type(v)) for k, v in flatten(config).items()
    }
    assert again.is_locked


def test_every_kind_is_reached_by_a_config():
    reached = {
        (node, flatten(resolve_spec(spec))[f"{node}.kind"])
        for spec in SPECS
        for node in kinds.REGISTRY
    }
    assert reached == {(node, kind) for node, names in kinds.REGISTRY.items() for kind in names}


def test_a_config_holds_the_shared_leaves_and_those_of_the_chosen_kinds_alone():
    config = config_lib.resolve({})
    chosen = [
        key
        for node in kinds.REGISTRY
        for key in kinds.kind_defaults(node, flatten(config)[f"{node}.kind"])
    ]
    assert sorted(flatten(config)) == sorted([*flatten(config_lib.shared_defaults()), *chosen])
    with pytest.raises((AttributeError, KeyError)):
        config.model.connection.head = "free"


def test_smoke_is_small_for_any_config():
    for spec in SPECS:
        if spec.endswith(":smoke"):
            config = resolve_spec(spec)
            assert config.train.steps <= 10 and config.model.d_model <= 64
            assert config.data.source.kind != "python_stdlib"


@pytest.mark.parametrize("node", kinds.REGISTRY)
def test_a_leaf_of_a_kind_that_is_not_chosen_is_refused_by_name(node):
    for chosen in kinds.REGISTRY[node]:
        own = kinds.kind_defaults(node, chosen)
        for kind in kinds.REGISTRY[node]:
            for key in kinds.kind_defaults(node, kind).keys() - own.keys():
                line = [f"{node}.kind={chosen}", f"{key}=1"]
                sentence = refusal(config_lib.resolve, {}, line)
                assert key in sentence and kind in sentence and f"kind is {chosen}" in sentence
                assert all(own_key.rpartition(".")[2] in sentence for own_key in own)
                sentence = refusal(config_lib.resolve, {f"{node}.kind": chosen, key: 1})
                assert key in sentence and f"kind is {chosen}" in sentence


def test_a_kind_on_the_command_line_drops_the_files_leaves_of_the_replaced_kind():
    file = {"model": {"connection": {"kind": "prenorm", "head": "free"}, "d_model": 64}}
    config = config_lib.resolve(file, ["model.connection.kind=nag"])
    assert config.model.connection.kind == "nag" and "head" not in config.model.connection
    assert config.model.d_model == 64
    # Another kind's key of the same name takes that kind's default, not the replaced kind's value.
    config = config_lib.resolve(file, ["model.connection.kind=residual_free"])
    assert config.model.connection.head == "tied"
    # The command line's own leaves stay, and the same kind again replaces nothing.
    line = ["model.connection.kind=residual_free", "model.connection.head=free"]
    assert config_lib.resolve(file, line).model.connection.head == "free"
    config = config_lib.resolve(file, ["model.connection.kind=prenorm"])
    assert config.model.connection.head == "free"
    file["model"]["connection"]["haed"] = "free"
    assert "haed" in refusal(config_lib.resolve, file, ["model.connection.kind=nag"])


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("train.steps=1e5", 100_000),
        ("train.steps=100_000", 100_000),
        ("optimizer.clip_norm=2", 2.0),
        ("optimizer.adam_eps=1e-9", 1e-9),
        ("train.taps=False", False),
        ("train.taps=1", True),
        ("mesh.data=-1", -1),
        ("metrics.wandb_project=", ""),
        ("metrics.wandb_project='a=b,c'", "'a=b,c'"),
        ("checkpoint.keep_steps=1,2", (1, 2)),
        ("checkpoint.keep_steps=(1, 1e3,)", (1, 1000)),
        ("checkpoint.keep_steps=7", (7,)),
        ("checkpoint.keep_steps=()", ()),
        ("data.source.paths=c,d", ("c", "d")),
        ("data.source.paths=('c','d')", ("c", "d")),
        ("data.source.paths=('a, b', \"it's\")", ("a, b", "it's")),
        ("data.source.paths=1,2", ("1", "2")),
        ("data.source.paths=~/a b/*.txt", ("~/a b/*.txt",)),
        ("data.source.paths=['']", ("",)),
    ],
)
def test_text_takes_the_type_of_the_default(assignment, expected):
    config = config_lib.resolve({"data.source.kind": "text"}, [assignment])
    got = flatten(config)[assignment.partition("=")[0]]
    assert (got, type(got)) == (expected, type(expected))
    if isinstance(got, tuple):
        assert [type(item) for item in got] == [type(item) for item in expected]


def test_a_tuple_keeps_its_default_item_type():
    assert parse("x", "(1,2)", (0.5,)) == (1.0, 2.0)
    assert all(type(item) is float for item in parse("x", "(1,2)", (0.5,)))


@given(st.lists(st.text(st.characters(exclude_characters="'\"\\", codec="ascii"), max_size=9)))
@settings(max_examples=100, deadline=None)
def test_a_tuple_of_quoted_texts_is_read_back(items):
    text = "(" + ", ".join(f"'{item}'" for item in items) + ")"
    assert parse("x", text, ("a",)) == tuple(items)


@given(st.lists(st.integers(-(10**9), 10**9)))
@settings(max_examples=100, deadline=None)
def test_a_tuple_of_numbers_is_read_back(items):
    assert parse("x", str(tuple(items)), (0,)) == tuple(items)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("train.steps=0.1", ["train.steps", "'0.1'", "whole number"]),
        ("train.steps=many", ["train.steps", "'many'", "whole number"]),
        ("train.steps=", ["train.steps", "whole number"]),
        ("train.steps=1e400", ["train.steps", "1e400"]),
        ("train.taps=yes", ["train.taps", "'yes'", "true or false"]),
        ("optimizer.learning_rate=fast", ["optimizer.learning_rate", "'fast'", "a number"]),
        ("optimizer.learning_rate=nan", ["optimizer.learning_rate", "'nan'"]),
        ("optimizer.clip_norm=inf", ["optimizer.clip_norm", "'inf'"]),
        ("checkpoint.keep_steps=1,x", ["checkpoint.keep_steps", "each item a whole number"]),
        ("checkpoint.keep_steps=1,,2", ["checkpoint.keep_steps", "1,,2"]),
        ("model.d_modl=3", ["model.d_modl", "did you mean model.d_model?"]),
        ("d_model=3", ["d_model", "did you mean model.d_model?"]),
        ("train.volume=3", ["train.volume", "train takes steps, batch_size"]),
        ("nothing=3", ["nothing", "the config takes seed, data, model"]),
        ("seed.x=3", ["seed.x", "did you mean seed?"]),
        ("model.connection=nag", ["model.connection", "set model.connection.kind"]),
        ("train=3", ["train is a group"]),
        ("train.steps", ["'train.steps'", "key=value"]),
        ("model.connection.kind=nagg", ["model.connection.kind", "did you mean nag?", "prenorm"]),
        ("model.connection.kind=a:b:c", ["model.connection.kind", "package.module:Class"]),
        ("model.attention.kind=no_such.place:A", ["model.attention.kind", "no module no_such"]),
        (f"model.attention.kind={__name__}:Lost", ["model.attention.kind", "no class Lost"]),
        (f"model.attention.kind={__name__}:short", ["no class short"]),
        (f"model.attention.kind={__name__}:NoDefaults", ["NoDefaults", "defaults()"]),
        (f"model.attention.kind={__name__}:Untyped", ["attention.window", "None", "type"]),
        (f"optimizer.kind={__name__}:Shared", ["optimizer.learning_rate", "shared"]),
    ],
)
def test_a_mistake_on_the_command_line_is_named(assignment, words):
    sentence = refusal(config_lib.resolve, {}, [assignment])
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"train": {"steps": 0.5}}, ["train.steps", "0.5", "whole number"]),
        ({"train": {"steps": "5"}}, ["train.steps", "'5'"]),
        ({"train": {"steps": True}}, ["train.steps", "True"]),
        ({"train": {"steps": None}}, ["train.steps", "None"]),
        ({"train": {"taps": 1}}, ["train.taps", "true or false"]),
        ({"train": 5}, ["train is a group"]),
        ({"optimizer": {"learning_rate": float("nan")}}, ["optimizer.learning_rate", "nan"]),
        ({"checkpoint": {"keep_steps": 5}}, ["checkpoint.keep_steps", "tuple"]),
        ({"checkpoint": {"keep_steps": (0.5,)}}, ["checkpoint.keep_steps", "0.5"]),
        ({"model": {"connection": {"kind": 3}}}, ["model.connection.kind", "3"]),
        ({"model": {"connection": {"alpha_exponnet": 3}}}, ["did you mean model.connection.alpha"]),
        ({"train": {"steps": {"x": 1}}}, ["train.steps.x"]),
        ({"metrics": {"wandb": {}}}, ["metrics.wandb"]),
    ],
)
def test_a_mistake_in_a_config_file_is_named(overrides, words):
    sentence = refusal(config_lib.resolve, overrides)
    assert all(word in sentence for word in words), sentence


def test_a_users_kind_brings_its_own_leaves():
    config = config_lib.resolve(
        {"model": {"attention": {"kind": OWN, "window": 5}}},
        ["model.attention.inner.slope=1", "model.attention.names=x,y"],
    )
    assert config.model.attention.to_dict() == {
        "kind": OWN,
        "num_heads": 0,
        "window": 5,
        "names": ("x", "y"),
        "inner": {"slope": 1.0},
    }
    config_lib.validate(config)  # the rules for gqa's num_heads do not hold for it
    line = [f"model.attention.kind={OWN}", "model.attention.head_dim=8"]
    assert "attention kind gqa" in refusal(config_lib.resolve, {}, line)


@pytest.mark.parametrize("node", kinds.REGISTRY)
def test_what_a_users_kind_lacks_is_told(node):
    config = config_lib.resolve({f"{node}.kind": f"{__name__}:Bare"})
    sentence = refusal(config_lib.validate, config)
    assert f"{node}.kind" in sentence and "lacks" in sentence
    assert all(name in sentence for name in kinds.MEMBERS[node])
    for kind in kinds.REGISTRY[node]:
        cls = kinds.kind_class(node, kind)
        if cls is NoSkipping:  # has no sub-layers for which anything would be asked
            continue
        assert all(hasattr(cls, name) for name in kinds.MEMBERS[node])


def test_rates_of_a_users_roles_are_leaves():
    kind = f"{__name__}:WithRoles"
    config = config_lib.resolve({}, [f"model.feedforward.kind={kind}"])
    assert config.optimizer.rate_multiplier.to_dict() == {
        "embedding": 1.0,
        "scale": 1.0,
        "gate": 0.1,
        "conv": 0.5,
    }
    sentence = refusal(config_lib.resolve, {}, [f"model.feedforward.kind={__name__}:WrongRates"])
    assert "optimizer.rate_multiplier.conv must be a float, not 'fast'" in sentence
    line = ["model.connection.kind=prenorm", "optimizer.rate_multiplier.gate=1"]
    assert "belongs to connection kind nag" in refusal(config_lib.resolve, {}, line)
    file = {"optimizer.rate_multiplier.gate": 0.5}
    config = config_lib.resolve(file, ["model.connection.kind=prenorm"])
    assert config.optimizer.rate_multiplier.to_dict() == {
        "embedding": 1.0,
        "scale": 1.0,
        "head": 1.0,
    }


def test_a_module_that_fails_on_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "own_broken.py").write_text("import no_such_thing\n")
    (tmp_path / "own_wrong.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    sentence = refusal(config_lib.resolve, {"model.attention.kind": "own_broken:A"})
    assert "own_broken" in sentence and "no_such_thing" in sentence
    sentence = refusal(config_lib.resolve, {"model.attention.kind": "own_wrong:A"})
    assert "own_wrong" in sentence and "ZeroDivisionError" in sentence


def test_json_never_imports_a_users_class_unless_allowed(tmp_path, monkeypatch):
    (tmp_path / "own_part.py").write_text(
        "class Part:\n    @staticmethod\n    def defaults():\n        return {'width': 2}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    text = '{"model": {"attention": {"kind": "own_part:Part", "width": 3}}}'
    sentence = refusal(config_lib.from_json, text)
    assert "own_part:Part" in sentence and "allow_user_kinds" in sentence
    assert "own_part" not in sys.modules
    config, _ = config_lib.read_json(text, allow_user_kinds=True)
    assert config.model.attention.width == 3


def test_json_of_an_older_or_newer_version():
    config = config_lib.resolve({}, ["train.steps=7", "optimizer.clip_norm=2"])
    text = config_lib.to_json(config)
    older = text.replace('"steps": 7,', "").replace('"clip_norm": 2.0', '"clip_norm": 2')
    again, missing = config_lib.read_json(older)
    assert missing == ["train.steps"] and again.train.steps == 300
    assert type(again.optimizer.clip_norm) is float and again.optimizer.clip_norm == 2
    with pytest.warns(UserWarning, match=r"train\.steps"):
        config_lib.from_json(older)
    newer = text.replace('"steps": 7', '"steps": 7, "leaps": 8')
    assert "train.leaps" in refusal(config_lib.from_json, newer)
    assert "no JSON" in refusal(config_lib.from_json, text[:-4])
    assert "object" in refusal(config_lib.from_json, "[]")


def test_diff_lists_changed_and_absent_leaves():
    a = config_lib.resolve({"model.connection.kind": "nag", "model.d_model": 256})
    b = config_lib.resolve({"model.connection.kind": "prenorm", "model.d_model": 128})
    lines = config_lib.diff(a, b)
    assert "model.d_model: 256 -> 128" in lines
    assert "model.connection.head: (absent) -> 'tied'" in lines
    assert "model.connection.beta_init: 1.0 -> (absent)" in lines
    assert config_lib.diff(a, a) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("seed=-1", ["seed", "between 0"]),
        ("data.row_length=0", ["data.row_length", "at least 1"]),
        ("data.validation_share=1", ["data.validation_share", "below 1"]),
        ("data.workers=0", ["data.workers"]),
        ("data.source.kind=text", ["data.source.paths", "at least one file"]),
        ("data.source.kind=jsonl data.source.paths=()", ["data.source.paths"]),
        ("data.source.kind=huggingface", ["data.source.dataset", "non-empty"]),
        ("data.tokenizer.kind=bpe data.tokenizer.vocab_size=256", ["vocab_size", "at least 257"]),
        ("data.tokenizer.kind=sentencepiece", ["data.tokenizer.path", "non-empty"]),
        ("model.d_model=2", ["model.d_model", "at least 3"]),
        ("model.num_blocks=0", ["model.num_blocks"]),
        ("model.compute_dtype=float16", ["model.compute_dtype", "float32, bfloat16"]),
        ("model.remat=all", ["model.remat", "none", "dots_saveable"]),
        ("model.loss_chunk=-1", ["model.loss_chunk"]),
        ("model.connection.alpha_exponent=-1", ["model.connection.alpha_exponent"]),
        ("model.connection.gate_directions=0", ["model.connection.gate_directions"]),
        ("model.connection.beta_init=0", ["model.connection.beta_init", "above 0"]),
        ("model.connection.kind=prenorm model.connection.head=no", ["head", "tied, free"]),
        ("model.attention.num_heads=0", ["model.attention.num_heads"]),
        ("model.attention.head_dim=7", ["model.attention.head_dim", "even"]),
        (
            "model.attention.num_heads=6 model.attention.num_kv_heads=4",
            ["num_kv_heads", "1, 2, 3 or 6"],
        ),
        ("model.attention.rope_fraction=0.3", ["rope_fraction=0.3", "is 19.2", "even"]),
        ("model.attention.rope_fraction=0.5 model.attention.head_dim=6", ["is 3", "even"]),
        (
            "model.attention.kind=ccgqa model.attention.grouped_kernel=513",
            ["model.attention.grouped_kernel=513", "at most data.row_length=512"],
        ),
        ("model.loops=0", ["model.loops", "between 1 and 10000"]),
        ("model.loops=1000000000", ["model.loops", "between 1 and 10000"]),
        ("model.prelude_blocks=3 model.coda_blocks=3", ["num_blocks=6", "for the loop"]),
        ("model.feedforward.hidden=0", ["model.feedforward.hidden"]),
        (
            "model.skipping.kind=threshold model.connection.kind=prenorm",
            [
                "model.skipping.kind=threshold",
                "kind=prenorm",
                "allowed with it: nag, gated_prenorm",
            ],
        ),
        (
            "model.connection.kind=gated_prenorm model.skipping.kind=threshold "
            "model.skipping.score=rotation",
            ["model.skipping.score=rotation", "gated_prenorm", "allowed with it: gate"],
        ),
        (
            "model.skipping.kind=threshold model.skipping.score=rotation model.skipping.hard=false",
            ["model.skipping.hard=False", "score=gate"],
        ),
        (
            "model.skipping.kind=threshold model.skipping.ramp_start=0.5",
            ["model.skipping.ramp_end=0.15", "at least model.skipping.ramp_start=0.5"],
        ),
        ("model.skipping.kind=threshold model.skipping.rate=1", ["rate", "below 1"]),
        ("optimizer.learning_rate=-1", ["optimizer.learning_rate"]),
        ("optimizer.rate_multiplier.gate=-1", ["optimizer.rate_multiplier.gate"]),
        ("optimizer.embedding_decay=-1", ["optimizer.embedding_decay"]),
        ("optimizer.adam_b2=1", ["optimizer.adam_b2"]),
        ("optimizer.scaling=moonlight", ["optimizer.scaling", "moonshot", "keller"]),
        ("optimizer.momentum=1", ["optimizer.momentum"]),
        ("optimizer.schedule.warmup_steps=301", ["optimizer.schedule.warmup_steps", "300"]),
        ("train.steps=0", ["train.steps"]),
        ("train.accumulation=0", ["train.accumulation"]),
        ("train.accumulation=3", ["train.batch_size=16", "1, 2, 4, 8 or 16"]),
        ("train.nan_policy=pray", ["train.nan_policy", "stop, skip"]),
        ("train.profile_start=-2", ["train.profile_start"]),
        ("evaluation.every=0", ["evaluation.every"]),
        ("checkpoint.keep_last=0", ["checkpoint.keep_last"]),
        ("checkpoint.keep_best=-1", ["checkpoint.keep_best"]),
        ("checkpoint.keep_steps=0,5", ["checkpoint.keep_steps"]),
        ("checkpoint.keep_log_spaced=-1", ["checkpoint.keep_log_spaced"]),
        ("mesh.data=0", ["mesh.data"]),
        ("mesh.data=-1 mesh.fsdp=-1", ["mesh.data and mesh.fsdp are -1"]),
        ("mesh.data=1 mesh.tensor=-1 mesh.expert=-1", ["mesh.expert and mesh.tensor are -1"]),
    ],
)
def test_what_cannot_work_is_refused(line, words):
    sentence = refusal(config_lib.validate, config_lib.resolve({}, line.split()))
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(("head_dim", "fraction"), [(50, 0.28), (66, 1 / 3), (64, 0.0)])
def test_a_rotary_width_is_even_up_to_rounding(head_dim, fraction):
    line = [f"model.attention.head_dim={head_dim}", f"model.attention.rope_fraction={fraction}"]
    config_lib.validate(config_lib.resolve({}, line))


def test_every_number_outside_the_optimizer_has_a_rule():
    """The optimizer and its schedules check their own keys when they are built."""
    for spec in SPECS:
        for key, value in flatten(resolve_spec(spec)).items():
            if isinstance(value, str | bool) or key.startswith("optimizer."):
                continue
            assert key in RULES, key


def test_rules_name_only_keys_that_exist():
    known = {key for spec in SPECS for key in flatten(resolve_spec(spec))}
    assert RULES.keys() <= known
    assert config_lib.SMOKE.keys() <= known


@pytest.mark.parametrize(
    ("line", "devices", "words"),
    [
        ("mesh.data=3", 8, ["mesh.data=3", "must be 8"]),
        ("mesh.fsdp=3", 8, ["mesh.fsdp=3", "must be 8"]),
        ("train.batch_size=12", 8, ["train.batch_size=12", "8 devices", "8 or 16"]),
        ("train.accumulation=4", 8, ["train.batch_size=16", "4 rows", "multiple of 32"]),
        ("evaluation.batch_size=9", 2, ["evaluation.batch_size=9", "8 or 10"]),
        ("train.batch_size=10 mesh.expert=4", 8, ["8 devices cannot", "8 or 16"]),
        ("train.batch_size=10 mesh.tensor=2", 8, ["4 devices or groups of them", "8 or 12"]),
        ("model.d_model=250 mesh.fsdp=4", 8, ["model.d_model=250", "mesh.fsdp=4", "248 or 252"]),
        ("model.vocab_multiple=2 mesh.tensor=4", 8, ["model.vocab_multiple=2", "4", "1 or 2"]),
        ("model.feedforward.hidden=102 mesh.tensor=4", 8, ["feedforward.hidden=102", "100 or 104"]),
        (
            "model.attention.num_heads=6 mesh.tensor=4",
            8,
            ["model.attention.num_heads=6", "4 or 8", "1, 2, 3 or 6"],
        ),
        (
            "model.attention.num_heads=12 model.attention.num_kv_heads=6 mesh.tensor=4",
            8,
            ["num_kv_heads=6", "mesh.tensor=4", "num_kv_heads 1, 2, 4 or 12"],
        ),
    ],
)
def test_what_the_devices_cannot_share_is_refused(line, devices, words):
    config = config_lib.resolve({}, line.split())
    config_lib.validate(config)
    sentence = refusal(config_lib.validate_devices, config, devices)
    assert all(word in sentence for word in words), sentence


def test_parse_arg_reads_typed_arguments():
    args = config_lib.parse_arg("smoke,depth=12,rate=1", depth=6, rate=0.5, name="a")
    assert (args.smoke, args.depth, args.rate, args.name) == (True, 12, 1.0, "a")
    assert config_lib.parse_arg("").smoke is False
    assert "smoke, depth=6" in refusal(config_lib.parse_arg, "width=3", depth=6)
    assert "whole number" in refusal(config_lib.parse_arg, "depth=deep", depth=6)
    assert "needs a value" in refusal(config_lib.parse_arg, "depth", depth=6)


@pytest.mark.parametrize(
    ("source", "arg", "words"),
    [
        ("x = (\n", "", ["SyntaxError", "line 1"]),
        ("\n\nimport no_such_thing\n", "", ["line 3", "no_such_thing"]),
        ("def get_config(arg):\n    return 1 / 0\n", "", ["line 2", "ZeroDivisionError"]),
        ("x = 1\n", "", ["get_config"]),
        ("raise SystemExit('no')\n", "", ["line 1", "SystemExit: no"]),
        ("def get_config():\n    return {}\n", ":deep", ["takes no argument", "deep"]),
        ("def get_config(arg):\n    return 5\n", "", ["ConfigDict", "int"]),
        (
            "from nag_jax.config import parse_arg\ndef get_config(arg):\n    parse_arg(arg)\n",
            ":deep",
            ["'deep'", "smoke"],
        ),
    ],
)
def test_a_broken_config_file_is_named_with_its_line(tmp_path, source, arg, words):
    path = tmp_path / "broken.py"
    path.write_text(source)
    sentence = refusal(config_lib.load_config_file, f"{path}{arg}")
    assert all(word in sentence for word in [str(path), *words]), sentence


def test_a_config_file_that_is_not_there_is_named(tmp_path):
    assert "lost.py" in refusal(config_lib.load_config_file, f"{tmp_path}/lost.py:smoke")
    assert "path.py" in refusal(config_lib.load_config_file, "configs")
    (tmp_path / "folder.py").mkdir()
    assert "folder.py" in refusal(config_lib.load_config_file, f"{tmp_path}/folder.py")


def test_a_config_file_may_use_dotted_keys_and_no_argument(tmp_path):
    path = tmp_path / "dotted.py"
    path.write_text("def get_config():\n    return {'model.d_model': 64}\n")
    assert resolve_spec(str(path)).model.d_model == 64
