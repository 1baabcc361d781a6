"""Several processes as one run: how they find each other, agree, and end together.

Every process runs the same program; process 0 alone decides, prints and writes. What is agreed goes
through the key-value store of JAX's coordination service, which lives in process 0, never through
the devices, so that it works before any of them is touched. With one process all this is nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from nag_jax.errors import UserError

T = TypeVar("T")

FAILED = 1  # the exit codes of `cli`
MISTAKE = 2

_HEARTBEAT_SECONDS = 30  # without one for so long, a process counts as dead
_SHUTDOWN_SECONDS = 60
_POLL_MS = 2000  # how long a wait goes without looking for Ctrl-C
_GRACE_SECONDS = 3.0  # for a process to end by itself after another has failed
_FAREWELL = "nag_jax/farewell"
_LOST_PEER = re.compile(
    r"gloo|nccl|socket closed|connection (closed|reset|refused)|coordination|preempted|barrier",
    re.IGNORECASE,
)


class _Job:
    """The job that this process belongs to; a job of one until it joins another."""

    def __init__(self):
        self.rounds = itertools.count()
        self.ending = threading.Lock()
        self.farewell: str | None = None  # what a process that failed has told the others
        self.heard = threading.Event()
        self.saved: Callable[[], str] = lambda: "what was saved before is untouched"
        self.stdout = 1  # descriptor of what the user sees
        # What an abort means just now: the sentence and the exit code, from the runtime's reason.
        self.aborted: Callable[[], tuple[str, int]] = _lost_while_running
        self.abort_handler: Any = None  # kept alive for C


def _state() -> Any:
    # JAX has no public way to its key-value store.
    from jax._src import distributed

    return distributed.global_state


def count() -> int:
    """Number of processes of this job; touches no device."""
    if "jax" not in sys.modules or _state().client is None:
        return 1
    return _state().num_processes


def index() -> int:
    """This process's number, from 0."""
    return _state().process_id if count() > 1 else 0


def stdout_descriptor() -> int:
    """The file descriptor on which this process may tell the user something."""
    return _job.stdout


def describe_saved(saved: Callable[[], str]) -> None:
    """Says how to tell, if the job breaks, where it can be taken up again."""
    _job.saved = saved


def join(
    coordinator: str | None, processes: int | None, process: int | None, distributed: bool
) -> None:
    """Joins the job that the flags describe, if they describe one; before any use of a device.

    Args:
        coordinator: --coordinator, "host:port" of process 0.
        processes: --processes, how many there are.
        process: --process, which one this is.
        distributed: --distributed, to find these three in the environment.

    Raises:
        UserError: They do not describe a job, or the others could not be reached.
    """
    arguments = _arguments(coordinator, processes, process, distributed)
    if arguments is None:
        return
    import jax

    # It would swallow SIGTERM before the training loop listens to it.
    jax.config.update("jax_enable_preemption_service", False)
    _say_why_aborted()
    if process == 0 and processes > 1:
        print(f"Waiting for {processes} processes to meet at {coordinator}.", flush=True)

    def why(reason):
        return _why_not_joined(reason, coordinator, processes, process)

    try:
        with _joining(why):
            jax.distributed.initialize(
                **arguments,
                heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
            )
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(why(_one_line(error))) from error
    if count() == 1:
        return
    _own_stdout()
    threading.Thread(target=_listen, args=(_state().client,), daemon=True).start()


def _arguments(coordinator, processes, process, distributed) -> dict[str, Any] | None:
    flags = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    given = [name for name, value in flags.items() if value is not None]
    if distributed:
        if given:
            raise UserError(f"--distributed finds {given[0]} by itself: give one or the other")
        return {}
    if not given:
        return None
    missing = [name for name in flags if name not in given]
    if missing:
        raise UserError(
            f"{' and '.join(given)} without {' and '.join(missing)}: several processes need "
            "--coordinator=host:port, --processes=n and, from 0 to n - 1, --process=i; or "
            "--distributed, where a cluster tells them"
        )
    if not re.fullmatch(r"\S+:\d{1,5}", coordinator):
        raise UserError(
            f"--coordinator={coordinator} must be host:port of process 0, such as 127.0.0.1:1234"
        )
    if processes < 1:
        raise UserError(f"--processes={processes} must be at least 1")
    if not 0 <= process < processes:
        raise UserError(
            f"--process={process} must be between 0 and {processes - 1}, as --processes={processes}"
        )
    return {
        "coordinator_address": coordinator,
        "num_processes": processes,
        "process_id": process,
        # Nothing of it is to be found elsewhere.
        "cluster_detection_method": "deactivate",
    }


@contextlib.contextmanager
def _joining(why: Callable[[str], str]) -> Iterator[None]:
    """Makes one sentence of what the runtime says when it aborts because the others do not come.

    It may wait for minutes, and is deaf to Python's handler of Ctrl-C meanwhile.
    """
    sys.stderr.flush()
    stderr, before = os.dup(2), signal.signal(signal.SIGINT, signal.SIG_DFL)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)

        def text():
            os.dup2(stderr, 2)
            held.seek(0)
            return held.read().decode(errors="replace")

        def aborted():
            said = re.search(r"absl::Status: (.*)", text())
            return f"error: {why(said[1] if said else 'no reason given')}", MISTAKE

        _job.aborted = aborted
        try:
            yield
        finally:
            _job.aborted = _lost_while_running
            signal.signal(signal.SIGINT, before)
            sys.stderr.flush()
            os.write(2, text().encode(errors="replace"))
            os.close(stderr)


def _why_not_joined(reason, coordinator, processes, process) -> str:
    if coordinator is None:
        return (
            f"--distributed: no job of several processes was found or joined ({reason}); it is "
            "looked for in Slurm, TPU pods, GKE and Open MPI; elsewhere give --coordinator, "
            "--processes and --process"
        )
    return (
        f"process {process} of {processes} could not join the others at "
        f"--coordinator={coordinator} ({reason}): all of them must be started with the same "
        "--coordinator, which process 0 can open, and the same --processes"
    )


def _own_stdout() -> None:
    """Keeps standard output for what this program prints, and only on process 0.

    Collectives of the CPU print on descriptor 1 from C++.
    """
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_WRONLY)
    _job.stdout = os.dup(1) if index() == 0 else os.dup(null)
    os.dup2(null, 1)
    os.close(null)
    sys.stdout = open(  # noqa: SIM115
        _job.stdout, "w", buffering=1, encoding=sys.stdout.encoding, errors="backslashreplace"
    )


def from_first(function: Callable[[], T]) -> T:
    """What a function gives on process 0, where alone it is called, on every process.

    Raises:
        UserError: On every process, if it does on process 0.
    """
    if count() == 1:
        return function()
    client, key = _state().client, f"nag_jax/round/{next(_job.rounds)}"
    if index() == 0:
        value, error = _outcome(function)
        client.key_value_set_bytes(key, pickle.dumps((value, error and str(error))))
        if error is not None:
            raise error
        return value
    value, error = pickle.loads(_get(key))
    if error is not None:
        raise UserError(error)
    return value


def agreed(function: Callable[[], T]) -> T:
    """What a function gives on each process; its mistake on one is a mistake on all.

    Raises:
        UserError: On every process, if it does on any.
    """
    if count() == 1:
        return function()
    value, error = _outcome(function)
    errors = _gather(error and str(error))
    if error is not None:
        raise error
    for number, text in enumerate(errors):
        if text is not None:
            raise UserError(f"on process {number}: {text}")
    return value


def first_before_others(function: Callable[[], T]) -> T:
    """What a function gives on each process, process 0 having finished before the others begin.

    Raises:
        UserError: On every process, if it does on any.
    """
    done: list[T] = []
    from_first(lambda: done.append(function()))
    return agreed(lambda: done[0] if done else function())


def require_same(what: str, values: Mapping[str, Any]) -> None:
    """Refuses to run what is not the same everywhere.

    Raises:
        UserError: Some value differs from that of process 0; all that do are named.
    """
    if count() == 1:
        return
    first, *others = _gather({name: str(value) for name, value in values.items()})
    for number, other in enumerate(others, 1):
        different = [
            f"{name}: {first.get(name)} on process 0, {other.get(name)} on process {number}"
            for name in sorted({*first, *other})
            if first.get(name) != other.get(name)
        ]
        if different:
            raise UserError(f"{what} must be the same on all processes: {'; '.join(different)}")


def _outcome(function: Callable[[], T]) -> tuple[T | None, UserError | None]:
    try:
        return function(), None
    except UserError as error:
        return None, error


def _gather(value: Any) -> list[Any]:
    """Every process's value, on every process."""
    client, key = _state().client, f"nag_jax/round/{next(_job.rounds)}"
    if index() == 0:
        values = [value] + [pickle.loads(_get(f"{key}/{i}")) for i in range(1, count())]
        client.key_value_set_bytes(key, pickle.dumps(values))
        return values
    client.key_value_set_bytes(f"{key}/{index()}", pickle.dumps(value))
    return pickle.loads(_get(key))


def _get(key: str) -> bytes:
    """Waits for a value, for as long as it takes: tokenising a corpus may take hours."""
    while True:
        with _only_timeouts():
            return _state().client.blocking_key_value_get_bytes(key, _POLL_MS)


@contextlib.contextmanager
def _only_timeouts():
    try:
        yield
    except RuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error says, in the words of some library, that another process has gone."""
    return (
        count() > 1
        and isinstance(error, (RuntimeError, ValueError, OSError))
        and bool(_LOST_PEER.search(str(error)))
    )


def lost_peer_sentence(error: BaseException) -> str:
    """Why this process cannot go on after such an error, and how the job can."""
    _job.heard.wait(_GRACE_SECONDS)
    return _sentence(_one_line(error))


def _sentence(reason: str) -> str:
    if _job.farewell is not None:
        return f"failed: ended, as another process of this job did ({_job.farewell})"
    return (
        f"failed: another of the {count()} processes of this job has died or cannot be reached "
        f"({reason}); {_job.saved()}: start the same command again on all processes"
    )


def prefixed(sentence: str) -> str:
    """A sentence for standard error, with the process's number where there are several."""
    return f"process {index()}: {sentence}" if count() > 1 else sentence


def leave(code: int, sentence: str | None) -> None:
    """Ends this process's part in the job; where it failed, all others end too, and this at once.

    Returns only for a job of one and after success.

    Args:
        code: Exit code.
        sentence: Why it is not 0; printed on standard error.
    """
    if count() == 1:
        if sentence:
            print(sentence, file=sys.stderr)
        return
    import jax

    if code == 0:
        with contextlib.suppress(RuntimeError):
            jax.distributed.shutdown()
        if _job.farewell is None:
            return
        _end(FAILED, _sentence(""))
    if not _job.ending.acquire(blocking=False):
        _wait_for_the_end()
    client, sentence = _state().client, sentence or f"ended with code {code}"
    told = f"process {index()}: {sentence}"
    with contextlib.suppress(RuntimeError):  # somebody was first
        client.key_value_set(_FAREWELL, told)
    # What all have found wrong is told once.
    if index() == 0 or not _has_told(0, sentence):
        print(told, file=sys.stderr, flush=True)
    if index() == 0:  # its end takes the key-value store away
        with contextlib.suppress(RuntimeError):
            client.key_value_set(f"{_FAREWELL}/0", sentence)
        with contextlib.suppress(RuntimeError):
            client.wait_at_barrier(f"{_FAREWELL}/all", int(2000 * _GRACE_SECONDS))
    else:
        with contextlib.suppress(RuntimeError):
            client.wait_at_barrier(f"{_FAREWELL}/all", 1000)  # before process 0 may end
    _exit(code)


def _has_told(process: int, sentence: str) -> bool:
    with contextlib.suppress(RuntimeError):
        told = _state().client.blocking_key_value_get(f"{_FAREWELL}/{process}", 1000)
        return told == sentence
    return False


def _listen(client: Any) -> None:
    """Ends this process when another has told that it failed, wherever it may be waiting."""
    while True:
        try:
            with _only_timeouts():
                _job.farewell = client.blocking_key_value_get(_FAREWELL, 600_000)
                break
        except RuntimeError:
            return  # the store has gone: the runtime ends this process, or it has ended well
    _job.heard.set()
    time.sleep(_GRACE_SECONDS)
    _end(FAILED, _sentence(""))


def _say_why_aborted() -> None:
    """Puts a sentence after what the runtime prints when it ends the process by abort().

    That is how JAX's client ends a process whose coordinator has gone, in a thread of its own and
    whatever Python is doing; a handler of Python's own would run too late.
    """

    def handle(number):
        sentence, code = _job.aborted()
        _end(code, sentence)

    _job.abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
    ctypes.CDLL(None).signal(signal.SIGABRT, _job.abort_handler)


def _lost_while_running() -> tuple[str, int]:
    return _sentence("the runtime's message is above"), FAILED


def _end(code: int, sentence: str) -> NoReturn:
    if not _job.ending.acquire(blocking=False):
        _wait_for_the_end()
    # Not print: this may be any thread, in the midst of anything.
    with contextlib.suppress(OSError):
        os.write(2, f"{prefixed(sentence)}\n".encode(errors="replace"))
    _exit(code)


def _wait_for_the_end() -> NoReturn:
    """Another thread has the last word; it ends the process when it has had it."""
    time.sleep(4 * _GRACE_SECONDS)
    os._exit(FAILED)


def _exit(code: int) -> NoReturn:
    """Ends without the barriers of an orderly shutdown, at which the others will not come."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


_job = _Job()
