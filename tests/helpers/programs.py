"""The programs of this repository by name: console scripts, scripts of a folder, modules for `python -m`."""

import re
import runpy
import sys
from importlib import import_module

from conftest import ROOT


def entry_points() -> dict[str, tuple[str, str]]:
    """Return module and function of the package's console scripts, by name."""
    found = re.findall(r'"(rankbuffer-[\w-]+) = ([\w.]+):(\w+)"', (ROOT / "setup.py").read_text())
    return {name: (module, function) for name, module, function in found}


def start(name: str, arguments: list[str]) -> None:
    """Run a program in this process, with these arguments on its command line."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [name, *arguments]
    try:
        if name.endswith(".py"):
            sys.path.insert(0, str((ROOT / name).parent))
            runpy.run_path(str(ROOT / name), run_name="__main__")
        elif name in entry_points():
            module, function = entry_points()[name]
            getattr(import_module(module), function)()
        else:
            runpy.run_module(name, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path
