"""Runs a binary: reads its flags and config, and turns a user's mistake into one sentence.

A thin wrapper around absl's flags. `--config=path.py[:argument]` names the config file and
`--config.<key>=value` overrides any leaf of it; what the keys mean is `config.py`'s.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, NoReturn

from absl import flags
from ml_collections import ConfigDict

from nag_jax import config as config_lib
from nag_jax.errors import UserError
from nag_jax.training import processes

FAILED = 1  # exit code of a run that could not go on
MISTAKE = 2  # exit code for a user's mistake
INTERRUPTED = 130  # as a shell reports a program that Ctrl-C ended
PIPE_CLOSED = 141  # and one whose reader went away

_CONFIG_FLAG = re.compile(r"--?config(?:\.(?P<key>[^=]*))?(?:=(?P<value>.*))?", re.DOTALL)
_MISSING_FLAG = re.compile(r"flag --(\w+)=None: .* must have a value other than None\.")

_CONFIG_HELP = """\
  --config=path.py[:argument]   the config file; `:smoke` shrinks any config to run in seconds
  --config.<key>=value          overrides a leaf of the config, such as --config.train.steps=100
                                (tuples: 1,2; a .kind key also takes package.module:Class)"""


class Arguments(NamedTuple):
    """A command line, taken apart."""

    config_file: str | None
    overrides: list[str]  # "key=value"
    wants_help: bool
    rest: list[str]  # for absl


def run(
    main: Callable[[ConfigDict | Arguments | None, flags.FlagValues], int | None],
    *,
    config: Literal["given", "refused", "own"] = "given",
    join: Callable[[flags.FlagValues], None] | None = None,
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Runs `main(config, flags)` and exits with its return value (None is 0).

    A UserError, a mistaken flag or config exits with code 2 after `error: <sentence>` on stderr, an
    interrupt with 130, a closed pipe on stdout with 141, exhausted memory with 1 after `failed:
    <sentence>`; any other exception is a fault of the program and keeps its traceback. The config
    given to `main` is complete and validated.

    Args:
      main: the binary; it defines its own flags with absl's `flags.DEFINE_*`.
      config: "given": `--config` is required; "refused": `main` gets None as config, and `--config`
        is a mistake; "own": `main` makes configs itself, of the `Arguments` it gets in their place.
      join: joins the other processes that the flags speak of, before anything else is done with
        them, so that a mistake that one of them finds ends all.
      argv: the command line with the program's name, sys.argv by default.
    """
    argv = list(sys.argv if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # file names and generated text may be any characters
            stream.reconfigure(errors="backslashreplace")
    sentence = None
    try:
        code = _run(main, config, join, argv)
        sys.stdout.flush()
    except UserError as error:
        code, sentence = MISTAKE, f"error: {error}"
    except BrokenPipeError:
        # What is still buffered would fail again when the interpreter flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = PIPE_CLOSED
    except KeyboardInterrupt:
        code, sentence = INTERRUPTED, "interrupted"
    except Exception as error:
        code, sentence = _unexpected(error)
    processes.leave(code, sentence)
    sys.exit(code)


def _unexpected(error: Exception) -> tuple[int, str]:
    """The exit code and sentence of an exception that no part of the program raised as its own.

    Raises:
      Exception: the same, where this is the only process: a fault of the program, to be seen with
        its traceback.
    """
    if isinstance(error, ImportError) and _is_raised_in(error, "fsspec"):
        return MISTAKE, f"error: a remote path needs another package: {error}"
    # As XLA says it on every device.
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    ):
        reason = str(error).partition("\n")[0] or "no more could be allocated"
        return FAILED, f"failed: not enough memory: {reason}"
    if processes.is_lost_peer(error):
        return FAILED, processes.lost_peer_sentence(error)
    if processes.count() == 1:
        raise error
    traceback.print_exception(error)
    return FAILED, f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _is_raised_in(error: BaseException, package: str) -> bool:
    """Whether the error comes out of a package's own code."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(frame.f_globals.get("__name__", "").startswith(package) for frame in frames)


def take_apart(args: Sequence[str]) -> Arguments:
    """Separates `--config...` and `--help` from the flags that absl reads.

    Raises:
      UserError: a `--config` flag without its value, or two config files.
    """
    config_file, overrides, wants_help, rest = None, [], False, []
    position = 0
    while position < len(args):
        arg = args[position]
        position += 1
        match = _CONFIG_FLAG.fullmatch(arg)
        if arg in ("--help", "-help", "-h", "--helpfull", "--helpshort"):
            wants_help = True
        elif match is None:
            rest.append(arg)
        else:
            value = match["value"]
            if value is None:
                if position == len(args) or args[position].startswith("--"):
                    raise UserError(f"{arg} needs a value: {arg}=...")
                value = args[position]
                position += 1
            if match["key"] is None:
                if config_file is not None:
                    raise UserError(f"--config is given twice: {config_file} and {value}")
                config_file = value
            else:
                overrides.append(f"{match['key']}={value}")
    return Arguments(config_file, overrides, wants_help, rest)


def _run(
    main: Callable[..., int | None],
    takes: str,
    join: Callable[[flags.FlagValues], None] | None,
    argv: list[str],
) -> int:
    arguments = take_apart(argv[1:])
    if arguments.wants_help:
        print(_help(main.__globals__.get("__doc__"), takes != "refused", argv[0], arguments))
        return 0
    parsed = _parse_flags([argv[0], *arguments.rest])
    if join is not None:
        join(parsed)
    if takes == "own":
        return main(arguments, parsed) or 0
    if takes == "refused":
        if arguments.config_file is not None or arguments.overrides:
            raise UserError("this program takes no --config: it uses the one in the checkpoint")
        return main(None, parsed) or 0
    if arguments.config_file is None:
        raise UserError("--config=path.py must be given, such as --config=configs/nag_small.py")
    config = _load(arguments)
    config_lib.validate(config)
    return main(config, parsed) or 0


def _load(arguments: Arguments) -> ConfigDict:
    overrides = config_lib.load_config_file(arguments.config_file)
    return config_lib.with_absolute_paths(config_lib.resolve(overrides, arguments.overrides))


def _parse_flags(argv: list[str]) -> flags.FlagValues:
    try:
        positional = flags.FLAGS(argv)[1:]
    except flags.Error as error:
        message = " ".join(str(error).split())
        missing = _MISSING_FLAG.fullmatch(message)
        raise UserError(f"--{missing[1]} must be given" if missing else message) from error
    if positional:
        raise UserError(f"unexpected argument {positional[0]!r}: flags have the form --name=value")
    return flags.FLAGS


def _help(doc: str | None, takes_config: bool, program: str, arguments: Arguments) -> str:
    parts = [(doc or "").strip(), "", "Flags:"]
    for flag in flags.FLAGS.get_key_flags_for_module(program):
        default = "" if flag.default is None else f" (default {flag.default!r})"
        parts.append(f"  --{flag.name}: {flag.help}{default}")
    if takes_config:
        parts.append(_CONFIG_HELP)
        if arguments.config_file is None:
            parts.append("  --config=path.py --help       also lists every leaf with its value")
        else:
            parts += ["", "Config:", config_lib.help_text(_load(arguments))]
    return "\n".join(parts)
