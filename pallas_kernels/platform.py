"""The platform that a computation is traced for."""

import jax


def platform_in_use() -> str:
    """Platform of the mesh in use, perhaps one only compiled for, or of the default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
