"""Loading the compiled library: a second copy in the process, as an engine may bundle one, is left unused."""

import shutil
import subprocess
import sys

import pytest

from blockscale.ops import LIBRARY

COPY = "torch.ops.load_library(sys.argv[1])"
RUN = "print(blockscale.BlockScaledLinear.from_float(torch.nn.Linear(5, 3))(torch.ones(2, 5)).shape)"


@pytest.mark.parametrize("order", [("import blockscale", COPY), (COPY, "import blockscale")], ids=("after", "before"))
def test_second_copy_of_the_library(order, tmp_path):
    copy = shutil.copy(LIBRARY, tmp_path / "copy.so")
    program = "; ".join(["import sys, torch", *order, RUN])
    result = subprocess.run([sys.executable, "-c", program, copy], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "torch.Size([2, 3])"
    assert "another copy of this library is loaded" in result.stderr
