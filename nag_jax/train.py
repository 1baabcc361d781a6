"""Trains a language model, or goes on where the workdir's newest checkpoint stands.

  python -m nag_jax.train --config=configs/nag_small.py --workdir=runs/nag

The same command, started again, continues a run that was killed or stopped. --init_from starts a
new run from another run's weights.
"""

import sys

from absl import flags

from nag_jax import cli
from nag_jax.errors import UserError

_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run: checkpoints and metrics")
_INIT_FROM = flags.DEFINE_string("init_from", "", "start a new run from this one: RUN[@step]")
_CARRY = flags.DEFINE_list("carry", ["params"], "what to take over: params[,opt][,balance][,data]")
flags.mark_flag_as_required("workdir")


def main(config, flag_values) -> int:
    """Runs the training loop; a run that fails by itself ends with one sentence and code 1."""
    from nag_jax.training.checkpoints import SaveFailed
    from nag_jax.training.errors import RunFailed
    from nag_jax.training.loop import train
    from nag_jax.training.start import parse_init_from

    if not flag_values.workdir:
        raise UserError("--workdir is empty: name the folder of the run")
    init_from = parse_init_from(flag_values.init_from, flag_values.carry)
    try:
        train(config, flag_values.workdir, init_from)
    except (SaveFailed, RunFailed) as error:
        print(f"failed: {error}", file=sys.stderr)
        return cli.FAILED
    return 0


if __name__ == "__main__":
    cli.run(main)
