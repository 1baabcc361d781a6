"""Meshes of accelerators that are not there, to compile for. Tests skip where none can be made."""

import functools
import importlib.util
import os
import shutil

import numpy as np
import pytest
from jax.experimental.topologies import get_topology_desc
from jax.sharding import Mesh

from nag_jax.sharding.rules import MESH_AXES

SQUARE = (2, 2, 1, 1)

# The facts of a Hopper GPU that the compiler asks for.
H200 = """
platform_name: "CUDA" device_description_str: "NVIDIA H200" dnn_version_info { major: 9 minor: 10 }
gpu_device_info { core_count: 132 fpus_per_core: 128 threads_per_warp: 32
threads_per_core_limit: 2048 threads_per_block_limit: 1024 registers_per_core_limit: 65536
registers_per_block_limit: 65536 shared_memory_per_core: 233472 shared_memory_per_block: 49152
shared_memory_per_block_optin: 232448 l2_cache_size: 52428800 clock_rate_ghz: 1.98
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
memory_bandwidth: 4800000000000 device_memory_size: 151397597184
cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES } }
"""


def tpu_mesh(topology: str = "v5e:2x2", shape: tuple[int, ...] = SQUARE) -> Mesh:
    """v5e chips, with the given lengths of `MESH_AXES`."""
    return _mesh(_tpus(topology), shape)


def gpu_mesh(count: int = 4, shape: tuple[int, ...] = SQUARE) -> Mesh:
    """H200 of one host, with the given lengths of `MESH_AXES`."""
    return _mesh(_gpus(count), shape)


def _mesh(devices: list, shape: tuple[int, ...]) -> Mesh:
    return Mesh(np.array(devices).reshape(shape), MESH_AXES)


# Devices of two calls count as different machines, so each topology is asked for once.
@functools.cache
def _tpus(topology: str) -> list:
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # tests run in several processes
    os.environ.setdefault("TPU_LOG_DIR", "disabled")
    return get_topology_desc(platform="tpu", topology_name=topology).devices


@functools.cache
def _gpus(count: int) -> list:
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("jax-cuda13-plugin is not installed")
    if shutil.which("ptxas") is None and importlib.util.find_spec("nvidia.cuda_nvcc") is None:
        pytest.skip("no ptxas")
    return get_topology_desc(
        platform="cuda", target_config=H200.replace("\n", " "), topology=f"1x1x{count}"
    ).devices
