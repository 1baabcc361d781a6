"""Jobs of several processes on this machine, for tests."""

import dataclasses
import pathlib
import socket
import subprocess
from typing import Any

from run_helpers import Place, Running

DEVICES = "--xla_force_host_platform_device_count={}"


@dataclasses.dataclass
class Job:
    """The processes of one run, in the order of their numbers."""

    runs: list[Running]

    def end(self) -> list[subprocess.CompletedProcess]:
        """Waits for the end of all."""
        return [run.end() for run in self.runs]


def start_job(
    place: Place,
    workdir: pathlib.Path,
    keys: dict[str, Any],
    count: int,
    *flags: str,
    devices: int = 1,
    one_only: dict[int, tuple[str, ...]] | None = None,
) -> Job:
    """Starts one command `count` times.

    Args:
        place: Where runs live.
        workdir: Folder of the run.
        keys: Overrides by dotted path.
        count: Number of processes.
        *flags: More flags.
        devices: Simulated devices of each process.
        one_only: Flags that only the process of this number gets.
    """
    address = f"127.0.0.1:{free_port()}"
    return Job(
        [
            place.start(
                workdir,
                keys,
                *flags,
                *(one_only or {}).get(process, ()),
                f"--coordinator={address}",
                f"--processes={count}",
                f"--process={process}",
                environment={"XLA_FLAGS": DEVICES.format(devices)},
            )
            for process in range(count)
        ]
    )


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
