"""One comparison with an official number, and official scripts run to get one."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..assets import AssetError

SCRIPT_SECONDS = 300


class ScriptError(AssetError):
    """An official script that is there, and fails."""


@dataclass(frozen=True)
class Check:
    """A number that must agree with an official one.

    Args:
        name (`str`):
            What it is.
        ours (`float`):
            The number of this project's code.
        official (`float`):
            The official one.
        tolerance (`float`, *optional*, defaults to `0.0`):
            How far they may be apart.
    """

    name: str
    ours: float
    official: float
    tolerance: float = 0.0

    @property
    def difference(self) -> float:
        """`ours` above `official`."""
        return self.ours - self.official

    @property
    def agrees(self) -> bool:
        """Whether they are as close as they must be. NaN agrees with nothing."""
        return abs(self.difference) <= self.tolerance


def worst(name: str, pairs: Mapping[str, tuple[float, float]], tolerance: float = 0.0) -> Check:
    """The comparison that is furthest apart of many.

    Args:
        name (`str`):
            What they all are.
        pairs (`Mapping[str, tuple[float, float]]`):
            Our and the official number by name, at least one.
        tolerance (`float`, *optional*, defaults to `0.0`):
            See [`Check`].
    """
    apart = max(pairs, key=lambda key: distance(*pairs[key]))
    return Check(f"{name}, the furthest of {len(pairs)}: {apart}", *pairs[apart], tolerance)


def distance(ours: float, official: float) -> float:
    """How far apart they are; infinitely, if one is NaN."""
    gap = abs(ours - official)
    return gap if gap == gap else float("inf")


def run_official(script: Path, *arguments: str, cwd: Path, stubs: Mapping[str, str], first: str = "") -> str:
    """Run an official script, unmodified, in a process of its own.

    Args:
        script (`Path`):
            The script.
        *arguments (`str`):
            Its arguments.
        cwd (`Path`):
            Where it runs.
        stubs (`Mapping[str, str]`):
            Source of modules that stand for libraries which it imports and which need the network, or are not there.
        first (`str`, *optional*):
            Code to run before it.

    Returns:
        `str`: what it printed.

    Raises:
        [`ScriptError`]: if the script fails, with its last words.
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
