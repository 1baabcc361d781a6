"""What skipping tokens saves in FLOPs, and how many more tokens the same compute then buys.

Counted from the model's records alone, as in `flops.py`, causally and per token; nothing is
compiled and no array is made. Rates may be targets or measured ones. How tokens are skipped, and
what that saves in time, is elsewhere.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from nag_jax.analysis.flops import TRAINING_FACTOR, forward_flops, weight_products
from nag_jax.errors import UserError
from nag_jax.models.stages import SUBLAYERS

# What a skipped token's attention leaves out besides logits and values, by kind: CCGQA's
# convolutions read its queries for its neighbours. Keys and values are made for every token.
LEFT_OUT = {"gqa": ("query", "output"), "ccgqa": ("output",)}

# Beside the attention of a row this long nothing else weighs anything.
LONG_ROW = 2**50


class SkipCosts(NamedTuple):
    """Forward FLOPs per token of a model, and the part of them that skipping leaves out.

    Attributes:
        total: Of a token that skips nothing, averaged over the positions of a row.
        skippable: By kind of sub-layer, what a token saves that skips all of them.
    """

    total: float
    skippable: dict[str, float]

    def forward(self, rates: Mapping[str, float]) -> float:
        """FLOPs per token where the share rates[kind] of tokens skips each sub-layer of a kind.

        This is also what decoding costs a token, averaged over the row: earlier tokens' keys and
        values are in the cache, which holds them for skipped tokens too.

        Args:
            rates: Share of tokens by kind of sub-layer, "attention" or "feedforward"; a kind that
                is not named skips nothing.

        Raises:
            UserError: Another name, or a rate that is no share.
        """
        for name, rate in rates.items():
            if name not in self.skippable or not 0 <= rate <= 1:
                raise UserError(
                    f"the rate of {name} is {rate!r}; rates are between 0 and 1, of "
                    f"{' and '.join(self.skippable)}"
                )
        return self.total - sum(rate * self.skippable[name] for name, rate in rates.items())

    def training(self, rates: Mapping[str, float]) -> float:
        """FLOPs per token of a training step, three forward passes."""
        return TRAINING_FACTOR * self.forward(rates)

    def saving(self, rates: Mapping[str, float]) -> float:
        """The share of FLOPs that is saved, in training and in decoding alike."""
        return 1 - self.forward(rates) / self.total

    def tokens(self, without: float, rates: Mapping[str, float]) -> float:
        """How many tokens cost what `without` tokens cost where none skips.

        tokens(r) = tokens(0) F(0)/F(r), with F = `forward`.
        """
        return without * self.total / self.forward(rates)


def skip_costs(
    infos: Mapping[str, Any],
    config: ConfigDict,
    vocab_size: int,
    row_length: int | None = None,
) -> SkipCosts:
    """Counts what skipping can leave out of a model (P1 counts such savings; this is our formula).

    A token that skips attention makes its keys and values for others, and leaves out its logits,
    its sum of values and its output projection, and where nothing else needs them its queries. One
    that skips a feed-forward layer leaves out all products of the MLP, or of the experts it would
    have chosen. Gates and routers run for every token, as do convolutions. That executed tokens
    read fewer keys under `keys_values="executed"` is not counted.

    Args:
        infos: Nested dict of `ParamInfo`.
        config: The complete config, with skipping or without.
        vocab_size: True size of the vocabulary.
        row_length: Length of the row, if not the config's; `LONG_ROW` gives the limit.

    Returns:
        The costs. An attention of a user's own counts as saving its logits and values alone.
    """
    parts = forward_flops(infos, config, vocab_size, row_length)
    left_out = LEFT_OUT.get(config.model.attention.kind, ())
    skippable = dict.fromkeys(SUBLAYERS, 0.0)
    skippable["attention"] += parts.get("attention context", 0.0)
    for product in weight_products(infos, config):
        if product.part == "feedforward" or (
            product.part == "attention" and product.path.split("/")[-1] in left_out
        ):
            skippable[product.part] += product.flops
    return SkipCosts(sum(parts.values()), skippable)
