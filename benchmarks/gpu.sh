#!/usr/bin/env bash
# Checks and times the fused kernels on a machine with an NVIDIA GPU, in under five minutes:
#
#   benchmarks/gpu.sh [--seconds=0.2] [--blocks=24]
#
# PYTHON names the interpreter (python3 without it), which has this project's packages and jax[cuda13];
# with jax-triton its kernel is checked, too. Without a GPU the same runs to its end, tiny and interpreted.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}" XLA_PYTHON_CLIENT_PREALLOCATE=false
python=${PYTHON:-python3}
if ! "$python" -c 'import absl, flax, jax, jaxtyping, ml_collections, optax, rich' 2>/dev/null; then
    echo "$python has not all that the project needs: $python -m pip install -e '.[cuda]'" >&2
    exit 2
fi
"$python" -c 'import jax; print("jax", jax.__version__, jax.devices())'
exec "$python" benchmarks/gpu_kernels.py "$@"
