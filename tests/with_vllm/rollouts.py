"""A program for test_rollouts.py: GRPO on rollouts of a vLLM server, in an environment with vLLM.

    python tests/with_vllm/rollouts.py OUTPUT_DIR --url http://127.0.0.1:8000 --policy DIR --data FILE

Only the transfer of weights is replaced, because it uses NCCL and needs a GPU at both ends. The server keeps the
policy that it was started with, and the program records what TRL would have sent. It writes `rollouts.json`: also the
order of rollouts and verdicts, and seeded rollouts as one request and as one request each.
"""

import argparse
import json
import os
from pathlib import Path

from helpers.judges import Embedded
from helpers.scripted import config
from trl.generation.vllm_client import VLLMClient

from rankbuffer_trl.data._queries import load_queries
from rankbuffer_trl.judge import Judge
from rankbuffer_trl.training._trainer import RankBufferTrainer

SEEDED = {"n": 8, "temperature": 0.6, "max_tokens": 16, "generation_kwargs": {"seed": 5}}
SAMPLING = {
    "untruncated": {"top_p": 1.0, "top_k": 0},
    "paper": {"top_p": 0.95, "top_k": 20},
    "sequence_mask": {"top_p": 0.95, "top_k": 20, "vllm_importance_sampling_mode": "sequence_mask"},
}


class NotedTrainer(RankBufferTrainer):
    """A trainer that records the lengths of its rollouts, and the mean importance weight of each sequence.

    It also records the order in which rollouts and verdicts come.
    """

    def __init__(self, *args, **kwargs):
        self.events: list[str] = []
        super().__init__(*args, judge=Judge(Embedded(before=self._note), guard=True), **kwargs)
        self.lengths, self.weights = [], []

    async def _note(self, asked):
        self.events.append("verdict")

    def _arrived(self, row, completion_ids):
        self.events.append("rollout")
        super()._arrived(row, completion_ids)

    def _generate_and_score_completions(self, inputs):
        outputs = super()._generate_and_score_completions(inputs)
        mask = outputs["completion_mask"]
        self.lengths += mask.sum(1).tolist()
        self.weights += ((outputs["importance_sampling_ratio"] * mask).sum(1) / mask.sum(1)).tolist()
        return outputs


def main() -> None:
    """Train two steps with each kind of sampling. Only the last has TRL's default for the importance weights."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--url")
    parser.add_argument("--policy")
    parser.add_argument("--data")
    arguments = parser.parse_args()

    sent: list = []
    VLLMClient.init_communicator = lambda self, device: None
    VLLMClient.update_named_params = lambda self, metadata, params: sent.append(
        {name: list(tensor.shape) for name, tensor in params}
    )
    results = {}
    for name, sampling in SAMPLING.items():
        settings = dict(use_vllm=True, vllm_mode="server", vllm_server_base_url=arguments.url, temperature=0.6)
        settings |= dict(max_completion_length=48, learning_rate=1e-4, max_steps=2)
        settings |= {"vllm_importance_sampling_mode": "token_truncate"} | sampling
        args = config(arguments.output_dir / name, **settings)
        trainer = NotedTrainer(arguments.policy, args, load_queries(arguments.data))
        try:
            trainer.train()
            client = trainer.vllm_generation.vllm_client
            prompts = [trainer._tokenizer(text)["input_ids"] for text in ("How long?", "Boil the water and wait")]
            separate = client.generate(prompts, **SEEDED)
            together = VLLMClient(base_url=arguments.url).generate(prompts, **SEEDED)
        finally:
            trainer.close()
        log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        results[name] = {"log": log, "lengths": trainer.lengths, "weights": trainer.weights, "sent": list(sent)}
        results[name] |= {"events": trainer.events, "separate": separate, "together": together}
        sent.clear()
    (arguments.output_dir / "rollouts.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
    os._exit(0)
