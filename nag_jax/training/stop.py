"""Signals that ask a run to stop, and how several processes stop after the same step."""

import contextlib
import os
import signal
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nag_jax.training import processes


class StopRequest:
    """Notes SIGTERM and SIGINT while a run is on; a second SIGINT interrupts at once.

    Whichever process gets the signal, all are asked: with every step each tells the others what it
    has noted, and hears it one step later, when the devices have the answer anyway.

    Attributes:
        signal: The signal that asks to stop, on every process the same; None while there is none.
    """

    def __init__(self, mesh: Mesh):
        self.signal: int | None = None
        self._noted: int | None = None
        self._alone = jax.process_count() == 1
        self._asked: jax.Array | None = None
        # One number for each device; the largest is known to all.
        self._sharding = NamedSharding(mesh, P(mesh.axis_names))
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))

    def __bool__(self) -> bool:
        return self.signal is not None

    def exchange(self) -> None:
        """To be called once a step on every process, after the step has been given to the devices.

        From the call after the one that told of a signal, every process is asked to stop.
        """
        if self._alone:
            return
        answer, noted = self._asked, np.int32(self._noted or 0)
        self._asked = self._largest(
            jax.make_array_from_callback(
                (self._sharding.mesh.size,), self._sharding, lambda _: np.full(1, noted)
            )
        )
        if answer is not None:
            self.signal = int(answer) or None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Installs the handlers, and puts the old ones back at the end."""

        def note(number, frame):
            if number == signal.SIGINT and self._noted is not None:
                raise KeyboardInterrupt
            self._noted = number
            if self._alone:
                self.signal = number
            again = "; Ctrl-C again stops at once" if number == signal.SIGINT else ""
            line = f"{signal.Signals(number).name}: stopping after this step{again}.\n"
            # Not print: the signal may have come in the midst of one, which cannot be entered
            # twice.
            with contextlib.suppress(OSError):
                os.write(processes.stdout_descriptor(), line.encode())

        old = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
