"""The platform that a computation is traced for."""

import jax


def platform_in_use() -> str:
    """Platform of the mesh in use, perhaps one only compiled for, or of the default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform
