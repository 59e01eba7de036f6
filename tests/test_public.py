"""What may be touched: programs, experiments and examples import these modules of the library, and no others."""

import ast
import re
from importlib import import_module
from pkgutil import walk_packages

import pytest
from conftest import ROOT

import rankbuffer_trl

PUBLIC = {
    *("rankbuffer_trl", "rankbuffer_trl.buffer", "rankbuffer_trl.data", "rankbuffer_trl.decoding"),
    *("rankbuffer_trl.errors", "rankbuffer_trl.files", "rankbuffer_trl.groups", "rankbuffer_trl.judge"),
    *("rankbuffer_trl.judge.config", "rankbuffer_trl.checkpointing.manifest", "rankbuffer_trl.monitoring"),
    *("rankbuffer_trl.monitoring.progress", "rankbuffer_trl.ranking", "rankbuffer_trl.rewards"),
    *("rankbuffer_trl.settings", "rankbuffer_trl.stems", "rankbuffer_trl.store", "rankbuffer_trl.store.history"),
    *("rankbuffer_trl.testing", "rankbuffer_trl.training"),
}
MODULES = {each.name: each for each in walk_packages(rankbuffer_trl.__path__, "rankbuffer_trl.")}
OUTSIDE = ("benchmarks", "checks", "docs", "evaluation", "examples", "experiments", "rankbuffer_tools", "recipes")
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]


def programs():
    """Return the code of all files that stand on the library, and of the examples in the pages."""
    for path in (path for folder in OUTSIDE for path in (ROOT / folder).rglob("*.py")):
        yield path, path.read_text()
    for page in PAGES:
        for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
            yield page, "\n".join(line for line in code.splitlines() if line.startswith(("from ", "import ")))


def test_only_public_modules_are_imported_from_outside():
    assert len(PUBLIC) <= 20 and {"rankbuffer_trl", *MODULES} >= PUBLIC
    for path, code in programs():
        for node in ast.walk(ast.parse(code)):
            names = [each.name for each in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                inside = [f"{node.module}.{name}" for name in names]  # a name may be a module
                names = [node.module or "", *(name for name in inside if name in MODULES)]
            for name in names:
                if name.split(".")[0] == "rankbuffer_trl":
                    assert name in PUBLIC, f"{path}:{node.lineno}: import from the package above {name}"


def test_a_private_file_has_an_underscore():
    private = {name for name, module in MODULES.items() if not module.ispkg} - PUBLIC
    assert not [name for name in private if not name.split(".")[-1].startswith("_")]


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_each_exported_function_and_class_has_a_docstring(module):
    for name, value in vars(import_module(module)).items():
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("rankbuffer_trl"):
            assert not callable(value) or value.__doc__, f"{module}.{name}"
