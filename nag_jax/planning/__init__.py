"""What a configuration costs on devices that are not there; the binary is `nag_jax/plan.py`."""
