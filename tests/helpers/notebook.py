"""Run the cells of a notebook in order: `python notebook.py PATH`. Cells with the tag `install` are left out.

Jupyter gives `!` lines to a shell, and puts variables of the notebook where they say `$NAME`. So does this.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace


def shell(command: str) -> None:
    """Run a command with the variables of the notebook. Unlike in Jupyter, nothing goes on after a failure."""
    # As Jupyter does, which fills in nothing if one name is unknown
    given = re.sub(r"\$(\w+)", lambda found: str(names[found[1]]), command)
    subprocess.run(["bash", "-c", given], check=True)


names = {"shell": shell}
sys.modules |= {"IPython": SimpleNamespace(), "IPython.display": SimpleNamespace(HTML=str, Image=str)}
for cell in json.loads(Path(sys.argv[1]).read_text())["cells"]:
    if cell["cell_type"] == "code" and "install" not in cell["metadata"].get("tags", ()):
        code = re.sub(r"^!((?:.*\\\n)*.*)", lambda line: f"shell({line[1]!r})", "".join(cell["source"]), flags=re.M)
        exec(code, names)
