"""Tests of a machine with a GPU. `make test-gpu` runs them; `make test` and CI do not.

They tell in about ten minutes whether a machine can train: bf16, checkpoints that resume exactly, LoRA, rollouts from
vLLM on the same GPU, the transfer of weights, a judge on the same GPU, and attention. The tests make their policy of
random weights themselves and download nothing. On one H200 the first four have passed (docs/results.md); those of
LoRA under vLLM, the judge on the same GPU, the second GPU and attention are still to be run.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "with_vllm"))

from vllm_server import build_model, start  # noqa: E402

RUN_SECONDS = 420


def pytest_sessionstart(session):
    """End at once where no test can pass."""
    if not torch.cuda.is_available():
        pytest.exit("there is no GPU that torch can use: check nvidia-smi and the CUDA build of torch", returncode=2)


def pytest_report_header(config) -> list[str]:
    """Name the GPUs and the versions, which belong into every report of a fault."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        f"torch {torch.__version__}, CUDA {torch.version.cuda}",
        *(f"GPU {i}: {gpu.name}, {gpu.total_memory / 1e9:.0f} GB" for i, gpu in enumerate(gpus)),
    ]


@pytest.fixture(scope="session")
def policy(howto, tmp_path_factory) -> Path:
    """The folder of a policy of random weights. Its heads have 64 dimensions, which every attention kernel takes."""
    texts = [text for row in howto for text in row["responses"]]
    return build_model(tmp_path_factory.mktemp("policy"), texts, hidden_size=128, head_dim=64)


@pytest.fixture
def train(tmp_path) -> Callable[..., Path]:
    """Return a function that trains as a user does, in a process of its own, and returns the output folder."""

    def run(arguments: list[str], gpu: int = 0) -> Path:
        output_dir = Path(arguments[arguments.index("--output_dir") + 1])
        output_dir.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": str(gpu),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic matrix products
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "DS_ACCELERATOR": "cuda",
        }
        log = output_dir / "log"
        with log.open("w") as output:
            done = subprocess.run(
                [sys.executable, "recipes/train_rankbuffer.py", *arguments],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=RUN_SECONDS,
                check=False,
            )
        assert done.returncode == 0, log.read_text(errors="replace")[-4000:]
        return output_dir

    return run


@pytest.fixture
def serve(policy, tmp_path):
    """Return a function that serves the random model by vLLM on a GPU, for a judge or for rollouts."""
    servers = []

    def run(gpu: int = 0):
        flags = ("--gpu-memory-utilization", "0.2", "--dtype", "bfloat16")
        servers.append(start(sys.executable, policy, tmp_path, flags, {"CUDA_VISIBLE_DEVICES": str(gpu)}))
        return servers[-1]

    yield run
    for server in servers:
        server.stop()
