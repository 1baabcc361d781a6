"""Meshes of accelerators that are not there, to compile for. Tests skip where none can be made."""

import functools
import importlib.util
import os
import shutil

import numpy as np
import pytest
from jax.experimental.topologies import get_topology_desc
from jax.sharding import Mesh

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


def _mesh(devices) -> Mesh:
    return Mesh(np.array(devices).reshape(2, 2), ("data", "fsdp"))


# Devices of two calls count as different machines, so each topology is asked for once.
@functools.cache
def tpu_mesh() -> Mesh:
    """Four v5e chips."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # tests run in several processes
    os.environ.setdefault("TPU_LOG_DIR", "disabled")
    return _mesh(get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices)


@functools.cache
def gpu_mesh() -> Mesh:
    """Four H200 of one host."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("jax-cuda13-plugin is not installed")
    if shutil.which("ptxas") is None and importlib.util.find_spec("nvidia.cuda_nvcc") is None:
        pytest.skip("no ptxas")
    topology = get_topology_desc(
        platform="cuda", target_config=H200.replace("\n", " "), topology="1x1x4"
    )
    return _mesh(topology.devices)
