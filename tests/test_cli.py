"""The command line in real subprocesses: exit codes, one sentence per mistake, help."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

from nag_jax import cli
from nag_jax.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = f"{ROOT}/configs/nag_small.py"

PROGRAM = '''
"""Prints what it was told."""

import sys
from absl import flags
from nag_jax import cli
from nag_jax.errors import UserError

flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
flags.DEFINE_integer("number", 3, "A number.")


def main(config, flags):
    if flags.workdir == "refused":
        raise UserError("--workdir=refused is refused")
    if flags.workdir == "interrupt":
        raise KeyboardInterrupt
    if flags.workdir == "fault":
        raise ZeroDivisionError("ours")
    leaf = config and (config.train.steps, config.checkpoint.keep_steps)
    print("ran", flags.workdir, flags.number, leaf, "jax" in sys.modules)
    return 7 if flags.workdir == "seven" else None


if __name__ == "__main__":
    cli.run(main, config="refused" if "--no" in sys.argv[0] else "given")
'''


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("program")
    (folder / "show.py").write_text(PROGRAM)
    (folder / "show--no.py").write_text(PROGRAM)
    (folder / "broken.py").write_text("\ndef get_config(arg):\n    return 1 / 0\n")
    return folder / "show.py"


def call(program, *args):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    }
    return subprocess.run(
        [sys.executable, str(program), *args],
        capture_output=True,
        text=True,
        env=environment,
        cwd=program.parent,
        timeout=120,
        check=False,
    )


def assert_refused(done, *words):
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def test_a_run_gets_its_config_and_flags(program):
    done = call(
        program,
        f"--config={CONFIG}:smoke",
        "--workdir",
        "here",
        "--config.train.steps=1e3",
        "--config.checkpoint.keep_steps",
        "(1, 2)",
        "--number=-4",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ran here -4 (1000, (1, 2))")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--workdir=w"], ["--config", "must be given"]),
        (["--config=lost.py", "--workdir=w"], ["lost.py"]),
        (["--config=broken.py", "--workdir=w"], ["broken.py", "line 3", "ZeroDivisionError"]),
        ([f"--config={CONFIG}"], ["--workdir must be given"]),
        ([f"--config={CONFIG}", "--workdir=w", "--nubmer=3"], ["nubmer", "number"]),
        ([f"--config={CONFIG}", "--workdir=w", "--number=x"], ["--number", "x"]),
        ([f"--config={CONFIG}", "--workdir=w", "stray"], ["'stray'"]),
        (["--workdir=w", "--config"], ["--config needs a value"]),
        ([f"--config={CONFIG}:wide=3", "--workdir=w"], ["nag_small.py", "wide"]),
    ],
)
def test_a_mistake_is_one_sentence(program, args, words):
    assert_refused(call(program, *args), *words)


def test_a_mistake_in_the_config_is_one_sentence(program):
    good = [f"--config={CONFIG}", "--workdir=w"]
    assert_refused(call(program, *good, "--config.model.d_modl=3"), "model.d_modl", "model.d_model")
    assert_refused(call(program, *good, "--config.model.d_model=2"), "model.d_model", "at least 3")


def test_exit_codes_of_main(program):
    good = f"--config={CONFIG}:smoke"
    assert_refused(call(program, good, "--workdir=refused"), "--workdir=refused")
    done = call(program, good, "--workdir=interrupt")
    assert done.returncode == 130 and "Traceback" not in done.stderr
    done = call(program, good, "--workdir=fault")
    assert done.returncode == 1 and "ZeroDivisionError: ours" in done.stderr
    assert call(program, good, "--workdir=seven").returncode == 7


def test_a_program_without_config_refuses_one(program):
    plain = program.parent / "show--no.py"
    done = call(plain, "--workdir=w")
    assert done.returncode == 0 and done.stdout == "ran w 3 None False\n"
    assert_refused(call(plain, "--workdir=w", f"--config={CONFIG}"), "takes no --config")
    assert_refused(call(plain, "--workdir=w", "--config.seed=1"), "takes no --config")


def test_help_needs_nothing_else_and_lists_the_leaves_of_a_config(program):
    done = call(program, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for words in ("Prints what it was told.", "--workdir", "Folder of the run.", "--config.<key>"):
        assert words in done.stdout
    done = call(program, f"--config={CONFIG}", "--config.model.d_model=96", "--help")
    assert done.returncode == 0
    for words in ("--config.model.d_model=96", "nag | residual_free", "--config.seed=0"):
        assert words in done.stdout
    done = call(program.parent / "show--no.py", "--help")
    assert "--config" not in done.stdout


def test_take_apart_keeps_other_flags_in_order():
    taken = cli.take_apart(
        ["--a=1", "-config", "x.py:smoke", "--config.b.c=d=e", "--config.m", "-1", "--configure"]
    )
    assert taken == cli.Arguments(
        "x.py:smoke", ["b.c=d=e", "m=-1"], wants_help=False, rest=["--a=1", "--configure"]
    )
    with pytest.raises(UserError, match=r"--config\.a needs a value"):
        cli.take_apart(["--config.a", "--b"])


def test_mistakes_are_found_before_jax_is_imported():
    code = textwrap.dedent("""
        import sys
        from nag_jax import cli
        heavy = {"jax", "orbax", "grain", "tokenizers"} & set(sys.modules)
        sys.exit(str(heavy) if heavy else 0)
    """)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == 0
