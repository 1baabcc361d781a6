"""How a model's blocks are laid out in stages, from the config alone."""

from typing import NamedTuple

from ml_collections import ConfigDict

# More would overflow nothing but patience; a typing error should not compile for hours.
MAX_LOOPS = 10_000


class StageSizes(NamedTuple):
    """A stage's blocks.

    Attributes:
        blocks: Number of blocks, each with weights of its own.
        first_index: 0-based number of the first block in order of execution.
        loops: How often the stage runs.
    """

    blocks: int
    first_index: int
    loops: int

    @property
    def runs(self) -> int:
        """How many blocks run, iterations counted."""
        return self.blocks * self.loops


def stages_of(options: ConfigDict, loops: int | None = None) -> dict[str, StageSizes]:
    """The stages of a model by name: what is before the loop, in it and after it, where any is.

    Blocks after the loop keep the numbers that `options.loops` gives them, also where the loop runs
    more or less often.

    Args:
        options: The config's `model` node.
        loops: How often the loop runs, if not `options.loops` times.
    """
    before, after = options.prelude_blocks, options.coda_blocks
    inside = options.num_blocks - before - after
    stages = [
        StageSizes(before, 0, 1),
        StageSizes(inside, before, options.loops if loops is None else loops),
        StageSizes(after, before + inside * options.loops, 1),
    ]
    return {f"stage_{i}": stage for i, stage in enumerate(s for s in stages if s.blocks)}


def blocks_in_words(options: ConfigDict) -> str:
    """Depth and width, such as "6 blocks of width 256 (4 of them run 3 times)"."""
    words = f"{options.num_blocks} blocks of width {options.d_model}"
    if options.loops == 1:
        return words
    inside = options.num_blocks - options.prelude_blocks - options.coda_blocks
    which = "all" if inside == options.num_blocks else f"{inside} of them"
    return f"{words} ({which} run {options.loops} times)"
