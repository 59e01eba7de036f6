# /// script
# requires-python = ">=3.11"
# dependencies = ["rankbuffer-trl"]
#
# [tool.uv.sources] # this repository, since the package is on no index
# rankbuffer-trl = { path = "..", editable = true }
# ///
"""RankBuffer as a library: your own queries, your own judge, a policy from the Hub or from a folder.

    python examples/train_on_your_own.py --output_dir runs/mine --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \
        --judge_url http://127.0.0.1:8001/v1 --judge_model my-judge

Every setting of TRL and RankBuffer is a flag (docs/configuration.md). Without `--judge_url`, the embedded judge
answers. A policy that thinks first, such as Qwen3, needs more than TRL's default of 512 tokens, or
`--chat_template_kwargs '{"enable_thinking": false}'`.
"""

from datasets import Dataset
from trl import ModelConfig, TrlParser

from rankbuffer_trl.training import RankBufferConfig, RankBufferTrainer

RUBRICS = [
    {"text": "Names the occasion and wishes something: happy, wish or best.", "weight": 5},
    {"text": "Is between 5 and 20 words long.", "weight": 2},
]
parser = TrlParser((RankBufferConfig, ModelConfig))
parser.set_defaults(method_args={"bootstrap": True})  # no responses: the first ranked group gives the anchors
args, model = parser.parse_args_and_config()
occasions = ["a birthday", "a wedding", "a new job", "an exam", "a move", "a first flat", "a new year", "a holiday"]
prompts = [[{"role": "user", "content": f"Write one friendly sentence for {occasion}."}] for occasion in occasions]
rows = [{"query_id": o, "prompt": p, "rubrics": RUBRICS} for o, p in zip(occasions, prompts, strict=True)]
trainer = RankBufferTrainer(model.model_name_or_path, args, train_dataset=Dataset.from_list(rows))
trainer.train()
trainer.save_model()
trainer.close()
