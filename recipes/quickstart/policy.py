"""Build the quickstart's policy: a tiny Qwen3 with its own tokenizer, warm-started on answers of mixed quality.

    python recipes/quickstart/policy.py --output_dir runs/quickstart/policy

The policy has read the good and the bad answers of the data set equally often, so it writes both. It has no preference
between them; RankBuffer then teaches it one. Nothing is downloaded.
"""

import argparse
import itertools
import json
from pathlib import Path

from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

from rankbuffer_trl.data import load_queries

DATA = Path(__file__).parent / "howto.jsonl"
VOCABULARY = 1024
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with 1,024 entries on `texts`, with Qwen's chat markers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # so that every text has tokens
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


def build_model(tokenizer: PreTrainedTokenizerFast, **size: int) -> Qwen3ForCausalLM:
    """Build an untrained Qwen3 of about a million parameters. `size` overrides entries of its configuration."""
    default = {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
    }
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **(default | size),
        )
    )


def build_policy(output_dir: Path, queries: Dataset, seed: int = 0, steps: int = 250) -> None:
    """Build a policy of a million parameters, warm-start it by TRL's `SFTTrainer`, and save it, unless it exists."""
    recipe = {"seed": seed, "steps": steps, "data": DATA.stat().st_size}  # another seed or data set makes it again
    made = output_dir / "made_with.json"
    if made.is_file() and json.loads(made.read_text()) == recipe:
        return
    print(f"supervised fine-tuning on the CPU, {steps:,} steps without a bar: about a minute for 250", flush=True)
    set_seed(seed)
    texts = [row["prompt"][0]["content"] for row in queries] + list(itertools.chain(*queries["responses"]))
    tokenizer = build_tokenizer(texts)
    model = build_model(tokenizer)
    examples = [
        {"prompt": row["prompt"], "completion": [{"role": "assistant", "content": response}]}
        for row in queries
        for response in row["responses"]
    ]
    config = SFTConfig(
        output_dir=str(output_dir),
        max_steps=steps,
        per_device_train_batch_size=36,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        max_length=128,
        seed=seed,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
    )
    trainer = SFTTrainer(model, args=config, train_dataset=Dataset.from_list(examples), processing_class=tokenizer)
    trainer.train()
    trainer.save_model(output_dir)
    made.write_text(json.dumps(recipe))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/quickstart/policy"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=250)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    disable_progress_bars()
    build_policy(arguments.output_dir, load_queries(str(DATA)), arguments.seed, arguments.steps)
