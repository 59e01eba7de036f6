"""What the import contracts of pyproject.toml cannot see: modules that others load, and SQL in texts."""

import re
import subprocess
import sys
from graphlib import TopologicalSorter

import grimp
import pytest
from conftest import ROOT


@pytest.mark.slow  # it loads TRL in a process of its own; `make lint` shows what this package imports itself
def test_the_trainer_loads_neither_plots_nor_the_laboratory():
    program = "import sys, rankbuffer_trl.training.trainer; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    roots = {name.partition(".")[0] for name in loaded.stdout.split()}
    assert {"rankbuffer_trl", "trl"} <= roots
    assert not roots & {"matplotlib", "rankbuffer_tools"}


def test_no_modules_import_each_other_not_even_for_types():
    roots = ("rankbuffer_trl", "rankbuffer_tools", "evaluation", "experiments")
    graph = grimp.build_graph(*roots, exclude_type_checking_imports=False, cache_dir=None)
    TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()


def test_sql_is_in_the_store_alone():
    files = [
        path
        for folder in ("rankbuffer_trl", "rankbuffer_tools", "evaluation")
        for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    outside = [path for path in files if path.parent != ROOT / "rankbuffer_trl" / "store"]
    assert 0 < len(outside) < len(files)
    assert [path for path in outside if re.search(r"\b(SELECT|INSERT|DELETE FROM|PRAGMA)\b", path.read_text())] == []
