"""Parts of one's own in a package outside of nag_jax: what it takes, and how they are used.

From the root of the repository, with this folder's parent on the path:

  export PYTHONPATH=examples
  parts="--config.model.attention.kind=own_parts.parts:LinearAttention \
      --config.model.connection.kind=own_parts.parts:Highway"
  python -m nag_jax.check --config=configs/nag_small.py:smoke $parts
  python -m nag_jax.train --config=configs/nag_small.py:smoke $parts --workdir=runs/own
  python -m nag_jax.generate --checkpoint=runs/own --prompt='import ' --allow_user_kinds

docs/architecture.md says what each member is for.
"""
