"""What every configured part must keep, as measurements that name the part that breaks it.

The contracts are those of docs/architecture.md: an output depends on earlier tokens of its own
document alone, decoding over a cache gives what the whole row gives, a mesh gives what one device
gives, parameters are declared, gradients are finite, `describe` says direction and size. Each runs
the configured model on a few short rows. `probe` is the part of it that every training run does.
"""

import dataclasses
import functools
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from nag_jax.errors import UserError
from nag_jax.kinds import kind_class
from nag_jax.models.blocks import Carry
from nag_jax.models.context import BranchOut, Context, positions_in_document
from nag_jax.models.linear import Numerics
from nag_jax.models.stages import stages_of
from nag_jax.models.transformer import LanguageModel, build_model
from nag_jax.parameters import flatten
from nag_jax.sharding import rules
from nag_jax.sharding.mesh import make_mesh

PARTS = ("attention", "feedforward", "connection")

TINY = 1e-30  # outputs that are all zero are not divided by zero
LENGTH = 64  # tokens of a row, where the config's rows are not shorter
VOCABULARY = 48
PROMPTS = (1, 2, 3, 17)
MESH = {"data": 2, "fsdp": 2, "tensor": 1, "expert": 1}

# How far two results may lie apart, over the largest one, by compute dtype. Where the same program
# runs with other values elsewhere in the row, most parts give the same bits.
SAME_PROGRAM = {"float32": 1e-5, "bfloat16": 4e-3}
# Blocks without skip connections enlarge rounding: the logits of such a model, trained, were 4e-5
# from those in float64.
OTHER_PROGRAM = {"float32": 1e-4, "bfloat16": 4e-2}
# Sums over all tokens, in another order, whose terms may cancel.
GRADIENTS = {"float32": 1e-4, "bfloat16": 2e-1}

# Halves the time to compile; the program runs once.
QUICK_CPU_COMPILATION = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


class Broken(Exception):
    """A contract does not hold; says what was measured and, where that can be told, whose it is."""


class NotChecked(Exception):
    """A contract cannot be checked here; says why."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Outcome of one contract.

    Attributes:
        name: The contract's.
        holds: Whether it holds; None where it was not checked.
        text: One sentence: what was measured, and what part is to blame where that can be told.
    """

    name: str
    holds: bool | None
    text: str


@dataclasses.dataclass(frozen=True)
class Case:
    """What is checked.

    Attributes:
        model: The configured model over a small vocabulary.
        params: Its parameters, without zeros (see `without_zeros`).
        length: Tokens of a row.
    """

    model: LanguageModel
    params: dict[str, Any]
    length: int

    @functools.cached_property
    def one_device(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Nats and flat gradients of `_packed_batch` on one device."""
        nats, gradients = jax.jit(_nats_and_gradients(self.model))(
            self.params, _packed_batch(self.length)
        )
        return np.asarray(nats), {path: np.asarray(g) for path, g in flatten(gradients).items()}

    @functools.cached_property
    def _jitted_logits(self) -> Callable:
        model = self.model

        def logits(params, tokens, segment_ids, step):
            return model.logits(params, tokens, segment_ids, step, model.initial_balance())

        return jax.jit(logits)

    def logits(self, tokens: np.ndarray, segment_ids: np.ndarray | None) -> np.ndarray:
        """Logits [B, T, V] of at most four rows; all calls run two programs, packed and not.

        Raises:
            Broken: They are not finite.
        """
        count, columns = tokens.shape
        padded = np.zeros((len(PROMPTS), self.length), np.int32)
        padded[:count, :columns] = tokens
        if segment_ids is not None:
            segment_ids = np.resize(segment_ids, padded.shape)
        run = self._jitted_logits
        logits = np.asarray(run(self.params, padded, segment_ids, self.model.warmup_steps))
        logits = logits[:count, :columns]
        if not np.isfinite(logits).all():
            _, position = np.argwhere(~np.isfinite(logits).all(axis=-1))[0]
            raise Broken(f"the logits at position {position} are not finite")
        return logits

    @functools.cached_property
    def leaked_gradients(self) -> dict[str, float]:
        """How large the gradient is that each leak of `leak_rows` would have no part of.

        By the leak's name: that of outputs that must not move, to the tokens that must not move
        them, over the largest to any token.
        """
        rows = leak_rows(self.length, self.model.vocab_size)
        table = self.params["table"]["rows"]

        def outputs(table):
            changed = {**self.params, "table": {**self.params["table"], "rows": table}}
            return _final_states(self.model, changed, rows.tokens[:1], rows.segment_ids[:1])

        def shares(table):
            out, pull = jax.vjp(outputs, table)
            weights = jax.random.normal(jax.random.key(0), out.shape, out.dtype)
            found = {}
            for leak in rows.leaks():
                kept = jnp.zeros_like(out).at[:, leak.unmoved].set(weights[:, leak.unmoved])
                sizes = jnp.max(jnp.abs(pull(kept)[0]), axis=-1)
                part = jax.lax.dynamic_slice_in_dim(sizes, leak.group * rows.group, rows.group)
                found[leak.name] = jnp.max(part) / jnp.max(sizes)
            return found

        return {name: float(share) for name, share in jax.jit(shares)(table).items()}


def check_config(config: ConfigDict, max_parameters: int) -> Iterator[Result]:
    """Runs all contracts on a config's parts, one after the other.

    Args:
        config: Complete, validated config.
        max_parameters: Refuse a model of more.

    Yields:
        The results, in the order of `CONTRACTS` after "parameters declared". Whatever a part raises
        is a contract that does not hold; where the model cannot be built the others are not
        checked.

    Raises:
        UserError: The model is too large.
    """
    name = "parameters declared"
    try:
        model = build_model(config, VOCABULARY)
    except UserError:
        raise
    except Exception as error:
        yield Result(name, False, _what_was_raised(error, config.model))
        for other in CONTRACTS:
            yield Result(other, None, "the model could not be built")
        return
    infos = flatten(model.infos).values()
    size = sum(info.size for info in infos)
    if size > max_parameters:
        raise UserError(
            f"the model has {size:,} parameters, more than --max_parameters={max_parameters:,}: "
            "the tests need no such size, so give fewer or narrower blocks (--config=...:smoke "
            "shrinks any config)"
        )
    roles = ", ".join(sorted({info.role for info in infos}))
    yield Result(name, True, f"all {len(infos)} have axes and a role ({roles})")
    case = make_case(config, model)
    for name in CONTRACTS:
        yield check(name, case)


def make_case(config: ConfigDict, model: LanguageModel) -> Case:
    """The case of a model that was built from a config."""
    init = jax.jit(lambda key: without_zeros(model, model.init(key)))
    params = init(jax.random.key(config.seed))
    return Case(model, params, min(LENGTH, config.data.row_length))


def check(name: str, case: Case) -> Result:
    """Runs one contract of `CONTRACTS`."""
    try:
        return Result(name, True, CONTRACTS[name](case))
    except Broken as error:
        return Result(name, False, str(error))
    except NotChecked as error:
        return Result(name, None, str(error))
    except Exception as error:
        return Result(name, False, _what_was_raised(error, case.model.options))


def probe(model: LanguageModel, params: dict[str, Any], mesh: Mesh, row_length: int) -> bool:
    """Looks with one short forward pass whether an output depends on what it must not see.

    Args:
        model: The model that is to be trained.
        params: Its parameters on `mesh`; exact zeros are filled for the pass, since a branch behind
            one would not be seen.
        mesh: Where they live.
        row_length: Tokens of a row.

    Returns:
        Whether there was anything to look at: not where rows hold fewer than three tokens.

    Raises:
        UserError: It does; names the position and, where that can be told, the part.
    """
    length = min(LENGTH, row_length)
    if length < 3:
        return False
    rows = leak_rows(length, model.vocab_size)
    count = -(-len(rows.tokens) // rules.batch_shards(mesh)) * rules.batch_shards(mesh)
    sharding = rules.batch_sharding(mesh)
    tokens, segment_ids = (
        jax.make_array_from_callback(x.shape, sharding, lambda index, x=x: x[index])
        for x in (np.resize(x, (count, length)) for x in (rows.tokens, rows.segment_ids))
    )

    def states(params, tokens, segment_ids):
        return _final_states(model, without_zeros(model, params), tokens, segment_ids)

    on_cpu = mesh.devices.flat[0].platform == "cpu"
    run = jax.jit(
        states,
        out_shardings=NamedSharding(mesh, P()),
        compiler_options=QUICK_CPU_COMPILATION if on_cpu else None,
    )
    with jax.set_mesh(mesh):
        values = np.asarray(run(params, tokens, segment_ids))
        if not np.isfinite(values).all():
            return True  # the first step tells what to do about it
        for leak in rows.leaks():
            try:
                _require_no_leak(values, leak, model)
            except Broken as error:
                blamed = _blamed_for_leak(model, params, rows, leak.name)
                raise UserError(
                    f"{error}; {blamed}. No such model is trained: `python -m nag_jax.check` with "
                    "the same --config runs all contract tests on it"
                ) from error
    return True


def without_zeros(model: LanguageModel, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters with small numbers in place of zeros, but for the token table.

    A branch behind a gain or a projection that starts at zero would pass every test unseen.
    """

    def fill(info, leaf):
        if info.role == "embedding":
            return leaf
        small = 0.1 * jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape)
        return jnp.where(leaf == 0, small, leaf)

    return jax.tree.map(fill, model.infos, params)


# --- causality and isolation ---


class Leak(NamedTuple):
    """A way for something to be where it must not be seen.

    Attributes:
        name: "causality" or "document isolation".
        change: What was changed, in words.
        row: Row of `LeakRows` in which it was.
        unmoved: Positions whose outputs must be those of row 0.
        group: Number of the group of tokens that must have no gradient from there.
    """

    name: str
    change: str
    row: int
    unmoved: slice
    group: int


class LeakRows(NamedTuple):
    """Three rows of two documents each: row 1 has another end, row 2 another first document.

    Attributes:
        tokens: [3, T]; the first document, the second until `cut` and the end draw theirs from
            three groups.
        segment_ids: [3, T].
        boundary: Where the second document begins.
        cut: Where the end begins.
        group: Tokens in a group.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    boundary: int
    cut: int
    group: int

    def leaks(self) -> tuple[Leak, Leak]:
        """From the end to what is before, and from the first document to the second."""
        later = f"tokens from position {self.cut} on"
        other = f"tokens of another document, before position {self.boundary},"
        return (
            Leak("causality", later, 1, slice(0, self.cut), 2),
            Leak("document isolation", other, 2, slice(self.boundary, None), 0),
        )


def leak_rows(length: int, vocab_size: int) -> LeakRows:
    """Rows of at least three tokens from a vocabulary of at least six."""
    boundary = length // 3
    cut, group = (boundary + length) // 2, vocab_size // 3
    places = np.arange(length)
    part = (places >= boundary).astype(np.int32) + (places >= cut)
    drawn = np.random.default_rng(0).integers(0, group, length)
    rows = [(drawn + (part == changed)) % group + group * part for changed in (-1, 2, 0)]
    segment_ids = np.tile(1 + (places >= boundary), (3, 1))
    return LeakRows(np.int32(rows), segment_ids.astype(np.int32), boundary, cut, group)


def _require_no_leak(values: np.ndarray, leak: Leak, model: LanguageModel) -> float:
    """The largest change over the largest value, of outputs [3, T, ...] that must not move.

    Raises:
        Broken: It is above the tolerance.
    """
    values = np.asarray(values, np.float64).reshape(*values.shape[:2], -1)
    change = np.abs(values[leak.row] - values[0]).max(axis=-1)[leak.unmoved]
    change = change / max(np.abs(values).max(), TINY)
    allowed = _allowed(model, SAME_PROGRAM)
    if not change.max() <= allowed:
        position = np.flatnonzero(~(change <= allowed))[0]
        raise Broken(
            f"the output at position {(leak.unmoved.start or 0) + position} of a row changed when "
            f"only {leak.change} were changed (by {change[position]:.1e} of the largest output; "
            f"allowed {allowed:g})"
        )
    return float(change.max())


def causality(case: Case) -> str:
    """Later tokens change no earlier output, and have no gradient from one."""
    rows = _leak_rows_of(case)
    leak, _ = rows.leaks()
    packed = _no_leak(case, rows, leak, rows.segment_ids)
    alone = _no_leak(case, rows, leak, None)  # each row one document
    return (
        f"{leak.change} move no earlier output (by {max(packed, alone):.1g} of the largest) and "
        "get no gradient from one"
    )


def document_isolation(case: Case) -> str:
    """A document of a packed row gives what it gives alone, whatever is before it."""
    rows = _leak_rows_of(case)
    _, leak = rows.leaks()
    _no_leak(case, rows, leak, rows.segment_ids)
    packed = case.logits(rows.tokens, rows.segment_ids)[:1, rows.boundary :]
    alone = case.logits(rows.tokens[:1, rows.boundary :], None)
    apart = _largest_difference(packed, alone)
    allowed = _allowed(case.model, OTHER_PROGRAM)
    if not apart <= allowed:
        raise Broken(
            f"a document at position {rows.boundary} of a row gives other outputs than alone (by "
            f"{apart:.1e} of the largest; allowed {allowed:g}), although what is before it changes "
            "nothing: something counts positions from the row's start (context.positions starts "
            f"anew in each document), likely {_name(case.model, 'attention')}"
        )
    return (
        f"{leak.change} move nothing after it, and the document after it gives what it gives alone "
        f"(to {apart:.1g} of the largest output)"
    )


def _leak_rows_of(case: Case) -> LeakRows:
    if case.length < 3:
        raise NotChecked(f"rows of {case.length} tokens (data.row_length) have nothing to leak")
    return leak_rows(case.length, case.model.vocab_size)


def _no_leak(case: Case, rows: LeakRows, leak: Leak, segment_ids: np.ndarray | None) -> float:
    """The largest change of logits that must not move; `Broken` above the tolerance.

    So is a gradient from them, where it is finite: if not, that is another contract's.
    """
    try:
        size = _require_no_leak(case.logits(rows.tokens, segment_ids), leak, case.model)
        share, allowed = case.leaked_gradients[leak.name], _allowed(case.model, SAME_PROGRAM)
        if share > allowed:
            places = range(case.length)[leak.unmoved]
            raise Broken(
                f"outputs at positions {places[0]} to {places[-1]} have a gradient to "
                f"{leak.change} ({share:.1e} of their largest; allowed {allowed:g})"
            )
    except Broken as error:
        blamed = _blamed_for_leak(case.model, case.params, rows, leak.name)
        raise Broken(f"{error}; {blamed}") from error
    return size


def _final_states(
    model: LanguageModel, params: dict[str, Any], tokens: Any, segment_ids: Any
) -> Float[Array, "B T features"]:
    """What logits are made of: hidden states and log-scales, at least float32."""
    context = _context(model, segment_ids)
    out = model.module(params)(jnp.asarray(tokens), context, model.initial_balance())
    hidden = out.hidden.astype(out.log_scale.dtype)
    return jnp.concatenate([hidden, out.log_scale[..., None]], axis=-1)


# --- which part it is ---


def _name(model: LanguageModel, part: str) -> str:
    return f"model.{part}.kind={model.options[part].kind}"


def _context(model: LanguageModel, segment_ids: np.ndarray) -> Context:
    segment_ids = jnp.asarray(segment_ids)
    return Context(
        segment_ids=segment_ids,
        positions=positions_in_document(segment_ids),
        valid=segment_ids > 0,
        gain_warmup=model.gain_warmup(model.warmup_steps),
        taps=False,
    )


def _part_alone(
    model: LanguageModel, part: str, params: dict[str, Any], x: Array, context: Context
) -> Float[Array, "B T features"]:
    """Output of one part of the first block for inputs [B, T, d], at least float32.

    For the connection (with its two ends) they are the embeddings, and the branch's output is made
    of the same token's.
    """
    module, numerics = model.module(params), Numerics(model.options.compute_dtype)
    stage_name = module.stage_names[0]
    stage = getattr(module, stage_name)
    block_name = stage.sizes.block_names[0]
    definition, stacked = nnx.split(getattr(stage, block_name))
    block = nnx.merge(definition, jax.tree.map(lambda leaf: leaf[0], stacked))
    x, dtype = x.astype(numerics.dtype), numerics.statistics_dtype
    if part != "connection":
        balance = model.initial_balance().get(stage_name, {}).get(block_name, {}).get(part, {})
        context = dataclasses.replace(
            context,
            balance=jax.tree.map(lambda leaf: leaf[0], balance),
            memo=module.initial_memo(x.shape[:2]).get(part, {}),
        )
        return getattr(block, part).branch(x, None, context).y.astype(dtype)
    connection = block.attention.connection
    stream = module.ends.start(x)
    read = connection.read(stream)
    out = BranchOut(jnp.flip(x, axis=-1))
    written = connection.write(stream, out, connection.gate(read), context)
    hidden, log_scale = module.ends.finish(written.stream)
    return jnp.concatenate([a.astype(dtype) for a in (read, hidden, log_scale[..., None])], axis=-1)


def _parts_alone(model: LanguageModel, segment_ids: np.ndarray) -> Callable:
    """(parameters, inputs [B, T, d]) -> output of each part alone, whole on every device."""

    def outputs(params, x):
        params, context = without_zeros(model, params), _context(model, segment_ids)
        alone = {part: _part_alone(model, part, params, x, context) for part in PARTS}
        return {part: rules.constrain(y, None, None, None) for part, y in alone.items()}

    return outputs


def _inputs_alone(model: LanguageModel, tokens: np.ndarray) -> np.ndarray:
    """A random vector of width d for each token."""
    rng = np.random.default_rng(1)
    return rng.normal(size=(model.vocab_size, model.options.d_model)).astype(np.float32)[tokens]


def _blamed_for_leak(
    model: LanguageModel, params: dict[str, Any], rows: LeakRows, name: str
) -> str:
    """The parts that do it alone, in words."""

    (leak,) = (leak for leak in rows.leaks() if leak.name == name)
    guilty = []
    run = jax.jit(_parts_alone(model, rows.segment_ids))
    for part, y in run(params, _inputs_alone(model, rows.tokens)).items():
        try:
            _require_no_leak(np.asarray(y), leak, model)
        except Broken:
            guilty.append(part)
    return _in_words(model, guilty)


def _in_words(model: LanguageModel, guilty: list[str]) -> str:
    if not guilty:
        return "no part of the first block does so alone"
    return f"the part that does so is {' and '.join(_name(model, part) for part in guilty)}"


# --- the other contracts ---


def cached_decoding(case: Case) -> str:
    """Prompts padded on their left, and each token after them, give the logits of the whole row."""
    model, params, length = case.model, case.params, case.length
    prompts = [n for n in PROMPTS if n < length]
    if not prompts:
        raise NotChecked(f"rows of {length} tokens (data.row_length) have nothing to decode")
    tokens = np.random.default_rng(2).integers(0, model.vocab_size, (len(prompts), length))
    tokens = tokens.astype(np.int32)
    whole = case.logits(tokens, None)
    padded = np.zeros_like(tokens)
    for row, n in enumerate(prompts):
        padded[row, length - n :] = tokens[row, :n]
    start = length - np.array(prompts, np.int32)
    prefill, advance = jax.jit(model.prefill, static_argnums=3), jax.jit(model.decode_step)
    told = model.warmup_steps, model.initial_balance()
    logits, state = prefill(params, padded, start, 2 * length, *told)
    allowed, scale = _allowed(model, OTHER_PROGRAM), max(np.abs(whole).max(), TINY)
    largest = 0.0
    for added in range(length - max(prompts) + 1):
        places = np.array(prompts) + added - 1
        expected = whole[np.arange(len(prompts)), places]
        apart = np.abs(np.asarray(logits) - expected).max(axis=-1) / scale
        if not apart.max() <= allowed:
            row = int(np.argmax(np.nan_to_num(apart, nan=np.inf)))
            raise Broken(
                f"after a prompt of {prompts[row]} and {added} more tokens logits are not those of "
                f"the whole row (by {apart[row]:.1e} of the largest; allowed {allowed:g}); "
                + _blamed_for_decoding(case)
            )
        largest = max(largest, float(apart.max()))
        if added < length - max(prompts):
            following = tokens[np.arange(len(prompts)), places + 1]
            logits, state = advance(params, following, state, *told)
    lengths = ", ".join(map(str, prompts))
    return (
        f"prompts of {lengths} tokens, padded to {length}, and {added} tokens after each: the "
        f"whole row's logits (to {largest:.1g} of the largest)"
    )


def _blamed_for_decoding(case: Case) -> str:
    """Feed-forward and connection see a token at a time; where both do, it is the attention."""
    model, guilty = case.model, []
    segment_ids = np.ones((2, min(case.length, 4)), np.int32)
    x = _inputs_alone(model, np.arange(segment_ids.size).reshape(segment_ids.shape) % VOCABULARY)
    for part in ("feedforward", "connection"):
        whole = _part_alone(model, part, case.params, x, _context(model, segment_ids))
        last = _part_alone(
            model, part, case.params, x[:, -1:], _context(model, segment_ids[:, -1:])
        )
        if not _largest_difference(last, whole[:, -1:]) <= _allowed(model, OTHER_PROGRAM):
            guilty.append(
                f"{_name(model, part)} gives a token other outputs without its neighbours"
            )
    if guilty:
        return " and ".join(guilty)
    own = hasattr(kind_class("model.attention", model.options.attention.kind), "cache_shapes")
    how = "with the cache it keeps" if own else "run again on its inputs, since it keeps no cache"
    return f"that leaves {_name(model, 'attention')}, {how}"


def finite_gradients(case: Case) -> str:
    """The loss and every parameter's gradient are finite on packed rows with padding."""
    nats, gradients = case.one_device
    if not np.isfinite(nats).all():
        raise Broken(f"the loss is not finite; {_blamed_for_gradients(case)}")
    bad = [path for path, gradient in gradients.items() if not np.isfinite(gradient).all()]
    if bad:
        raise Broken(
            f"the gradient of {_some(bad)} is not finite, {len(bad)} of {len(gradients)} leaves; "
            + _blamed_for_gradients(case)
        )
    text = f"all {len(gradients)} leaves, in {case.model.options.compute_dtype}"
    still = [path for path, gradient in gradients.items() if not gradient.any()]
    if still:
        text += f"; NOTE: no gradient reaches {_some(still)}"
    return text


def _blamed_for_gradients(case: Case) -> str:
    """The parts whose value or gradient alone is not finite, in words."""
    model, batch = case.model, _packed_batch(case.length)
    x = _inputs_alone(model, batch["tokens"][:, :-1])
    context = _context(model, batch["segment_ids"][:, :-1])

    def is_finite(part, params):
        def loss(params, x):
            return jnp.mean(jnp.square(_part_alone(model, part, params, x, context)))

        found = jax.value_and_grad(loss, (0, 1))(params, x)
        return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(found)]))

    finite = jax.jit(lambda params: {part: is_finite(part, params) for part in PARTS})(case.params)
    return _in_words(model, [part for part in PARTS if not finite[part]])


def mesh_equals_one_device(case: Case) -> str:
    """Losses and gradients of a batch over 2 x 2 devices are those of one device."""
    devices = jax.devices()
    count = MESH["data"] * MESH["fsdp"]
    if len(devices) < count:
        raise NotChecked(
            f"it takes {count} devices, and this process has {len(devices)} of platform "
            f"{devices[0].platform} (JAX_PLATFORMS=cpu simulates them)"
        )
    mesh = make_mesh(ConfigDict(MESH), devices[:count])
    nats, gradients = case.one_device
    if not all(np.isfinite(leaf).all() for leaf in (nats, *gradients.values())):
        raise NotChecked("the loss or the gradients of one device are not finite")
    params = jax.device_put(case.params, rules.parameter_shardings(case.model.infos, mesh))
    batch = jax.device_put(_packed_batch(case.length), rules.batch_sharding(mesh))
    with jax.set_mesh(mesh):
        found, found_gradients = jax.jit(_nats_and_gradients(case.model))(params, batch)
    apart, allowed = _largest_difference(found, nats), _allowed(case.model, OTHER_PROGRAM)
    if not apart <= allowed:
        raise Broken(
            f"losses differ by {apart:.1e} of the largest (allowed {allowed:g}); "
            + _blamed_for_mesh(case, mesh, params)
        )
    # A leaf whose gradient is far below the others' is rounding of theirs.
    least = 1e-3 * max(np.abs(gradient).max() for gradient in gradients.values())
    leaves = {
        path: _largest_difference(gradient, gradients[path], least)
        for path, gradient in flatten(found_gradients).items()
    }
    worst = max(leaves, key=lambda path: np.nan_to_num(leaves[path], nan=np.inf))
    allowed = _allowed(case.model, GRADIENTS)
    if not leaves[worst] <= allowed:
        raise Broken(
            f"the gradient of {worst} differs by {leaves[worst]:.1e} of its largest entry (allowed "
            f"{allowed:g}); " + _blamed_for_mesh(case, mesh, params)
        )
    return (
        f"mesh data {MESH['data']} x fsdp {MESH['fsdp']}: losses to {apart:.1g} of the largest, "
        f"gradients to {leaves[worst]:.1g} of each leaf's"
    )


def _blamed_for_mesh(case: Case, mesh: Mesh, params: dict[str, Any]) -> str:
    """The parts whose values alone are others on the mesh, in words."""
    model, batch = case.model, _packed_batch(case.length)
    x = _inputs_alone(model, batch["tokens"][:, :-1])
    run = jax.jit(_parts_alone(model, batch["segment_ids"][:, :-1]))
    expected = run(case.params, x)
    with jax.set_mesh(mesh):
        found = run(params, jax.device_put(x, rules.batch_sharding(mesh)))
    allowed = _allowed(model, OTHER_PROGRAM)
    return _in_words(
        model,
        [part for part in PARTS if not _largest_difference(found[part], expected[part]) <= allowed],
    )


def described_stream(case: Case) -> str:
    """`describe` gives a direction of norm sqrt(d) and a finite log-norm, at every stage's ends."""
    model = case.model
    describe = kind_class("model.connection", model.options.connection.kind).describe
    batch = _packed_batch(case.length)
    tokens, segment_ids = batch["tokens"][:, :-1], batch["segment_ids"][:, :-1]

    def described(params):
        module, context = model.module(params), _context(model, segment_ids)
        stream, memo = module.ends.start(module.table(tokens)), module.initial_memo(tokens.shape)
        carry, balance = Carry(stream, memo, {}), model.initial_balance()
        found = [describe(stream)]
        for name in module.stage_names:
            carry, _ = getattr(module, name)(carry, context, balance.get(name, {}))
            found.append(describe(carry.stream))
        return found

    shapes, blamed = ((*tokens.shape, model.options.d_model), tokens.shape), _name(model, PARTS[2])
    allowed = _allowed(model, OTHER_PROGRAM)
    largest, log_norms = 0.0, []
    for direction, log_norm in jax.jit(described)(case.params):
        if (direction.shape, log_norm.shape) != shapes:
            raise Broken(
                f"describe of {blamed} gives shapes {direction.shape} and {log_norm.shape}; they "
                f"must be {shapes[0]} and {shapes[1]}"
            )
        if not (np.isfinite(direction).all() and np.isfinite(log_norm).all()):
            raise Broken(f"describe of {blamed} gives numbers that are not finite")
        rms = np.sqrt(np.mean(np.square(np.asarray(direction, np.float64)), axis=-1))
        largest = max(largest, float(np.abs(rms - 1).max()))
        if not largest <= allowed:
            raise Broken(
                f"the direction that describe of {blamed} gives has rms {rms.min():.3g} to "
                f"{rms.max():.3g}; it must be 1 (norm sqrt(d), to {allowed:g})"
            )
        log_norms.append(np.asarray(log_norm, np.float64))
    low, high = min(x.min() for x in log_norms), max(x.max() for x in log_norms)
    return f"directions of rms 1 (to {largest:.1g}), log-norms from {low:.2g} to {high:.2g}"


CONTRACTS: dict[str, Callable[[Case], str]] = {
    "gradients finite": finite_gradients,
    "causality": causality,
    "document isolation": document_isolation,
    "cached decode equals full forward": cached_decoding,
    "mesh equals single device": mesh_equals_one_device,
    "describe": described_stream,
}


def _packed_batch(length: int) -> dict[str, np.ndarray]:
    """Four packed rows of `length` + 1 tokens: several documents, one of a token, padding."""
    third = max(1, (length + 1) // 3)
    documents = [[length + 1], [third, 1, third], [1, third], [third, third]]
    segment_ids = np.zeros((len(documents), length + 1), np.int32)
    for row, sizes in zip(segment_ids, documents, strict=True):
        numbers = np.repeat(1 + np.arange(len(sizes)), sizes)[: length + 1]
        row[: len(numbers)] = numbers
    drawn = np.random.default_rng(3).integers(0, VOCABULARY, segment_ids.shape)
    valid = segment_ids > 0
    tokens = np.where(valid, drawn, 0).astype(np.int32)
    return {"tokens": tokens, "segment_ids": segment_ids, "valid": valid}


def _nats_and_gradients(model: LanguageModel) -> Callable[[Any, Any], tuple[Array, Any]]:
    def loss(params, batch):
        balance = model.initial_balance()
        out = model.evaluate_batch(params, batch, model.warmup_steps, False, balance)
        auxiliary = 0.0 if out["auxiliary_loss"] is None else out["auxiliary_loss"]
        return jnp.sum(out["nats"]) + auxiliary, out["nats"]

    def both(params, batch):
        gradients, nats = jax.grad(loss, has_aux=True)(params, batch)
        return nats, gradients

    return both


def allowed(options: ConfigDict, tolerances: dict[str, float]) -> float:
    """The tolerance for a model: rounding adds up over the blocks that run, but not in one program.

    Args:
        options: The config's `model` node.
        tolerances: `SAME_PROGRAM`, `OTHER_PROGRAM` or `GRADIENTS`, which are for up to six blocks.
    """
    runs = sum(stage.runs for stage in stages_of(options).values())
    growth = 1.0 if tolerances is SAME_PROGRAM else max(1.0, runs / 6)
    return growth * tolerances[options.compute_dtype]


def _allowed(model: LanguageModel, tolerances: dict[str, float]) -> float:
    return allowed(model.options, tolerances)


def _largest_difference(value: Any, expected: Any, least: float = 0.0) -> float:
    """Over the largest expected entry, or `least` if that is larger."""
    value, expected = (np.asarray(x, np.float64) for x in (value, expected))
    return float(np.abs(value - expected).max() / max(np.abs(expected).max(), least, TINY))


def _some(paths: list[str]) -> str:
    """The first few of some paths."""
    shown = ", ".join(paths[:3])
    return shown if len(paths) <= 3 else f"{shown} and {len(paths) - 3} more"


def _what_was_raised(error: Exception, options: ConfigDict) -> str:
    """Type, message and place: the last line of the user's own packages, else of this one."""
    own = {
        options[part].kind.split(".")[0].split(":")[0]
        for part in PARTS
        if ":" in options[part].kind
    }
    places: dict[str, str] = {}
    for frame, line in traceback.walk_tb(error.__traceback__):
        package = frame.f_globals.get("__name__", "").split(".")[0]
        place = f"{os.path.relpath(frame.f_code.co_filename)}:{line}"
        places["own" if package in own else package] = place
    place = places.get("own") or places.get("nag_jax")
    message = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {message[:400]} ({place})"
