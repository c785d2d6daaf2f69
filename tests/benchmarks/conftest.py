"""The benchmarks import one another by name; their tests do so, too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
