"""Run the official scripts of a benchmark, unmodified."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from .assets import AssetError

SCRIPT_SECONDS = 300


class ScriptError(AssetError):
    """An official script is there, but it failed."""


def run_official(script: Path, *arguments: str, cwd: Path, stubs: Mapping[str, str], first: str = "") -> str:
    """Run an official script in its own process, after the code in `first`, and return what it printed.

    Args:
        stubs (`Mapping[str, str]`):
            Source by name of modules that replace libraries which need the network or are not installed.

    Raises:
        [`ScriptError`]: if the script takes too long, or fails, with the end of its error output.
    """
    modules = cwd / "stubs"
    modules.mkdir(exist_ok=True)
    for name, source in stubs.items():
        (modules / f"{name}.py").write_text(source, encoding="utf-8")
    # First in the path, so that a stub hides an installed library.
    code = f"import runpy, sys\nsys.path.insert(0, {str(modules)!r})\n{first}\nsys.argv = sys.argv[1:]\n"
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, str(script.absolute()), *arguments]
    # Its sets have one order, and it sees no keys.
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONHASHSEED": "0"}
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=SCRIPT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ScriptError(
            f"the official {script} did not end within {SCRIPT_SECONDS:g} s: run the command again on a quiet machine"
        ) from None
    if done.returncode:
        # A traceback ends with its cause.
        raise ScriptError(f"the official {script} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
