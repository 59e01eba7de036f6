"""A real policy and a real judge: preflight, a visit with a checkpoint, a resume and a duel. `make test-real` runs it.

REAL_POLICY names the policy (a folder, or an id on the Hub), REAL_JUDGE_URL and REAL_JUDGE_MODEL the judge's server.
"""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

NAMES = ("REAL_POLICY", "REAL_JUDGE_URL", "REAL_JUDGE_MODEL")

pytestmark = [
    pytest.mark.skipif(not all(map(os.environ.get, NAMES)), reason=f"set {', '.join(NAMES)}"),
    pytest.mark.timeout(1800),
]


def run(module: str, *words: str) -> str:
    """Run a program of this project with the judge, and return what it printed."""
    judge = ("--judge_url", os.environ["REAL_JUDGE_URL"], "--judge_model", os.environ["REAL_JUDGE_MODEL"])
    command = [sys.executable, "-m", module, *words, *judge]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    print(done.stdout)
    return done.stdout


def test_a_real_policy_learns_from_a_real_judge_and_resumes(tmp_path):
    policy, folder = os.environ["REAL_POLICY"], str(tmp_path / "run")
    train = ("rankbuffer_tools.train.command", "--config", "recipes/small/small.yaml", "--output_dir", folder)
    train += ("--model_name_or_path", policy, "--num_generations", "4", "--per_device_train_batch_size", "8")
    train += ("--max_completion_length", "48", "--save_steps", "1")
    said = run(*train, "--max_steps", "2", "--preflight_only")
    assert "4 groups of 4 rollouts" in said and "its answer:" in said
    assert "after step 1" in run(*train, "--max_steps", "1")
    said = run(*train, "--max_steps", "2", "--resume_from_checkpoint", "true")
    assert "checkpoint-1, after step 1 of 2" in said and f"policy: {folder}, after step 2" in said
    words = ("--run_dir", folder, "--dataset_name", "recipes/small/everyday_kept_apart.jsonl", "--duels", "1")
    said = run("rankbuffer_tools.compare.command", *words, "--models", f"before={policy}", f"after={folder}")
    assert "by the verdicts, after wins" in said and " of 1 duels" in said
