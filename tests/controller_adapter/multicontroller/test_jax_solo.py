import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("solo_programs.py")
BOUND_S = 120


def test_worlds_played_alone_trace_each_size_once_run_nothing_and_leave_a_process_that_computes():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    told = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=BOUND_S
    )
    assert told.returncode == 0, told.stderr
    usual = "key<fry> bfloat16 True"
    assert told.stdout.splitlines() == [
        f"3 6 3 False {usual} 1", "alive 0",
        f"2 4 2 False {usual} 2", "alive 0",
        f"3 6 3 False {usual} 2", "alive 0",
        f"2 4 2 False {usual} 2", "alive 0",
        f"1 2 1 True {usual} 3",
    ]  # fmt: skip
