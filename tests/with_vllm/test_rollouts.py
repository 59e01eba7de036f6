"""Rollouts from a real vLLM server through TRL's own client; `rollouts.py` is the run, in the server's environment."""

import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from statistics import median

import pytest
from helpers.scripted import contents
from transformers import AutoModelForCausalLM

from rankbuffer_trl.store._places import LIVE_STORE

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ROLLOUTS = 2 * 24  # of one run
SEEDED = 2 * 8  # rollouts with a seed after each run, once as one request and once as one request each


@pytest.fixture
def runs(request, rollout_server, random_model, data_file, tmp_path):
    """The three runs' notes, their stores' contents, and what the server counted."""
    command = [request.config.getoption("vllm_python"), HERE / "rollouts.py", tmp_path, "--url", rollout_server.root]
    command += ["--policy", random_model, "--data", data_file]
    paths = os.pathsep.join(str(path) for path in (ROOT, ROOT / "tests"))
    environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    before = rollout_server.counters()
    log = tmp_path / "log"
    with log.open("w") as output:
        run = subprocess.Popen(
            [str(part) for part in command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        status = run.wait(timeout=180)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    assert status == 0, log.read_text(errors="replace")[-4000:]
    notes = json.loads((tmp_path / "rollouts.json").read_text())
    stores = {name: contents(tmp_path / name / LIVE_STORE) for name in notes}
    return notes, stores, rollout_server.since(before, requests=3 * (ROLLOUTS + 2 * SEEDED))


def test_grpo_on_rollouts_of_a_server(runs, random_model, note):
    notes, stores, added = runs
    assert {len(run["lengths"]) for run in notes.values()} == {ROLLOUTS}
    seeded = [ids for run in notes.values() for way in ("separate", "together") for ids in run[way]["completion_ids"]]
    assert added.completion == sum(sum(run["lengths"]) for run in notes.values()) + sum(map(len, seeded))

    # The judge is asked while other rollouts are still generated. These rollouts have one length, so all of them end
    # within milliseconds, and a busy machine decides what comes first. tests/test_early.py holds the order itself.
    before_last = []
    for run in notes.values():
        rollouts = [place for place, event in enumerate(run["events"]) if event == "rollout"]
        assert len(rollouts) == ROLLOUTS + SEEDED
        first, *_ = (place for place, event in enumerate(run["events"]) if event == "verdict" and place > rollouts[0])
        before_last.append(sum(place < first for place in rollouts[:24]))

    # One request per rollout samples what one request for all samples.
    for run in notes.values():
        separate, together = run["separate"], run["together"]
        assert separate["prompt_ids"] == together["prompt_ids"]
        assert separate["completion_ids"] == together["completion_ids"]
        assert separate["logprob_token_ids"] == together["logprob_token_ids"]
        for mine, theirs in zip(separate["logprobs"], together["logprobs"], strict=True):
            assert [each for (each,) in mine] == pytest.approx([each for (each,) in theirs], abs=0.01)

    # Whole groups were judged and went into buffers, and every new policy was offered to the server, whole.
    policy = AutoModelForCausalLM.from_pretrained(random_model)
    shapes = {name: list(weight.shape) for name, weight in policy.named_parameters()}
    for name, store in stores.items():
        assert Counter(row[1] for row in store["groups"]) == {0: 3, 1: 3}
        assert len(store["buffers"]) == 6
        assert notes[name]["sent"] == [shapes, shapes]

    # The log-probabilities that the server returns are those of the policy that it samples from, temperature included.
    first = notes["untruncated"]["weights"][:24]
    assert min(first) > 0.97 and max(first) < 1.03

    # Sampling cut to top-p or top-k renormalises the server's probabilities and not the trainer's, token after token:
    # over a sequence the ratio is nothing, and nothing is learned; per token it is a factor that keeps every rollout.
    gradients = {name: [entry["grad_norm"] for entry in run["log"]] for name, run in notes.items()}
    masked = notes["sequence_mask"]["weights"]
    assert median(masked) < 1e-9 and max(masked) < 1e-2  # the server's samples differ from run to run
    assert max(gradients["sequence_mask"]) < 0.01 * min(gradients["paper"])
    assert min(notes["paper"]["weights"]) > 0.01
    assert min(gradients["paper"]) > 1e-3
    note(f"rollouts of the first step that came before its first verdict: {before_last} of 24")
    note(
        f"importance weights of 48 rollouts of 48 tokens: {min(first):.3f} to {max(first):.3f} untruncated; with"
        f" top-p 0.95 and top-k 20 {min(notes['paper']['weights']):.3f} and more by token_truncate,"
        f" {max(notes['sequence_mask']['weights']):.0e} at most by sequence_mask"
    )
