"""Registers, spills and shared memory of the GPU kernels of the residual update, without a GPU.

  JAX_PLATFORMS=cpu python benchmarks/gpu_registers.py [--widths=128,1024] [--kernels=mosaic_gpu]

Each kernel is compiled for H200, as in a model, and its PTX assembled once more by `ptxas -v`. A
cell is "registers of a thread / bytes that a thread spills / bytes of shared memory of a block".
Needs jax-cuda13-plugin and ptxas; kernels that cannot serve here are left out, with the reason.
"""

import itertools
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import Mesh, NamedSharding

from nag_jax.sharding.topologies import absent_devices
from pallas_kernels import nag_update
from pallas_kernels.nag_update import choose

_WIDTHS = flags.DEFINE_list(
    "widths", ["128", "1024", "2048", "4096", "6144", "8192"], "features of a token"
)
_KERNELS = flags.DEFINE_list("kernels", ["pallas_triton", "mosaic_gpu", "triton"], "rows")

# For each kernel the file and the text that tell its shared memory, of the given pass.
SHARED = {
    "pallas_triton": ("*.thunk_sequence.txt", r"nag_update_{} .*shared_memory: (\d+)"),
    "mosaic_gpu": ("nag_update_{}_*.log", r"dynamic_shared_memory_size %c(\d+)_i32"),
    "triton": ("{}_kernel.compile_info", r"shared_mem_bytes: (\d+)"),
}


class Used(NamedTuple):
    """What one pass of a kernel takes: registers and bytes spilled of a thread, bytes shared."""

    registers: int
    spilled: int
    shared: int


def used(kernel: str, width: int, dtype: str, folder: pathlib.Path) -> tuple[Used, Used]:
    """What both passes of a kernel take on H200; the compilers write into the folder."""
    shutil.rmtree(folder)
    folder.mkdir()
    mesh = Mesh(np.array(absent_devices("h200:1")), ("data",))
    whole = NamedSharding(mesh, jax.P())
    wide = jax.ShapeDtypeStruct((4096, width), dtype, sharding=whole)
    narrow = jax.ShapeDtypeStruct((4096,), jnp.float32, sharding=whole)

    def both_passes(direction, branch, gain, *cotangents):
        out, pull_back = jax.vjp(
            lambda *inputs: nag_update(*inputs, implementation=kernel), direction, branch, gain
        )
        return out, pull_back(cotangents)

    with jax.set_mesh(mesh):
        jax.jit(both_passes).lower(wide, wide, narrow, wide, narrow).compile(
            {"xla_dump_to": str(folder), "xla_dump_emitter_re": "ptx"}
        )
    return _used(kernel, "forward", folder), _used(kernel, "backward", folder)


def _used(kernel: str, name: str, folder: pathlib.Path) -> Used:
    (ptx,) = (
        path for path in folder.rglob("*.ptx") if re.search(rf"\.entry \w*{name}", path.read_text())
    )
    told = subprocess.run(
        ["ptxas", "-v", "-arch=sm_90a", str(ptx), "-o", os.devnull],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    file, pattern = (text.format(name) for text in SHARED[kernel])
    (found,) = folder.rglob(file)
    texts = (
        (r"Used (\d+) registers", told),
        (r"(\d+) bytes spill stores", told),
        (pattern, found.read_text()),
    )
    return Used(*(int(re.search(regex, text)[1]) for regex, text in texts))


def main(argv):
    del argv
    folder = pathlib.Path(tempfile.mkdtemp())
    os.environ["MOSAIC_GPU_DUMP_TO"] = os.environ["JAX_TRITON_DUMP_DIR"] = str(folder)
    jax.config.update(
        "jax_enable_compilation_cache", False
    )  # what is read from there is not dumped
    print("| kernel | dtype | width | forward | backward |\n|---|---|---|---|---|")
    refused = {}
    for kernel, dtype in itertools.product(_KERNELS.value, ("float32", "bfloat16")):
        for width in map(int, _WIDTHS.value):
            try:
                choose(kernel, "gpu", width=width, dtypes=(dtype, dtype))
            except ValueError as error:
                refused[str(error)] = None
                continue
            both = used(kernel, width, dtype, folder)
            cells = " | ".join(" / ".join(map(str, one)) for one in both)
            print(f"| `{kernel}` | {dtype} | {width} | {cells} |", flush=True)
    print("", *refused, sep="\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    app.run(main)
