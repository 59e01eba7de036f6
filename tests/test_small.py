"""The recipe for a real policy and a real judge: its notebook, with the comparison before and after."""

import re
import shutil

import pytest
from conftest import ROOT, run_program
from helpers.servers import served
from transformers import AutoTokenizer, GenerationConfig

from rankbuffer_tools.rubric_server import make_app


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last(tiny_policy, tmp_path, monkeypatch):
    path, key = ROOT / "examples" / "small_model.ipynb", "sk-not-to-be-seen"
    assert not re.search(r"/(root|home|tmp)/", path.read_text()), "what a run printed tells where it ran"
    policy, out = shutil.copytree(tiny_policy, tmp_path / "policy"), tmp_path / "out"
    nul = AutoTokenizer.from_pretrained(policy).convert_tokens_to_ids("\u0100")  # an audit refuses it
    GenerationConfig(suppress_tokens=[nul]).save_pretrained(policy)
    values = dict(POLICY=policy, JUDGE_MODEL="rubric-judge", PROMPTS=2, STEPS=1, OUT=out, OPENAI_API_KEY=key)
    with served(make_app()) as url:
        for name, value in (values | {"JUDGE_URL": f"{url}/v1"}).items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.chdir(ROOT)
        said = run_program(ROOT / "tests" / "helpers" / "notebook.py", path, timeout=500)
    assert len(re.findall("^== ", said, re.MULTILINE)) == 2 + 4, "prompts before training, and prompts kept apart"
    for line in ("its answer:", f"policy: {out}/run, after step 1", "by the log odds, after wins"):
        assert line in said
    assert key not in said
    for name in ("audit/audit.json", "run/model.safetensors", "run/_report/compare.json", "report/index.html"):
        assert (out / name).is_file(), name
