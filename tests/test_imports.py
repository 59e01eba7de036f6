"""What the import contracts of pyproject.toml cannot see: modules that others load, and SQL in texts."""

import ast
import re
import subprocess
import sys

import pytest
from conftest import ROOT

TRAINING = """
import sys
from datasets import Dataset
from rankbuffer_trl import RankBufferConfig, RankBufferTrainer
rubrics = [{"text": "names: water", "weight": 1}]
rows = [{"prompt": f"How do I make tea number {n}?", "rubrics": rubrics} for n in range(2)]
sizes = dict(num_generations=2, per_device_train_batch_size=2, max_completion_length=4, max_steps=1)
args = RankBufferConfig(sys.argv[2], method="pointwise", report_to="none", save_steps=1, **sizes)
RankBufferTrainer(sys.argv[1], args, train_dataset=Dataset.from_list(rows)).train()
print(*sys.modules)
"""


@pytest.mark.slow  # it trains in a process of its own; `make lint` shows what the library imports itself
def test_a_training_loads_neither_plots_nor_programs(tiny_policy, tmp_path):
    words = [sys.executable, "-c", TRAINING, tiny_policy, str(tmp_path)]
    loaded = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT, timeout=300)
    roots = {name.partition(".")[0] for name in loaded.stdout.split()}
    assert {"rankbuffer_trl", "trl"} <= roots and (tmp_path / "checkpoint-1" / "rankbuffer" / "run.json").is_file()
    assert not roots & {"matplotlib", "rankbuffer_tools", "evaluation"}


def test_fake_clients_of_a_judge_are_in_the_helpers_alone():
    """`helpers/judges.py` has one whose answers and waits a test decides. Judges of known behaviour are an audit's."""
    files = [path for path in ROOT.glob("tests/**/*.py") if path.parent.name != "helpers"]
    classes = [
        (path.name, each.name)
        for path in files
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.ClassDef) and "complete" in {getattr(part, "name", "") for part in each.body}
    ]
    assert len(files) > 80 and {name for name, _ in classes} <= {"test_audit.py"}, classes


def test_sql_is_in_the_store_alone():
    files = [
        path
        for folder in ("rankbuffer_trl", "rankbuffer_tools", "evaluation")
        for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    outside = [path for path in files if path.parent != ROOT / "rankbuffer_trl" / "store"]
    assert 0 < len(outside) < len(files)
    assert [path for path in outside if re.search(r"\b(SELECT|INSERT|DELETE FROM|PRAGMA)\b", path.read_text())] == []
