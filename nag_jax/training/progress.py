"""What a run shows while it trains: a live line on a terminal, a plain one now and then elsewhere.

Throughput is measured here too, beside the best rate this device reaches on plain matrix products.
"""

import contextlib
import functools
import time
from collections import deque
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from rich.console import Console
from rich.live import Live
from rich.text import Text

_WINDOW = 50  # updates over which rates are averaged
_PLAIN_SECONDS = 5.0


class Progress:
    """Turns steps and tokens into rates, and shows them."""

    def __init__(
        self,
        total_steps: int,
        *,
        flops_per_token: float,
        peak_flops: float,
        console: Console | None = None,
    ):
        """Starts the display.

        Args:
          total_steps: the step at which the run ends.
          flops_per_token: floating-point operations of forward and backward for one token.
          peak_flops: what all devices together could do, in FLOP/s; 0 where it is not known.
          console: where to print; standard output by default.
        """
        self._total_steps = total_steps
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._window: deque[tuple[float, int, int]] = deque(maxlen=_WINDOW)
        self._tokens = 0
        self._paused = 0.0
        self._printed_at = -float("inf")
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=False)
            self._live.start()

    def update(self, step: int, *, tokens: int, loss: float) -> dict[str, float]:
        """Shows a step.

        The first call only starts the clock, so that compilation is in no rate.

        Args:
          step: the last finished step.
          tokens: tokens trained on since the last call.
          loss: the training loss to show, in nats per token.

        Returns:
          The rates over the last calls: "throughput/tokens_per_second",
          "throughput/model_flops_per_second", "throughput/seconds_per_step" and, where the peak is
          known, "throughput/peak_share". Empty at the first call.
        """
        self._tokens += tokens
        self._window.append((time.perf_counter() - self._paused, step, self._tokens))
        rates = self._rates()
        line = self._line(step, loss, rates)
        if self._live is not None:
            self._live.update(Text(line))
        else:
            now = time.perf_counter()
            if now - self._printed_at >= _PLAIN_SECONDS or step >= self._total_steps:
                self._printed_at = now
                self._console.print(line)
        return rates

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keeps what happens inside (an evaluation, say) out of the rates."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - start

    def print(self, text: str) -> None:
        """Prints a line without breaking the live one."""
        self._console.print(text, markup=False)

    def close(self) -> None:
        """Ends the live line."""
        if self._live is not None:
            self._live.stop()

    def _rates(self) -> dict[str, float]:
        (start, first_step, first_tokens), (now, step, tokens) = self._window[0], self._window[-1]
        if step <= first_step or now <= start:
            return {}
        tokens_per_second = (tokens - first_tokens) / (now - start)
        flops = tokens_per_second * self._flops_per_token
        rates = {
            "throughput/tokens_per_second": tokens_per_second,
            "throughput/model_flops_per_second": flops,
            "throughput/seconds_per_step": (now - start) / (step - first_step),
        }
        if self._peak_flops > 0:
            rates["throughput/peak_share"] = flops / self._peak_flops
        return rates

    def _line(self, step: int, loss: float, rates: dict[str, float]) -> str:
        parts = [f"step {step}/{self._total_steps}", f"loss {loss:.4f}"]
        if rates:
            left = (self._total_steps - step) * rates["throughput/seconds_per_step"]
            parts += [
                f"{_duration(left)} left",
                f"{rates['throughput/tokens_per_second']:,.0f} tokens/s",
                f"{_si(rates['throughput/model_flops_per_second'])}FLOP/s",
            ]
            if "throughput/peak_share" in rates:
                parts.append(f"{rates['throughput/peak_share']:.1%} of matmul peak")
        return " | ".join(parts)


def measure_matmul_peak(dtype: DTypeLike) -> float:
    """The best rate of a plain matrix product on the default device.

    Square products of growing size are timed while they fit in about a second, and the best is
    returned. It is measured once per process and dtype.

    Args:
      dtype: of both operands and the product.

    Returns:
      FLOP/s of one device.
    """
    return _measure_matmul_peak(jnp.dtype(dtype).name)


@functools.cache
def _measure_matmul_peak(dtype: str) -> float:
    sizes = (1024, 2048) if jax.default_backend() == "cpu" else (2048, 4096, 8192)
    matmul = jax.jit(jnp.matmul)
    best = 0.0
    for size in sizes:
        flops = 2.0 * size**3
        if best and 5 * flops / best > 0.6:
            break
        operand = jax.random.normal(jax.random.key(0), (size, size), jnp.float32).astype(dtype)
        jax.block_until_ready(matmul(operand, operand))
        for _ in range(4):
            start = time.perf_counter()
            jax.block_until_ready(matmul(operand, operand))
            best = max(best, flops / (time.perf_counter() - start))
    return best


def _si(value: float) -> str:
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"
