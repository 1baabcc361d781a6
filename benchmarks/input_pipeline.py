"""How fast batches of rows come, against what a training step takes.

python benchmarks/input_pipeline.py [--need=20000]

Tokenises the standard library into bytes in a temporary folder, then times one process's pipeline
with nothing else to do. `--need` is the tokens per second that training consumes, as its live line
shows them.
"""

import argparse
import tempfile
import time

import rich
from rich.table import Table

from nag_jax import config as config_lib
from nag_jax.data import pipeline, store


def rows_per_second(rows: store.StoredRows, batch: int, prefetch: int, seconds: float) -> float:
    """Rows that the pipeline gives per second when they are taken as fast as they come."""
    with pipeline.TrainingStream(rows, 0, 0, batch, prefetch=prefetch) as stream:
        # What is read ahead at first is not the lasting speed.
        for _ in range(prefetch // batch + 1):
            next(stream)
        begin = time.perf_counter()
        batches = 0
        while time.perf_counter() - begin < seconds:
            next(stream)
            batches += 1
        return batches * batch / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--need", type=float, default=20_000.0, help="tokens/s of training")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each line of the table")
    args = parser.parse_args()
    table = Table("T", "batch", "prefetch", "rows/s", "tokens/s", "times the need")
    with tempfile.TemporaryDirectory() as cache:
        for row_length in (512, 2048):
            overrides = {"data.row_length": row_length, "data.cache_folder": cache}
            begin = time.perf_counter()
            prepared = store.prepare(config_lib.resolve(overrides).data)
            elapsed = time.perf_counter() - begin
            speed = prepared.summary["bytes"] / elapsed / 1e6
            print(f"T {row_length}: prepared in {elapsed:.1f} s, {speed:.1f} MB/s")
            for batch in (16, 64):
                for prefetch in (0, 256):
                    rows = rows_per_second(prepared.train, batch, prefetch, args.seconds)
                    tokens = rows * row_length
                    numbers = f"{rows:,.0f}", f"{tokens:,.0f}", f"{tokens / args.need:,.0f}"
                    table.add_row(str(row_length), str(batch), str(prefetch), *numbers)
    rich.print(table)


if __name__ == "__main__":
    main()
