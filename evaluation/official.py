"""Comparisons with official numbers, and the official scripts that produce them."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .assets import AssetError

SCRIPT_SECONDS = 300


class ScriptError(AssetError):
    """An official script is there, but it failed."""


@dataclass(frozen=True)
class Check:
    """A number that must agree with an official one.

    Args:
        name (`str`):
            What the number is.
        ours (`float`):
            The number that this project computes.
        official (`float`):
            The official number.
        tolerance (`float`, *optional*, defaults to `0.0`):
            The largest difference that is accepted.
    """

    name: str
    ours: float
    official: float
    tolerance: float = 0.0

    @property
    def difference(self) -> float:
        """The difference `ours - official`."""
        return self.ours - self.official

    @property
    def agrees(self) -> bool:
        """Whether the difference is within the tolerance. NaN agrees with nothing."""
        return abs(self.difference) <= self.tolerance


def worst(name: str, pairs: Mapping[str, tuple[float, float]], tolerance: float = 0.0) -> Check:
    """Return the comparison with the largest difference.

    Args:
        name (`str`):
            What all the numbers are.
        pairs (`Mapping[str, tuple[float, float]]`):
            Our and the official number by name, at least one pair.
        tolerance (`float`, *optional*, defaults to `0.0`):
            See [`Check`].
    """
    apart = max(pairs, key=lambda key: distance(*pairs[key]))
    return Check(f"{name}, the furthest of {len(pairs)}: {apart}", *pairs[apart], tolerance)


def distance(ours: float, official: float) -> float:
    """Return the absolute difference of two numbers, infinity if one is NaN."""
    gap = abs(ours - official)
    return gap if gap == gap else float("inf")


def run_official(script: Path, *arguments: str, cwd: Path, stubs: Mapping[str, str], first: str = "") -> str:
    """Run an official script, unmodified, in its own process.

    Args:
        script (`Path`):
            The script.
        *arguments (`str`):
            The script's arguments.
        cwd (`Path`):
            The folder in which the script runs.
        stubs (`Mapping[str, str]`):
            Source of modules by name. They replace libraries that need the network or are not installed.
        first (`str`, *optional*):
            Code to run before the script.

    Returns:
        `str`: what the script printed.

    Raises:
        [`ScriptError`]: if the script fails, with the end of its error output.
    """
    modules = cwd / "stubs"
    modules.mkdir(exist_ok=True)
    for name, source in stubs.items():
        (modules / f"{name}.py").write_text(source, encoding="utf-8")
    code = f"import runpy, sys\nsys.path.insert(0, {str(modules)!r})\n{first}\nsys.argv = sys.argv[1:]\n"
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, str(script.absolute()), *arguments]
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=SCRIPT_SECONDS)
    if done.returncode:
        raise ScriptError(f"the official {script} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
