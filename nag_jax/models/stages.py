"""How a model's blocks are laid out in stages, from the config alone."""

import math
from typing import NamedTuple

from ml_collections import ConfigDict

from nag_jax.errors import UserError
from nag_jax.kinds import kind_class

SUBLAYERS = ("attention", "feedforward")

# More would overflow nothing but patience; a typing error should not compile for hours.
MAX_LOOPS = 10_000


class StageSizes(NamedTuple):
    """A stage's blocks: a pattern of them, repeated.

    Attributes:
        repeats: How often the pattern comes, each time with weights of its own.
        positions: The pattern's blocks, as positions in `pattern_of`.
        first_index: 0-based number of the first block in order of execution.
        loops: How often the stage runs.
    """

    repeats: int
    positions: tuple[int, ...]
    first_index: int
    loops: int

    @property
    def block_names(self) -> tuple[str, ...]:
        """Names of the pattern's blocks, each holding the stacked weights of its repeats."""
        count = len(self.positions)
        return ("blocks",) if count == 1 else tuple(f"blocks_{i}" for i in range(count))

    @property
    def blocks(self) -> int:
        """Number of blocks, each with weights of its own."""
        return self.repeats * len(self.positions)

    @property
    def runs(self) -> int:
        """How many blocks run, iterations counted."""
        return self.blocks * self.loops


def pattern_of(options: ConfigDict) -> tuple[dict[str, ConfigDict], ...]:
    """The options of the branches of each block of the pattern that the model repeats.

    Block number j, from 0, is of the pattern's entry j modulo its length. A kind whose layers
    differ says how by a static method `pattern(options)`: the options of each, in order.

    Args:
        options: The config's `model` node.
    """
    each = {}
    for name in SUBLAYERS:
        kind = kind_class(f"model.{name}", options[name].kind)
        own = getattr(kind, "pattern", None)
        each[name] = (options[name],) if own is None else tuple(own(options[name]))
    period = math.lcm(*map(len, each.values()))
    return tuple({name: of[i % len(of)] for name, of in each.items()} for i in range(period))


def stages_of(options: ConfigDict, loops: int | None = None) -> dict[str, StageSizes]:
    """The stages of a model by name: what is before the loop, in it and after it, where any is.

    Where a part is no whole number of patterns, the blocks that are left form a stage of their own.
    Blocks after the loop keep the numbers that `options.loops` gives them, also where the loop runs
    more or less often.

    Args:
        options: The config's `model` node.
        loops: How often the loop runs, if not `options.loops` times.

    Raises:
        UserError: A loop is no whole number of patterns.
    """
    loops = options.loops if loops is None else loops
    before, after = options.prelude_blocks, options.coda_blocks
    inside = options.num_blocks - before - after
    period = len(pattern_of(options))
    if loops > 1 and inside > period and inside % period:
        raise UserError(
            f"the loop's {inside} blocks (model.num_blocks without model.prelude_blocks and "
            f"model.coda_blocks) must be a multiple of the {period} blocks in which "
            f"layers differ, such as {inside // period * period} or {-(-inside // period) * period}"
        )
    stages = []
    for first, count, first_index, runs in (
        (0, before, 0, 1),
        (before, inside, before, loops),
        (before + inside, after, before + inside * options.loops, 1),
    ):
        repeats, rest = divmod(count, period)
        for done, times, length in ((0, repeats, period), (repeats * period, 1, rest)):
            if times * length:
                positions = tuple((first + done + i) % period for i in range(length))
                stages.append(StageSizes(times, positions, first_index + done, runs))
    return {f"stage_{i}": stage for i, stage in enumerate(stages)}


def blocks_in_words(options: ConfigDict) -> str:
    """Depth and width, such as "6 blocks of width 256 (4 of them run 3 times)"."""
    words = f"{options.num_blocks} blocks of width {options.d_model}"
    if options.loops == 1:
        return words
    inside = options.num_blocks - options.prelude_blocks - options.coda_blocks
    which = "all" if inside == options.num_blocks else f"{inside} of them"
    return f"{words} ({which} run {options.loops} times)"
