"""Measure what RankBuffer adds to a training step when the judge costs nothing.

    python benchmarks/trainer_overhead.py

The script compares steps of `RankBufferTrainer`, whose judge answers at once, with steps of TRL's `GRPOTrainer` with a
constant reward. Both have the same policy, the same data, 20 queries of 8 rollouts and completions of the same length.
They take turns in one process. A turn is a short run, and its first step is not counted. So the difference is
everything but the judge: gathering, prompts, parsing, ranking, buffer update and commit.

The script prints a table, and then one JSON line. `ratio` is the ratio of the median step times over all turns.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

from datasets import Dataset, disable_progress_bars
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast, TrainerCallback, set_seed
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from rankbuffer_trl.data import load_queries
from rankbuffer_trl.judge import Judge, Usage
from rankbuffer_trl.training import RankBufferConfig, RankBufferTrainer

RECIPES = Path(__file__).parent.parent / "recipes"
sys.path.insert(0, str(RECIPES / "quickstart"))
from policy import DATA, build_model, build_tokenizer  # noqa: E402

G = 8


class InstantJudge:
    """A chat client that answers at once. It reads only the end of the prompt."""

    name = "instant judge"

    async def complete(self, messages, *, question, seed, tally):
        tail = messages[0]["content"][-200:]
        if found := re.search(r"integer from 0 through (\d+)>", tail):
            K = int(found.group(1))
            return f'{{"position": {hash(tail) % (K + 1)}}}', Usage(1, 0, 1)
        return re.search(r'\{"order": .*\}$', tail).group(), Usage(1, 0, 1)

    async def close(self):
        pass


class StepTimes(TrainerCallback):
    """The wall seconds of every step but the first."""

    def __init__(self):
        self.times: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step > 1:
            self.times.append(time.perf_counter() - self.started)


def step_times(
    kind: str,
    rows: Dataset,
    tokenizer: PreTrainedTokenizerFast,
    queries: int,
    tokens: int,
    steps: int,
    use_cpu: bool = True,
) -> list[float]:
    """Train a short run and return the seconds of each step but the first."""
    clock = StepTimes()
    set_seed(0)
    with tempfile.TemporaryDirectory() as output_dir:
        common = dict(
            output_dir=output_dir,
            use_cpu=use_cpu,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            num_generations=G,
            per_device_train_batch_size=queries * G,
            max_completion_length=tokens,
            generation_kwargs={"min_new_tokens": tokens},
            max_steps=steps,
        )
        kwargs = dict(train_dataset=rows, processing_class=tokenizer, callbacks=[clock])
        if kind == "rankbuffer":
            judge = Judge(InstantJudge())
            trainer = RankBufferTrainer(build_model(tokenizer), RankBufferConfig(**common), judge=judge, **kwargs)
            trainer.train()
            trainer.close()
        else:
            constant = lambda completions, **_: [1.0] * len(completions)  # noqa: E731
            GRPOTrainer(build_model(tokenizer), constant, GRPOConfig(**common), **kwargs).train()
    return clock.times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=20, help="number of queries per step")
    parser.add_argument("--tokens", type=int, default=64, help="length of a completion in tokens")
    parser.add_argument("--steps", type=int, default=5, help="number of steps per turn; the first is not counted")
    parser.add_argument("--turns", type=int, default=8, help="number of turns per trainer")
    what = "train on the CPU, as in docs/results.md; --no-use_cpu takes the GPU"
    parser.add_argument("--use_cpu", action=argparse.BooleanOptionalAction, default=True, help=what)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    disable_progress_bars()

    rows = load_queries(str(DATA))
    tokenizer = build_tokenizer([text for row in rows for text in row["responses"]])
    shape = (rows, tokenizer, arguments.queries, arguments.tokens, arguments.steps, arguments.use_cpu)
    table = Table("turn", "GRPOTrainer, s", "RankBufferTrainer, s", "ratio", title="Median step time")
    stock, ours = [], []
    for turn in range(arguments.turns):
        order = ("stock", "rankbuffer") if turn % 2 == 0 else ("rankbuffer", "stock")
        times = {kind: step_times(kind, *shape) for kind in order}
        stock += times["stock"]
        ours += times["rankbuffer"]
        medians = [statistics.median(times[kind]) for kind in ("stock", "rankbuffer")]
        table.add_row(str(turn), f"{medians[0]:.3f}", f"{medians[1]:.3f}", f"{medians[1] / medians[0]:.3f}")
    ratio = statistics.median(ours) / statistics.median(stock)
    Console().print(table)
    print(
        json.dumps(
            {
                "benchmark": "trainer_overhead",
                "ratio": round(ratio, 4),
                "stock_step_s": round(statistics.median(stock), 4),
                "rankbuffer_step_s": round(statistics.median(ours), 4),
                "rollouts_per_step": arguments.queries * G,
                "tokens": arguments.tokens,
            }
        )
    )


if __name__ == "__main__":
    main()
