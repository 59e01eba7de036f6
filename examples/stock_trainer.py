# /// script
# requires-python = ">=3.11"
# dependencies = ["rankbuffer-trl"]
#
# [tool.uv.sources] # this repository, since the package is on no index
# rankbuffer-trl = { path = "..", editable = true }
# ///
"""RankBuffer in a stock `GRPOTrainer`, beside a second reward: here one for short answers.

    python examples/stock_trainer.py --output_dir runs/stock --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \
        --judge_url http://127.0.0.1:8001/v1 --judge_model my-judge        # on a CPU also: --use_cpu true --bf16 false

A judgment can fail, and a failure is no score: `RankBufferReward` then returns `None`. `beside` lets the other reward
return `None` there too, so TRL leaves the rollout out. Checkpoints of a stock trainer do not hold the buffers; those
of `RankBufferTrainer` do.
"""

from pathlib import Path

from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser

from rankbuffer_trl import RankBufferReward, load_queries
from rankbuffer_trl.judge.config import JudgeConfig

DATA = Path(__file__).parent.parent / "recipes" / "quickstart" / "howto.jsonl"
LONG = 400  # characters
parser = TrlParser((GRPOConfig, ModelConfig, JudgeConfig))
parser.set_defaults(reward_weights=[1.0, 0.2])  # of the rank in [-1, 1], and of the length in [-1, 0]
args, model, judge = parser.parse_args_and_config()
queries = load_queries(str(DATA))
rank = RankBufferReward(queries, judge.judge(), Path(args.output_dir) / "buffers.sqlite", args=args)


def length_reward(completions, **columns) -> list[float]:
    return [-min(len(completion[0]["content"]) / LONG, 1.0) for completion in completions]


trainer = GRPOTrainer(
    model.model_name_or_path, reward_funcs=rank.beside(length_reward), args=args, train_dataset=queries
)
trainer.train()
trainer.save_model()
rank.close()
