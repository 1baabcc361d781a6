"""The folder of a run: whether it can be one, and that one run at a time is in it."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

from etils import epath

from nag_jax.errors import UserError
from nag_jax.training import processes


def require_possible(workdir: epath.Path, flag: str = "--workdir") -> None:
    """Refuses a folder that cannot be made or written, without making it.

    Args:
        workdir: The folder.
        flag: What names it, for the message.

    Raises:
        UserError: If it, or what it would lie in, is a file or may not be written.
    """
    if "://" in str(workdir):
        return
    existing = workdir
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"{flag}={workdir}: {existing} is a file, not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{flag}={workdir}: {existing} may not be written")


@contextlib.contextmanager
def only_run(workdir: epath.Path) -> Iterator[None]:
    """Makes the folder and holds its lock; the system frees the lock if the process dies.

    Two runs would delete each other's unfinished checkpoints. Remote folders ("gs://...") have no
    locks and are not protected.

    Raises:
        UserError: If another process holds it.
    """
    if "://" in str(workdir):
        yield
        return
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        handle = os.open(workdir / ".lock", os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise UserError(f"--workdir={workdir} cannot be written: {error.strerror}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is training in {workdir}: wait for it, or choose another "
                "--workdir"
            ) from None
        yield
    finally:
        os.close(handle)


def require_shared(folder: epath.Path) -> None:
    """Refuses a folder that is not one and the same for all processes, who save into it together.

    Args:
        folder: A folder that process 0 has made.

    Raises:
        UserError: On every process, if one does not see what process 0 writes there, or cannot
            write there itself.
    """
    if processes.count() == 1:
        return
    name = processes.from_first(lambda: f".shared-{time.time_ns()}")
    own = folder / f"{name}-{processes.index()}"

    def look():
        try:
            own.write_text("")
            # Network file systems may take a while to show a new file.
            for _ in range(50):
                if (folder / f"{name}-0").exists():
                    return
                time.sleep(0.2)
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error.strerror or error}") from error
        raise UserError(
            f"{folder} is not the folder that process 0 writes: --workdir must lie on storage "
            "that all processes share"
        )

    try:
        processes.first_before_others(look)
    finally:
        with contextlib.suppress(OSError):
            own.unlink()
