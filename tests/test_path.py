"""The path of docs/train.md from a file of prompts to a trained policy: its commands run in order, with stand-ins."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.launching import ROOT, alive
from helpers.path_programs import RECIPE
from helpers.ports import free_ports

pytestmark = pytest.mark.slow


def blocks() -> list[str]:
    """Return the commands of the section, block by block."""
    section = (
        (ROOT / "docs" / "train.md").read_text().split("## From prompts to a trained policy")[1].split("\n## ")[0]
    )
    return re.findall(r"```bash\n(.*?)```", section, re.DOTALL)


def walk(folder: Path, machine: str, policy: str, prompts: list[str]) -> tuple[str, list[dict]]:
    """Type the commands of the section for a machine in a checkout. Return what they print and which programs ran."""
    for name in ("recipes", "accelerate_configs", "evaluation", "rankbuffer_trl", "rankbuffer_tools"):
        (folder / name).symlink_to(ROOT / name)
    programs, port = folder / "bin", free_ports(2)[0]
    programs.mkdir()
    for name in ("vllm", "accelerate", "pip", "hf"):
        run = f'exec {sys.executable} -m helpers.path_programs {name} "$@"' if name in ("vllm", "accelerate") else ""
        (programs / name).write_text(f"#!/bin/sh\n{run}\n")
        (programs / name).chmod(0o755)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "data").mkdir()
    (folder / "data" / "my_prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    install, one, eight, steps, evaluation, stop = blocks()
    few = "--engine transformers --max_new_tokens 16 --duels 4"  # the programs in the place of vLLM sample no policy
    steps = steps.replace("--engine_arguments=--gpu-memory-utilization=0.5", few)
    typed = [install, {"one": one, "eight": eight}[machine], steps, f"({evaluation}) || true\n", stop, "wait\n"]
    environment = os.environ | {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "CALLS": str(folder / "calls"), "PORT": str(port), "POLL_SECONDS": "0.1", "STOP_SECONDS": "20",
        "POLICY": policy, "RECIPE": "recipe.yaml", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    with (folder / "output").open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-ec", "".join(typed).replace(":8001/", f":{port + 1}/")],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        shell.wait(timeout=550)
    except subprocess.TimeoutExpired:
        os.killpg(shell.pid, signal.SIGTERM)  # the scripts end their servers
        shell.wait(timeout=60)
    calls = [json.loads(line) for line in (folder / "calls").read_text().splitlines()]
    printed = (folder / "output").read_text()
    assert shell.returncode == 0, printed
    assert not [call for call in calls if alive(call["pid"])]
    return printed, calls


EIGHT = {"judge": "6,7", "sampler": "0,1,2,3", "rollouts": "4,5", "training": "0,1,2,3"}


@pytest.mark.parametrize(
    ("machine", "judge", "gpus"),
    [
        ("one", "Qwen/Qwen3-4B-Instruct-2507", {"judge": "0", "sampler": "0", "training": "0"}),
        ("eight", "Qwen/Qwen3-30B-A3B-Instruct-2507", EIGHT),
    ],
)
def test_the_path_leads_from_prompts_to_a_trained_policy(machine, judge, gpus, tmp_path, tiny_policy, howto):
    prompts = [row["prompt"][0]["content"] for row in howto[:32]]  # 20 to train, 12 to compare
    printed, calls = walk(tmp_path, machine, tiny_policy, prompts)
    assert calls[0]["argv"][1] == judge
    started = dict(zip(gpus, (call["gpus"] for call in calls), strict=True))
    assert started == gpus, "each program once, in this order"
    rows = [json.loads(line) for line in (tmp_path / "data" / "mine.jsonl").read_text().splitlines()]
    assert len(rows) == 20 and all(len(row["rubrics"]) == 3 and len(row["responses"]) == 7 for row in rows)
    assert "[preflight] the run: 40 groups of 8 rollouts" in printed
    weights = {"one": "adapter_model.safetensors", "eight": "model.safetensors"}[machine]
    assert (tmp_path / "runs" / "mine" / weights).is_file()
    assert (tmp_path / "runs" / "mine" / "_report" / "index.html").is_file()
    found = json.loads((tmp_path / "runs" / "mine" / "_report" / "compare.json").read_text())
    assert found["judge"] == judge
    assert "evaluation: " in printed and "git clone" in printed, "the official files are not here, and it says so"
