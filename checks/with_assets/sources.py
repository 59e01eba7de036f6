"""Print the commands that fetch the official files of the benchmarks, each once: `make assets` runs them.

python checks/with_assets/sources.py assets
"""

import sys
from pathlib import Path

import yaml

files = [
    file for page in sorted(Path("evaluation").glob("*/assets.yaml")) for file in yaml.safe_load(page.open()).values()
]
commands = dict.fromkeys(file["source"].replace("ASSETS", sys.argv[1]) for file in files)
print("\n".join(command for command in commands if not command.startswith("pip ")))  # the lock has that package
