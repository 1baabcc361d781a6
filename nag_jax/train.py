"""Trains a language model, or goes on where the workdir's newest checkpoint stands.

  python -m nag_jax.train --config=configs/nag_small.py --workdir=runs/nag

The same command, started again, continues a run that was killed or stopped. --init_from starts a
new run from another run's weights. On several processes the command is started once for each, with
--coordinator=host:port --processes=n --process=0 (1, ..., n - 1), or with --distributed where a
cluster (Slurm, TPU pods, GKE, Open MPI) tells these; docs/scaling.md shows how.
"""

from absl import flags

from nag_jax import cli
from nag_jax.errors import UserError
from nag_jax.training import processes

_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run: checkpoints and metrics")
_INIT_FROM = flags.DEFINE_string("init_from", "", "start a new run from this one: RUN[@step]")
_CARRY = flags.DEFINE_list("carry", ["params"], "what to take over: params[,opt][,balance][,data]")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0, of several")
_PROCESSES = flags.DEFINE_integer("processes", None, "how many processes train together")
_PROCESS = flags.DEFINE_integer("process", None, "which of them this one is, from 0")
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "take these three from the cluster")
flags.mark_flag_as_required("workdir")


def join(flag_values) -> None:
    """Joins the other processes that the flags speak of."""
    processes.join(
        flag_values.coordinator,
        flag_values.processes,
        flag_values.process,
        flag_values.distributed,
    )


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
        processes.leave(cli.FAILED, f"failed: {error}")
        return cli.FAILED
    return 0


if __name__ == "__main__":
    cli.run(main, join=join)
