"""BLOCKSCALE_LOG: decisions on stderr, at import and after, and a warning for a level that does not exist."""

import os
import subprocess
import sys

import pytest

ROUTE = """
import blockscale.kernels
config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
blockscale.kernels.route(config, "model.layers.0.mlp.down_proj", weight_shape=(256, 256))
"""


@pytest.mark.parametrize("level, decision", [(None, False), ("info", True), ("error", False), ("INFO", False)], ids=str)
def test_decisions_are_printed_from_the_level_on(level, decision):
    environment = {key: value for key, value in os.environ.items() if key != "BLOCKSCALE_LOG"}
    if level:
        environment["BLOCKSCALE_LOG"] = level
    result = subprocess.run([sys.executable, "-c", ROUTE], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and not result.stdout
    assert ("INFO blockscale" in result.stderr and "CPUFp8BlockScaledMMKernel" in result.stderr) == decision
    assert ("expected `BLOCKSCALE_LOG` to be one of debug, info, warning, error, got INFO" in result.stderr) == (
        level == "INFO"
    )
