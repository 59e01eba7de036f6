"""Programs in the place of `vllm` and `accelerate` for the commands of docs/train.md: small servers, CPU training."""

import json
import os
import sys
from pathlib import Path

from aiohttp import web

RECIPE = """
method: rankbuffer
num_generations: 8
per_device_train_batch_size: 2
max_completion_length: 16
num_train_epochs: 2
use_cpu: true
bf16: false
dtype: float32
use_vllm: true
vllm_mode: server
vllm_importance_sampling_correction: false  # the log-probabilities of the server are made up
generation_kwargs: {seed: 7}
logging_steps: 1
save_strategy: "no"
report_to: none
"""
RUBRICS = [{"text": f"Says how long the egg cooks: {n} minutes.", "weight": 3} for n in ("seven", "eight", "nine")]
ANSWERS = [f"Boil the egg for {n} minutes." for n in ("two", "three", "four", "five", "six", "seven", "eight")]


def judge_app(model: str) -> web.Application:
    """Serve the embedded judge under a name. It also writes rubrics, always the same."""
    from rankbuffer_tools.rubric_server import make_app
    from rankbuffer_trl.data import GENERIC_RUBRICS
    from rankbuffer_trl.judge._ledger import Usage
    from rankbuffer_trl.judge._rubric_judge import RubricJudge

    class PathJudge(RubricJudge):
        def answer(self, messages):
            if "write 3 to 5 concise judging rubrics" in " ".join(messages[0]["content"].split()):
                return json.dumps({"rubrics": RUBRICS}), Usage(1, 0, 1)
            content = messages[0]["content"]
            if '"score"' in content and GENERIC_RUBRICS[0].text in content:  # which this judge cannot read
                return json.dumps({"score": next(i for i, text in enumerate(ANSWERS) if text in content)}), Usage(
                    1, 0, 1
                )
            return super().answer(messages)

    PathJudge.model = model
    return make_app(PathJudge())


def policy_app(model: str) -> web.Application:
    """Serve a policy for TRL's client, and as a chat."""
    from helpers.rollout_server import RolloutServer

    @web.middleware
    async def chat(request, handler):
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": model}]})
        if request.path != "/v1/chat/completions":
            return await handler(request)
        text = ANSWERS[(await request.json())["seed"] % len(ANSWERS)]
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": model}
        return web.json_response(answer | {"choices": [choice], "usage": usage})

    app = RolloutServer(model, ANSWERS).app()
    app.middlewares.append(chat)
    return app


def train(arguments: list[str]) -> None:
    """Train in this process. TRL's client needs no vLLM; an engine inside the process is replaced by transformers."""
    from helpers.rollout_server import allow_client
    from rankbuffer_tools.train.command import main

    allow_client()
    main(arguments + (["--use_vllm", "false"] if "colocate" in arguments else []))


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    with open(os.environ["CALLS"], "a") as calls:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        calls.write(json.dumps({"name": name, "argv": words, "gpus": gpus, "pid": os.getpid()}) + "\n")
    if name == "vllm":
        make_app = policy_app if Path(words[1]).is_dir() else judge_app
        web.run_app(make_app(words[1]), host="127.0.0.1", port=int(words[words.index("--port") + 1]), print=None)
    else:
        train(words[words.index("recipes/train_rankbuffer.py") + 1 :])
