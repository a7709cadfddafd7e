"""torch's own tests of reconfigurable groups, on ours: they are not in torch's wheel.

PYTORCH_TESTS is a folder with PyTorch's test_c10d_fault_tolerance.py, of the tag of this torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_names import since_2_15

FOLDER = os.environ.get("PYTORCH_TESTS", "")
PROGRAM = """
import test_c10d_fault_tolerance as theirs
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests


class UnisonoFaultToleranceTest(theirs.AbstractFaultToleranceTest, MultiProcessTestCase):
    backend_name, device_type = "unisono", "cpu"


if __name__ == "__main__":
    run_tests()
"""


@since_2_15
@pytest.mark.skipif(not FOLDER, reason="PYTORCH_TESTS names no folder with PyTorch's tests")
def test_torch_s_tests_of_fault_tolerance(tmp_path: Path) -> None:
    program = tmp_path / "on_unisono.py"
    program.write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": os.path.abspath(FOLDER)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "OK" in ended.stderr
