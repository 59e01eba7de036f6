"""Checks that need more than a CPU without a network has. They share the fixtures of the suite in `tests/`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

pytest_plugins = ["conftest"]
