"""vLLM's own parser reads every `vllm serve` that the launch scripts and the documents tell people to run."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from helpers.launching import launch

ROOT = Path(__file__).parent.parent.parent
PARSER = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

parsed = []
for argv in json.loads(sys.argv[1]):
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    validate_parsed_serve_args(args)
    parsed.append([args.model_tag, args.weight_transfer_config is not None, args.logprobs_mode, args.max_model_len])
print(json.dumps(parsed))
"""


def documented() -> list[list[str]]:
    """The arguments of `vllm serve` in the documents."""
    texts = [path.read_text() for folder in (".", "docs", "recipes") for path in (ROOT / folder).glob("*.md")]
    blocks = "\n".join(block for text in texts for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    commands = [shlex.split(line, comments=True) for line in blocks.replace("\\\n", " ").splitlines()]
    return [words[words.index("vllm") + 2 :] for words in commands if "vllm" in words and "serve" in words]


def test_vllm_reads_the_commands(request, tmp_path):
    python = request.config.getoption("vllm_python")
    if not python:
        pytest.skip("needs an environment with vLLM")
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "n[0-2]", "SLURM_JOB_ID": "7"}
    launched = [launch(tmp_path, "one_node.sh"), launch(tmp_path, "slurm.sh", OUTPUT=str(tmp_path / "run"), **slurm)]
    started = [call.argv[1:] for each in launched for call in each.of("vllm")]
    commands = started + documented()
    assert len(started) == 4 and len(commands) >= 6
    words = [python, "-c", PARSER, json.dumps(commands)]
    # In the tests' folder, another `vllm` might be found.
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for model, transfers, mode, context in json.loads(done.stdout.splitlines()[-1]):
        assert model.startswith("Qwen/") and context >= 8192
        assert transfers == ("30B" not in model)
        assert mode == ("processed_logprobs" if transfers else "raw_logprobs")
