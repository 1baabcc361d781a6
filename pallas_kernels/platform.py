"""The devices that a computation is traced for."""

import jax

# With 16 MiB of VMEM, and a compiler that lacks some of what the kernels do.
OLD_TPUS = ("TPU v2", "TPU v3", "TPU v4", "TPU v4 lite")


def platform_in_use() -> str:
    """Platform of the mesh in use, perhaps one only compiled for, or of the default device."""
    device = _abstract_device() or jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def tpu_refusal() -> str:
    """Why kernels cannot serve on the TPU in use, or nothing, also where there is none."""
    device = _abstract_device() or jax.config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.devices()[0]
    return "needs a TPU v5 or newer" if device.device_kind in OLD_TPUS else ""


def _abstract_device():
    return jax.sharding.get_abstract_mesh().abstract_device
