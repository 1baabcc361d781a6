"""Devices that are not there: accelerators of a topology, to compile for and never to run on.

TPU needs libtpu (`pip install 'jax[tpu]'`), NVIDIA GPU the CUDA plugin of JAX and ptxas.
"""

import functools
import importlib.util
import math
import os
import re
import shutil
from typing import Any

from etils import epath

from nag_jax.errors import UserError
from nag_jax.sharding.hardware import CHIPS, Chip

# The facts of a Hopper GPU that the compiler asks for.
_HOPPER = (
    'platform_name: "CUDA" device_description_str: "{name}" '
    "dnn_version_info {{ major: 9 minor: 10 }} "
    "gpu_device_info {{ core_count: 132 fpus_per_core: 128 threads_per_warp: 32 "
    "threads_per_core_limit: 2048 threads_per_block_limit: 1024 registers_per_core_limit: 65536 "
    "registers_per_block_limit: 65536 shared_memory_per_core: 233472 "
    "shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 "
    "l2_cache_size: 52428800 clock_rate_ghz: 1.98 block_dim_limit_x: 2147483647 "
    "block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} "
    "device_memory_size: {memory} "
    "cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }} }}"
)
_NAME = re.compile(r"(?P<chip>\w+):(?P<shape>\d+(x\d+)*)")
MOST_CPUS = 1024  # simulated ones share this machine
EXAMPLES = "v5e:4x4, v5p:2x2x1, v6e:2x4, tpu7x:2x2x1, h200:8, h100:2x8 (two hosts of 8), cpu:8"


def parse_topology(name: str) -> tuple[str, tuple[int, ...]]:
    """Takes a topology's name apart: (chip, shape).

    Raises:
        UserError: The name has another form, or an unknown chip.
    """
    match = _NAME.fullmatch(name)
    allowed = ("cpu", *CHIPS)
    if not match or match["chip"] not in allowed:
        raise UserError(
            f"--topology={name} is none: it must be a chip of {', '.join(allowed)} and a shape, "
            f"such as {EXAMPLES}"
        )
    shape = tuple(int(length) for length in match["shape"].split("x"))
    if 0 in shape:
        raise UserError(f"--topology={name} has no devices")
    if match["chip"] == "cpu" and (len(shape) > 1 or shape[0] > MOST_CPUS):
        raise UserError(
            f"--topology={name}: CPUs are cpu:count, such as cpu:8, and at most {MOST_CPUS}"
        )
    return match["chip"], shape


@functools.cache  # devices of two calls count as different machines
def absent_devices(name: str) -> list:
    """Devices of a topology, of which none needs to be there (of "cpu:n" the host's own).

    Raises:
        UserError: An unknown topology, or no compiler for it.
    """
    import jax
    from jax.experimental.topologies import get_topology_desc

    chip, shape = parse_topology(name)
    if chip == "cpu":
        devices = jax.devices("cpu")
        if len(devices) != shape[0]:
            raise UserError(f"--topology={name}: this process has {len(devices)} CPU devices")
        return devices
    if CHIPS[chip].platform == "tpu":
        _require("libtpu", "TPU", "pip install 'jax[tpu]'")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nothing is run on a chip
        os.environ.setdefault("TPU_LOG_DIR", "disabled")
        told: dict[str, Any] = {
            "platform": "tpu",
            "topology_name": f"{chip}:{'x'.join(map(str, shape))}",
        }
        if math.prod(shape) == 1:
            told["chips_per_host_bounds"] = [1, 1, 1]
        if chip == "v4":  # else each of a chip's two cores is a device
            told["chip_config_name"] = "megacore"
    else:
        _require("jax_cuda13_plugin", "NVIDIA GPUs", "pip install 'jax[cuda13]'")
        if not _has_ptxas():
            raise UserError(
                f"--topology={name}: ptxas must be installed, by the CUDA toolkit or by "
                "pip install nvidia-cuda-nvcc"
            )
        if len(shape) > 2:
            raise UserError(f"--topology={name}: GPUs are {chip}:count or {chip}:hostsxcount")
        told = {
            "platform": "cuda",
            "target_config": target_config(CHIPS[chip]),
            "topology": "x".join(map(str, (1,) * (3 - len(shape)) + shape)),
        }
    try:
        return list(get_topology_desc(**told).devices)
    except Exception as error:  # the plugins raise what they like
        reason = str(error).strip().splitlines()[0][:200].removeprefix("INVALID_ARGUMENT: ")
        raise UserError(f"--topology={name} cannot be compiled for: {reason}") from error


def target_config(chip: Chip) -> str:
    """What XLA's compiler for GPU asks of the device, as a text proto."""
    return _HOPPER.format(
        name=f"NVIDIA {chip.name.split()[0]}",
        bandwidth=round(chip.bandwidth),
        memory=round(chip.memory),
    )


def _has_ptxas() -> bool:
    """On PATH, or in a wheel of CUDA 12 or 13."""
    if shutil.which("ptxas"):
        return True
    nvidia = importlib.util.find_spec("nvidia")
    folders = list(nvidia.submodule_search_locations or ()) if nvidia else []
    return any(
        (epath.Path(folder) / wheel / "bin" / "ptxas").exists()
        for folder in folders
        for wheel in ("cu13", "cuda_nvcc")
    )


def _require(package: str, what: str, command: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(f"to compile for {what} {package} must be installed: {command}")
