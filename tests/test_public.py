"""What may be touched: programs, experiments and examples import these modules of the library, and no others."""

import ast
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
MODULES = {each.name for each in walk_packages(rankbuffer_trl.__path__, "rankbuffer_trl.")}
OUTSIDE = ("benchmarks", "checks", "docs", "evaluation", "examples", "experiments", "rankbuffer_tools", "recipes")


def test_only_public_modules_are_imported_from_outside():
    assert len(PUBLIC) <= 20
    for path in (path for folder in OUTSIDE for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                inside = [f"{node.module}.{name}" for name in names]  # a name may be a module
                names = [node.module or "", *(name for name in inside if name in MODULES)]
            for name in names:
                if name.split(".")[0] == "rankbuffer_trl":
                    assert name in PUBLIC, f"{path}:{node.lineno}: import from the package above {name}"


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_each_exported_function_and_class_has_a_docstring(module):
    for name, value in vars(import_module(module)).items():
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("rankbuffer_trl"):
            assert not callable(value) or value.__doc__, f"{module}.{name}"
