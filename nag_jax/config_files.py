"""Config files: running `path.py:argument` and reading the argument.

A config file defines `get_config(arg)`, which returns only what differs from the defaults. A
mistake in one becomes a sentence with its file and line. What the keys mean is not known here.
"""

from __future__ import annotations

import inspect
import re
import traceback
import types
from collections.abc import Iterable, Mapping

from etils import epath
from ml_collections import ConfigDict

from nag_jax.dotted import flatten, nest
from nag_jax.errors import UserError
from nag_jax.values import Leaf, check_default, parse

_SPEC = re.compile(r"(?P<path>.*?\.py)(?::(?P<arg>.*))?", re.DOTALL)


def load_config_file(spec: str) -> ConfigDict:
    """What the `get_config` of a config file returns.

    Args:
      spec: "path.py" or "path.py:argument"; the argument is given to `get_config`, or "".

    Raises:
      UserError: no such file, a mistake in it, or an argument it refuses; names file and line.
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise UserError(f"--config={spec}: a config is a Python file, path.py or path.py:argument")
    path, arg = epath.Path(match["path"]).expanduser(), match["arg"]
    try:
        source = path.read_text()
    except FileNotFoundError as error:
        raise UserError(f"--config={spec}: there is no file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config={spec}: {path} cannot be read: {error}") from error

    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
        get_config = getattr(module, "get_config", None)
        if not callable(get_config):
            raise UserError("it defines no function get_config")
        if inspect.signature(get_config).parameters:
            overrides = get_config(arg or "")
        elif arg is None:
            overrides = get_config()
        else:
            raise UserError(f"its get_config takes no argument, but {arg!r} was given")
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{path}{_line(error, str(path))}: {_describe(error)}") from error
    if not isinstance(overrides, ConfigDict | Mapping):
        raise UserError(
            f"{path}: get_config must return a ConfigDict, not {type(overrides).__name__}"
        )
    return ConfigDict(nest(flatten(overrides)))


def parse_arg(arg: str, **defaults: Leaf) -> types.SimpleNamespace:
    """Reads the argument of a config file: "smoke,depth=12", comma-separated.

    Every config takes `smoke`; the others are those in `defaults`, typed by their default values. A
    bare word sets a true-or-false argument to true.

    Example:
      args = parse_arg("smoke,depth=12", depth=6)  # args.smoke is True, args.depth is 12

    Raises:
      UserError: an unknown argument or a wrong type; names what is allowed.
    """
    values = {"smoke": False} | defaults
    for name, default in values.items():
        check_default(name, default)
    for item in filter(None, (part.strip() for part in arg.split(","))):
        name, equals, text = item.partition("=")
        if name not in values:
            allowed = ", ".join(
                key if type(default) is bool else f"{key}={default}"
                for key, default in ({"smoke": False} | defaults).items()
            )
            raise UserError(f"the argument {item!r} is not known; it takes {allowed}")
        if not equals and type(values[name]) is not bool:
            raise UserError(f"the argument {name} needs a value: {name}={values[name]}")
        values[name] = parse(f"the argument {name}", text, values[name]) if equals else True
    return types.SimpleNamespace(**values)


def one_of(name: str, value: Leaf, allowed: Iterable[Leaf]) -> Leaf:
    """The value of an argument that takes only some.

    Raises:
      UserError: `value` is none of them.
    """
    if value not in allowed:
        raise UserError(
            f"the argument {name} is {value!r}; it takes {', '.join(map(str, allowed))}"
        )
    return value


def _describe(error: BaseException) -> str:
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {message}".strip().removesuffix(":")


def _line(error: BaseException, path: str) -> str:
    """The last line of the file that took part, as ", line 12"."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f", line {error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    return f", line {lines[-1]}" if lines else ""
