"""Every leaf of every config, overridden on the command line, changes what is built.

The table says for each leaf another value, what shows the change, and which other leaves must be
set for it to matter. A leaf without an entry fails, and so does one that changes nothing.
"""

import functools
import itertools
import json
import sys
from typing import NamedTuple

import override_probes as probes
import pytest
from small_models import SMALL
from test_config import SPECS, resolve_spec, short
from tokenizer_files import CORPUS, tokenizer_file

from nag_jax import config as config_lib
from nag_jax.dotted import flatten
from nag_jax.kinds import REGISTRY, kind_class
from nag_jax.models.feedforward import MLP

SMOKE = [spec for spec in SPECS if "smoke" in spec] + [
    f"{spec},smoke"
    for spec in SPECS
    if spec.rpartition(":")[2] not in ("", "smoke") and "smoke" not in spec
]


class Own(MLP):
    """A class of a user's own, wherever one may be named."""


class Leaf(NamedTuple):
    """How a leaf is tested.

    Attributes:
        value: The text of another value.
        probe: What shows the change.
        given: Other leaves that both sides set, as on the command line.
    """

    value: str
    probe: str
    given: tuple[str, ...] = ()


STEPWISE = ("checkpoint.every=1", "evaluation.every=1", "checkpoint.keep_best=0")

LEAVES: dict[str, Leaf] = {
    "seed": Leaf("1", "run"),
    "data.source.paths": Leaf("{folder}/{other}", "source"),
    "data.source.field": Leaf("body", "source"),
    "data.source.dataset": Leaf("other/data", "source"),
    "data.source.revision": Leaf("b" * 40, "source"),
    "data.source.subset": Leaf("part", "source"),
    "data.source.split": Leaf("test", "source"),
    "data.tokenizer.vocab_size": Leaf("300", "tokenizer"),
    "data.tokenizer.path": Leaf("{folder}/again/{file}", "tokenizer"),
    "data.tokenizer.pattern": Leaf("cl100k", "tokenizer"),
    "data.row_length": Leaf("5", "rows"),
    "data.validation_share": Leaf("0.7", "rows"),
    "data.validation_bytes": Leaf("1", "rows", ("data.validation_share=0.7",)),
    "data.cache_folder": Leaf("{folder}/other_cache", "rows"),
    "data.workers": Leaf("2", "encoding"),
    "data.prefetch_rows": Leaf("0", "run"),
    "model.d_model": Leaf("24", "model"),
    "model.num_blocks": Leaf("1", "model"),
    "model.loops": Leaf("2", "model"),
    "model.prelude_blocks": Leaf("1", "model"),
    "model.coda_blocks": Leaf("1", "model"),
    "model.vocab_multiple": Leaf("64", "model"),
    "model.compute_dtype": Leaf("bfloat16", "model"),
    "model.remat": Leaf("nothing_saveable", "gradient"),
    "model.loss_chunk": Leaf("2", "model"),
    "model.connection.alpha_exponent": Leaf("1", "model"),
    "model.connection.alpha_warmup_steps": Leaf("7", "model"),
    "model.connection.gate_directions": Leaf("5", "model"),
    "model.connection.gate_init_scale": Leaf("2", "model"),
    "model.connection.beta_init": Leaf("2", "model"),
    "model.connection.beta_trainable": Leaf("false", "model"),
    "model.connection.encode_gain_init": Leaf("2", "model"),
    "model.connection.embedding_std": Leaf("0.5", "model"),
    "model.connection.router_weight": Leaf("unit", "model", ("model.feedforward.kind=moe",)),
    "model.connection.head": Leaf("free", "model"),
    "model.connection.norm": Leaf("layer", "model"),
    "model.connection.norm_epsilon": Leaf("0.01", "model"),
    "model.attention.num_heads": Leaf("2", "model"),
    "model.attention.num_kv_heads": Leaf("1", "model"),
    "model.attention.head_dim": Leaf("8", "model"),
    "model.attention.rope_theta": Leaf("100", "model"),
    "model.attention.rope_fraction": Leaf("0", "model"),
    "model.attention.temperature_base": Leaf("1.5", "model"),
    "model.attention.temperature_sign": Leaf(
        "1", "model", ("model.attention.temperature_base=1.5",)
    ),
    "model.attention.qk_norm": Leaf("true", "model"),
    "model.attention.query_chunk": Leaf("6", "model"),
    "model.attention.implementation": Leaf("chunked", "implementations"),
    "model.attention.mixing": Leaf("reference", "implementations"),
    "model.connection.implementation": Leaf("reference", "implementations"),
    "model.strict_kernels": Leaf("true", "implementations"),
    "model.attention.depthwise_kernel": Leaf("3", "model"),
    "model.attention.grouped_kernel": Leaf("3", "model"),
    "model.feedforward.hidden": Leaf("12", "model"),
    "model.feedforward.num_experts": Leaf("3,5", "model"),
    "model.feedforward.top_k": Leaf("2", "model"),
    "model.feedforward.shared_hidden": Leaf("12", "model"),
    "model.feedforward.balance_rate": Leaf("0.1", "model"),
    "model.feedforward.load_balance_loss": Leaf("0.1", "model"),
    "model.feedforward.router_z_loss": Leaf("0.1", "model"),
    "model.feedforward.router_width": Leaf("5", "model"),
    "model.feedforward.implementation": Leaf("ragged_dot", "implementations"),
    "model.feedforward.exchange": Leaf("ragged", "implementations", ("mesh.expert=2",)),
    "model.skipping.rate": Leaf("0.3", "model"),
    "model.skipping.sublayers": Leaf("attention", "model"),
    "model.skipping.ramp_start": Leaf("0.1", "model"),
    "model.skipping.ramp_end": Leaf("0.2", "model"),
    "model.skipping.threshold_rate": Leaf("0.1", "model"),
    "model.skipping.score": Leaf("rotation", "model"),
    "model.skipping.hard": Leaf("false", "model"),
    "model.skipping.keys_values": Leaf("executed", "model"),
    "model.initialisation.std": Leaf("0.3", "model"),
    "model.initialisation.alpha_qk": Leaf("3", "model"),
    "model.initialisation.alpha_vo": Leaf("3", "model"),
    "model.initialisation.alpha_up": Leaf("3", "model"),
    "model.initialisation.alpha_down": Leaf("3", "model"),
    "optimizer.learning_rate": Leaf("0.01", "optimizer"),
    "optimizer.weight_decay": Leaf("0.2", "optimizer"),
    "optimizer.embedding_decay": Leaf("0.2", "optimizer"),
    "optimizer.clip_norm": Leaf("0", "optimizer"),
    "optimizer.adam_b1": Leaf("0.5", "optimizer"),
    "optimizer.adam_b2": Leaf("0.5", "optimizer"),
    "optimizer.adam_eps": Leaf("0.1", "optimizer"),
    "optimizer.rate_multiplier.embedding": Leaf("2", "optimizer"),
    "optimizer.rate_multiplier.scale": Leaf("2", "optimizer"),
    "optimizer.rate_multiplier.gate": Leaf("2", "optimizer"),
    "optimizer.rate_multiplier.router": Leaf("2", "optimizer"),
    "optimizer.rate_multiplier.conv": Leaf("2", "optimizer"),
    "optimizer.rate_multiplier.bias": Leaf("2", "optimizer"),
    "optimizer.rate_multiplier.head": Leaf("2", "optimizer", ("model.connection.head=free",)),
    "optimizer.momentum": Leaf("0.5", "optimizer"),
    "optimizer.nesterov": Leaf("false", "optimizer"),
    "optimizer.newton_schulz_steps": Leaf("2", "optimizer"),
    "optimizer.newton_schulz_dtype": Leaf("bfloat16", "optimizer"),
    "optimizer.scaling": Leaf("keller", "optimizer"),
    "optimizer.coefficients": Leaf("polar_express", "optimizer"),
    "optimizer.split_heads": Leaf("true", "optimizer"),
    "optimizer.b1": Leaf("0.5", "optimizer"),
    "optimizer.b2": Leaf("0.5", "optimizer"),
    "optimizer.shampoo_beta": Leaf("0.5", "optimizer"),
    "optimizer.eps": Leaf("0.1", "optimizer"),
    "optimizer.refresh_every": Leaf("3", "optimizer"),
    "optimizer.stagger": Leaf("true", "optimizer"),
    "optimizer.block_size": Leaf("5", "optimizer"),
    "optimizer.max_side": Leaf("5", "optimizer"),
    "optimizer.exponent": Leaf("0.5", "optimizer"),
    "optimizer.trace_scaling": Leaf("true", "optimizer"),
    "optimizer.grafting": Leaf("none", "optimizer"),
    "optimizer.graft_eps": Leaf("0.1", "optimizer"),
    "optimizer.initial_scale": Leaf("0.2", "optimizer"),
    "optimizer.clamp_floor": Leaf("5", "optimizer", ("optimizer.clamp_ceiling=1.0",)),
    "optimizer.clamp_ceiling": Leaf("2", "optimizer", ("optimizer.clamp_floor=1.0",)),
    "optimizer.schedule.warmup_steps": Leaf("4", "schedule"),
    "optimizer.schedule.decay_steps": Leaf("3", "schedule"),
    "optimizer.schedule.final_share": Leaf("0.5", "schedule"),
    "train.steps": Leaf("7", "run"),
    "train.batch_size": Leaf("4", "run"),
    "train.accumulation": Leaf("2", "traced_run"),
    "train.log_every": Leaf("2", "run"),
    "train.nan_policy": Leaf("skip", "traced_run"),
    "train.taps": Leaf("false", "traced_run"),
    "train.optimizer_diagnostics": Leaf("true", "traced_run"),
    "train.profile_start": Leaf("3", "run"),
    "train.profile_steps": Leaf("1", "run", ("train.profile_start=1", "train.steps=3")),
    "train.peak_flops": Leaf("5", "run"),
    "evaluation.every": Leaf("2", "run"),
    "evaluation.batch_size": Leaf("4", "run"),
    "checkpoint.every": Leaf("2", "run"),
    "checkpoint.keep_last": Leaf("3", "run", STEPWISE),
    "checkpoint.keep_best": Leaf("0", "run", STEPWISE[:2]),
    "checkpoint.keep_steps": Leaf("1,4", "run", STEPWISE),
    "checkpoint.keep_log_spaced": Leaf("1", "run", STEPWISE),
    "mesh.data": Leaf("4", "mesh", ("mesh.data=8", "mesh.fsdp=-1")),
    "mesh.fsdp": Leaf("2", "mesh"),
    "mesh.tensor": Leaf("2", "mesh"),
    "mesh.expert": Leaf("2", "mesh"),
    "metrics.tensorboard": Leaf("false", "run"),
    "metrics.wandb_project": Leaf("mine", "run"),
}

OF_A_RUN = [key for key, leaf in LEAVES.items() if leaf.probe in ("run", "traced_run")]

# Which probe shows another kind of a node, and the leaves that kinds need.
NODES = {
    "model.connection": "model",
    "model.attention": "model",
    "model.feedforward": "model",
    "model.skipping": "model",
    "model.initialisation": "model",
    "optimizer": "optimizer",
    "optimizer.schedule": "schedule",
    "data.source": "source",
    "data.tokenizer": "tokenizer",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, module_patch):
    """The files that sources and tokenizers are read from."""
    folder = tmp_path_factory.mktemp("files")
    for i in range(8):
        (folder / f"corpus{i}.txt").write_text(f"document {i}\n" + CORPUS[0] * (i + 1))
    (folder / "other.txt").write_text("another text\nof two lines")
    lines = [{"text": text, "body": text[::-1]} for text in (*CORPUS, "more")]
    for name in ("corpus", "other"):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        _write_parquet(folder / f"{name}.parquet", lines)
        lines.pop()
    for kind in ("tokenizers_json", "sentencepiece", "tiktoken"):
        for place in (folder, folder / "again"):
            place.mkdir(exist_ok=True)
            file = tokenizer_file(kind, place)
    _change(folder / "again")
    assert file.parent == folder / "again"
    module_patch.setitem(sys.modules, "datasets", probes.Hub())
    return folder


@pytest.fixture(scope="module")
def module_patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def _write_parquet(path, lines):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(lines), path)


def _change(folder):
    """Other tokenizers: a merge or a token fewer, and a model of another size."""
    import sentencepiece

    content = json.loads((folder / "own.json").read_text())
    content["model"]["vocab"].popitem()
    content["model"]["merges"].pop()
    (folder / "own.json").write_text(json.dumps(content))
    ranks = (folder / "some.tiktoken").read_bytes().splitlines(keepends=True)
    (folder / "some.tiktoken").write_bytes(b"".join(ranks[:-1]))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(folder / "sp"),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )


FILES = {"tokenizers_json": "own.json", "sentencepiece": "sp.model", "tiktoken": "some.tiktoken"}
PATTERNS = {"text": "corpus*.txt", "jsonl": "corpus.jsonl", "parquet": "corpus.parquet"}


def base_lines(leaves, folder):
    """Small sizes, and the files that the chosen kinds need, where these leaves exist."""
    wanted = {
        **SMALL,
        "data.cache_folder": f"{folder}/cache",
        "data.source.paths": f"{folder}/{PATTERNS.get(leaves['data.source.kind'])}",
        "data.source.dataset": "some/data",
        "data.source.revision": "a" * 40,
        "data.tokenizer.path": f"{folder}/{FILES.get(leaves['data.tokenizer.kind'])}",
        "data.row_length": 16,
        "data.validation_share": 0.3,
        "data.tokenizer.vocab_size": 280,
        "optimizer.schedule.warmup_steps": 2,
        "optimizer.schedule.decay_steps": 2,
        "optimizer.learning_rate": 0.003,
        "optimizer.rate_multiplier.scale": 1.0,
        "train.log_every": 1,
        "evaluation.every": 3,
    }
    return [f"{key}={value}" for key, value in wanted.items() if key in leaves]


class Probes:
    """Runs probes, each once for what it depends on."""

    # The nodes that a probe depends on.
    NEEDS = {
        "model": ("model",),
        "implementations": ("model", "mesh"),
        "gradient": ("model",),
        "optimizer": ("model", "optimizer", "train.steps"),
        "schedule": ("optimizer", "train.steps"),
        "source": ("data.source",),
        "tokenizer": ("data.tokenizer",),
        "rows": ("data",),
        "encoding": ("data",),
        "mesh": ("mesh", "train", "evaluation"),
        "run": ("seed", "data.prefetch_rows", "train", "evaluation", "checkpoint", "metrics"),
    }
    NEEDS["traced_run"] = NEEDS["run"]
    # A run is of one small model and corpus: nothing that it shows depends on either.
    RUN = {
        "model.connection.kind": "prenorm",
        "optimizer.kind": "adamw",
        "optimizer.schedule.kind": "constant",
        "optimizer.schedule.warmup_steps": 0,
        "data.source.kind": "text",
        "data.tokenizer.kind": "bytes",
    }

    def __init__(self, folder):
        self._folder = folder
        self._numbers = itertools.count()
        self._shown = {}

    def __call__(self, name, config):
        leaves = {
            key: value
            for key, value in flatten(config).items()
            if any(f"{key}.".startswith(f"{node}.") for node in self.NEEDS[name])
        }
        key = (name, json.dumps(leaves, sort_keys=True))
        if key not in self._shown:
            probe = functools.partial(self._run, leaves) if "run" in name else None
            if name == "traced_run":
                probe = functools.partial(probe, trace=True)
            config_lib.validate(config)
            self._shown[key] = (probe or getattr(probes, name))(config)
        return self._shown[key]

    def _run(self, leaves, config, trace=False):
        given = self.RUN | leaves
        known = flatten(config_lib.resolve({k: v for k, v in given.items() if ".kind" in k}))
        lines = base_lines(known, self._folder)
        config = config_lib.resolve(given, [line for line in lines if line.split("=")[0] in SIZES])
        return probes.run(config, self._folder / f"run{next(self._numbers)}", trace)


SIZES = {*SMALL, "data.cache_folder", "data.source.paths", "data.row_length"}


@pytest.fixture(scope="module")
def shown(folder):
    return Probes(folder)


load_config_file = functools.cache(config_lib.load_config_file)


@functools.cache
def leaves_of(spec, kinds):
    return flatten(config_lib.resolve(load_config_file(spec), kinds))


def resolve(spec, folder, lines):
    leaves = leaves_of(spec, tuple(line for line in lines if ".kind=" in line))
    return config_lib.resolve(load_config_file(spec), [*base_lines(leaves, folder), *lines])


def together(specs):
    """Configs grouped by the kinds of their model and optimizer: one probe serves them all."""
    groups = {}
    for spec in specs:
        leaves = flatten(resolve_spec(spec))
        kinds = tuple(leaves[f"{node}.kind"] for node in NODES if not node.startswith("data"))
        groups.setdefault(kinds, []).append(spec)
    return list(groups.values())


def is_kind(key):
    return key.endswith(".kind")


def owner(key, leaves):
    """The kind that a leaf belongs to, or None for a shared one."""
    node = max((node for node in NODES if key.startswith(f"{node}.")), key=len, default=None)
    return node and leaves[f"{node}.kind"]


@functools.cache
def first_with():
    """The first config with each leaf under each kind it may belong to: it is tested there."""
    first = {}
    for spec in SMOKE:
        leaves = flatten(resolve_spec(spec))
        for key in leaves:
            first.setdefault((key, owner(key, leaves)), spec)
    return first


def marks(specs):
    """What has few leaves of its own, or takes long, is beside the default suite."""
    more = (
        "optimizers_small.py",
        "nag_mod_small.py:connection=",
        "feedforward=moe_zaya",
        "demo.py",
    )
    return [pytest.mark.slow] if any(words in specs[0] for words in more) else []


@pytest.mark.parametrize(
    "specs",
    [pytest.param(specs, marks=marks(specs), id=short(specs[0])) for specs in together(SMOKE)],
)
def test_every_override_changes_what_is_built(specs, folder, shown):
    unchanged = [what for spec in specs for what in overrides_without_effect(spec, folder, shown)]
    assert not unchanged


def overrides_without_effect(spec, folder, shown):
    base = resolve(spec, folder, [])
    leaves = flatten(base)
    for key, value in leaves.items():
        if is_kind(key) or key in OF_A_RUN or first_with()[key, owner(key, leaves)] != spec:
            continue
        leaf = LEAVES[key]
        names = {"folder": folder}
        names["file"] = FILES.get(base.data.tokenizer.kind)
        names["other"] = PATTERNS.get(base.data.source.kind, "").replace("corpus", "other")
        given = [line.format(**names) for line in leaf.given]
        override = f"{key}={leaf.value.format(**names)}"
        before = resolve(spec, folder, given) if given else base
        after = resolve(spec, folder, [*given, override])
        assert flatten(after)[key] != flatten(before)[key], override
        if shown(leaf.probe, before) == shown(leaf.probe, after):
            yield spec, key, value, leaf.value


@pytest.mark.parametrize("key", OF_A_RUN)
def test_every_override_of_a_run_changes_what_it_does(key, folder, shown):
    """Every config has these leaves, and what they do depends on no kind."""
    leaf = LEAVES[key]
    before = resolve(SMOKE[0], folder, leaf.given)
    after = resolve(SMOKE[0], folder, [*leaf.given, f"{key}={leaf.value}"])
    assert flatten(after)[key] != flatten(before)[key]
    assert shown(leaf.probe, before) != shown(leaf.probe, after)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(specs[0], marks=marks(specs), id=short(specs[0]))
        for specs in together(SMOKE)
        # One of them shows the other kinds of optimizers.
        if "optimizers_small.py:optimizer=" not in specs[0]
    ],
)
def test_every_kind_changes_what_is_built(spec, folder, shown):
    def with_two_experts(*lines):
        """Two for each token, where there are any: residual-free models refuse one."""
        two = ["model.feedforward.top_k=2"]
        has_experts = "top_k" in resolve(spec, folder, lines).model.feedforward
        return resolve(spec, folder, [*lines, *(two if has_experts else ())])

    base = with_two_experts()
    for node, probe in NODES.items():
        for kind in REGISTRY[node]:
            config = with_two_experts(f"{node}.kind={kind}")
            if cannot_skip(config):
                continue
            same_kind = flatten(config)[f"{node}.kind"] == flatten(base)[f"{node}.kind"]
            assert (shown(probe, config) == shown(probe, base)) == same_kind, (node, kind)


def cannot_skip(config):
    """Whether a model is to skip without a gate, which is refused."""
    connection = kind_class("model.connection", config.model.connection.kind)
    return config.model.skipping.kind != "none" and not getattr(connection, "gated", False)


def test_a_users_class_changes_what_is_built(folder, shown):
    base = resolve(SMOKE[0], folder, [])
    line = f"model.feedforward.kind={__name__}:Own"
    assert shown("model", resolve(SMOKE[0], folder, [line])) != shown("model", base)


def test_the_table_is_complete_and_knows_no_other_leaf():
    leaves = {key for spec in SPECS for key in flatten(resolve_spec(spec))}
    assert {key for key in leaves if not is_kind(key)} == set(LEAVES)
    assert {key.removesuffix(".kind") for key in leaves if is_kind(key)} == set(NODES)
    for spec in SPECS:
        assert set(OF_A_RUN) <= flatten(resolve_spec(spec)).keys()
    # A smoke config has the leaves of the config it shrinks, and of files in place of the library.
    smoke = {key for spec in SMOKE for key in flatten(resolve_spec(spec))}
    assert smoke == leaves


def test_probes_are_the_same_for_the_same_config(folder):
    config = resolve(SMOKE[0], folder, [])
    for name in ("model", "gradient", "optimizer", "schedule", "tokenizer"):
        first = getattr(probes, name)(config)
        probes._model.cache_clear()
        assert getattr(probes, name)(config) == first, name
