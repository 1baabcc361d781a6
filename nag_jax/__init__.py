"""Norm-agnostic and residual-free transformers in JAX.

Importing the package is light: `load_run`, which needs checkpoints, tokenizers and the model, is
imported at first use, so that `import nag_jax.optim` pulls in none of them.
"""

__version__ = "0.1.0"


def __getattr__(name: str):
    if name == "load_run":
        from nag_jax.runs import load_run

        return load_run
    raise AttributeError(f"module 'nag_jax' has no attribute {name!r}")
