"""The benchmarks and their training scripts on the path, as they are when they run."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
for folder in (BENCHMARKS, BENCHMARKS / "scripts"):
    sys.path.insert(0, str(folder))
