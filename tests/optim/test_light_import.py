"""Whoever wants an optimizer alone does not load the data and checkpoint libraries."""

import os
import subprocess
import sys
from pathlib import Path


def test_optimizers_import_neither_data_nor_checkpoint_libraries():
    script = (
        "import nag_jax.optim, sys; "
        "heavy = {'grain', 'orbax', 'tokenizers', 'array_record'} & set(sys.modules); "
        "inner = [m for m in sys.modules if m.startswith(('nag_jax.models', 'nag_jax.data'))]; "
        "assert not heavy and not inner, (heavy, inner)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
