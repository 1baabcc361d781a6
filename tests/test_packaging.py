"""What may import what, what an import costs, and that the pinned versions fit the project."""

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PACKAGES = ("nag_jax", "pallas_kernels")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
BINARIES = {
    f"nag_jax.{path.stem}"
    for path in (ROOT / "nag_jax").glob("*.py")
    if 'if __name__ == "__main__":' in path.read_text()
}
# Higher layers may import lower ones, never the other way round.
HIGHER = {f"nag_jax.{name}" for name in ("training", "evals", "analysis", "runs")} | BINARIES
FORBIDDEN = {
    "pallas_kernels": {"nag_jax"},
    "nag_jax.optim": {"nag_jax.models", "nag_jax.data"} | HIGHER,
    "nag_jax.models": {"nag_jax.data", "nag_jax.optim"} | HIGHER,
    "nag_jax.data": {"nag_jax.models", "nag_jax.optim"} | HIGHER,
    "nag_jax.sharding": HIGHER,
    "nag_jax.evals": {"nag_jax.training"} | BINARIES,
    "nag_jax.training": BINARIES,
    "nag_jax.analysis": BINARIES,
}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path):
    """Names that a file imports, anywhere in it; `from a import b` gives a and a.b."""
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def is_within(module, package):
    return f"{module}.".startswith(f"{package}.")


@pytest.mark.parametrize("package", FORBIDDEN)
def test_dependencies_point_one_way(package):
    wrong = [
        f"{module_name(path)} imports {module}"
        for path in SOURCES
        if is_within(module_name(path), package)
        for module in sorted(imported_modules(path))
        for forbidden in FORBIDDEN[package]
        if is_within(module, forbidden)
    ]
    assert not wrong


@pytest.mark.parametrize("name", [module_name(path) for path in SOURCES])
def test_every_module_imports(name):
    if name == "pallas_kernels.nag_update.triton_kernels":
        pytest.importorskip("triton")
    if name in BINARIES:  # each defines flags of its own, so that two do not go into one process
        run_python(f"import {name}")
    else:
        importlib.import_module(name)


def run_python(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("package", ["nag_jax", "nag_jax.optim", "pallas_kernels"])
def test_import_is_light(package):
    heavy = "{'grain', 'orbax', 'tokenizers'}"
    code = f"import sys, {package}; print(sorted({heavy} & set(sys.modules)))"
    assert run_python(code).strip() == "[]"


def test_pinned_versions_satisfy_every_requirement():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["test"]
    files = sorted((ROOT / "constraints").glob("py*.txt"))
    assert files
    for file in files:
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
        pins = {canonical(name): version for name, version in (x.split("==") for x in lines)}
        for text in needed:
            requirement = Requirement(text)
            assert requirement.specifier.contains(pins[canonical(requirement.name)]), (file, text)


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_version_and_licence_agree_with_the_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence and "END OF TERMS AND CONDITIONS" in licence
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", importlib.import_module("nag_jax").__version__)
