"""What a checkpoint costs: how long training stands still for a save, and how long a restore takes.

Prints a table for parameters with AdamW state, beside plain `numpy.save` of the same numbers and
Orbax's own manager. Run as `python benchmarks/checkpoint_save.py --parameters=30e6`.
"""

import argparse
import pathlib
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from nag_jax.training.checkpoints import CheckpointReader, Checkpoints


def make_state(parameters: int, seed: int) -> dict:
    """About as many parameters as asked for, in blocks of nine matrices, with AdamW state."""
    width = 512
    blocks = max(1, round(parameters / (9 * width * width)))
    keys = jax.random.split(jax.random.key(seed), 9)
    params = {f"w{i}": jax.random.normal(key, (blocks, width, width)) for i, key in enumerate(keys)}
    optimizer = optax.adamw(1e-3)
    _, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    return jax.block_until_ready({"params": params, "opt_state": state, "balance": {}})


def seconds(function) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=30e6)
    parser.add_argument("--saves", type=int, default=3)
    flags = parser.parse_args()

    state = make_state(int(flags.parameters), 0)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    count = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    # One in-place step over all of the state, to see what the copy still costs after a save.
    step = jax.jit(lambda t: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), t), donate_argnums=0)
    state = jax.block_until_ready(step(state))
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        checkpoints = Checkpoints(folder / "ours", keep_last=2)
        stalls, commits, during = [], [], []
        for i in range(flags.saves):
            start = time.perf_counter()
            checkpoints.save(i, state, {"config.json": "{}"})
            stalls.append(time.perf_counter() - start)

            def one_step():
                nonlocal state
                state = jax.block_until_ready(step(state))

            during.append(seconds(one_step))
            checkpoints.wait()
            commits.append(time.perf_counter() - start)
        quiet = min(seconds(one_step) for _ in range(3))
        written = sum(p.stat().st_size for p in (folder / "ours" / f"{i:08d}").rglob("*"))
        rows.append(("save() returns after", min(stalls)))
        rows.append(("  in-place update of the state right after it", min(during)))
        rows.append(("  the same update at rest", quiet))
        rows.append(("save is on disk after", min(commits)))
        checkpoints.close()
        for name, checksums in (("sizes", False), ("sizes and checksums", True)):

            def everything(checksums=checksums):
                reader = CheckpointReader(folder / "ours", checksums=checksums)
                jax.block_until_ready(reader.restore(None, abstract)[1])

            def parameters_alone(checksums=checksums):
                reader = CheckpointReader(folder / "ours", checksums=checksums)
                jax.block_until_ready(reader.restore(None, {"params": abstract["params"]})[1])

            for what, function in (("all", everything), ("parameters", parameters_alone)):
                best = min(seconds(function) for _ in range(2))
                rows.append((f"restore {what}, {name}", best))

        manager = ocp.CheckpointManager(folder / "orbax")
        tree = {"params": state["params"], "opt_state": state["opt_state"]}
        returns, commits = [], []
        for i in range(flags.saves):
            start = time.perf_counter()
            manager.save(i, args=ocp.args.StandardSave(tree))
            returns.append(time.perf_counter() - start)
            manager.wait_until_finished()
            commits.append(time.perf_counter() - start)
        rows.append(("Orbax's manager: save() returns after", min(returns)))
        rows.append(("Orbax's manager: save is on disk after", min(commits)))
        wanted = {"params": abstract["params"], "opt_state": abstract["opt_state"]}
        rows.append(
            (
                "Orbax's manager: restore all",
                seconds(
                    lambda: jax.block_until_ready(
                        manager.restore(i, args=ocp.args.StandardRestore(wanted))
                    )
                ),
            )
        )
        manager.close()

        def plain_save():
            with (folder / "plain.npy").open("wb") as file:
                for leaf in jax.tree.leaves(state):
                    np.save(file, np.asarray(leaf))

        rows.append(("numpy.save of the same, one file, no sync", seconds(plain_save)))

    print(
        f"{count / 1e6:.1f} M parameters with AdamW state: {size / 1e6:.0f} MB in memory,"
        f" {written / 1e6:.0f} MB on disk; {jax.devices()[0].device_kind}, best of {flags.saves}"
    )
    for name, value in rows:
        print(f"{name:<48} {value * 1e3:9.1f} ms")


if __name__ == "__main__":
    main()
