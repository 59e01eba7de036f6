"""The quickstart: train a tiny policy with RankBuffer on the CPU, end to end, and show the result.

    python recipes/quickstart/run.py            # or: make quickstart, or rankbuffer-train without any word

1. Build a policy and warm-start it on answers of mixed quality (`policy.py`).
2. Train it with `recipes/train_rankbuffer.py` and `quickstart.yaml`. Training sees ranks and none of the measures.
3. Measure both policies: rubric score, grade of the nearest written answer, overlap with the best one, real words.
4. Print tables and examples, draw figures, and write `summary.json` and the report page.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset, disable_progress_bars
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, ProgressCallback
from transformers.utils import logging
from trl import ModelConfig, ScriptArguments

from rankbuffer_tools.report.charts import curve_chart, growth_chart
from rankbuffer_tools.report.report import write_report
from rankbuffer_tools.report.tables import TableRow, quality_table, step_tables
from rankbuffer_tools.train.command import build_trainer, make_plan
from rankbuffer_tools.train.parser import RecipeParser
from rankbuffer_trl.buffer import SOURCES
from rankbuffer_trl.data import QueryTable, load_queries
from rankbuffer_trl.errors import RankBufferError
from rankbuffer_trl.files import write_whole
from rankbuffer_trl.judge import rubric_score
from rankbuffer_trl.monitoring import buffer_size_table
from rankbuffer_trl.stems import WORD
from rankbuffer_trl.store import LIVE_STORE, BufferStore, history
from rankbuffer_trl.training import RankBufferConfig

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import policy  # noqa: E402

SAMPLES_PER_QUERY = 4
EXAMPLES = 3
QUALITY_MEASURES = {
    "rubric score": "weighted rubrics, 0 to 100",
    "grade": "grade of the nearest of the seven written answers, 0 to 6",
    "overlap": "words shared with the best written answer (F1), 0 to 100",
    "real words": "words that occur in the data set, percent",
}
console = Console(highlight=False)


class QualityMeasures:
    """The four measures of a response. The first uses the rubrics; the others use the text of the written answers."""

    def __init__(self, queries: Dataset):
        self.rubrics = {row["query_id"]: [(r["weight"], r["text"]) for r in row["rubrics"]] for row in queries}
        self.answers = {row["query_id"]: row["responses"] for row in queries}
        self.vocabulary = {word for answers in self.answers.values() for text in answers for word in words(text)}

    def rubric_score(self, query_id: str, text: str) -> float:
        """Return the weighted rubric score, 0 to 100."""
        return 100 * rubric_score(text, self.rubrics[query_id])

    def __call__(self, query_id: str, text: str) -> dict[str, float]:
        """Return all measures of one response, by name."""
        overlaps = [overlap(text, answer) for answer in self.answers[query_id]]
        real = [word in self.vocabulary for word in words(text)]
        return {
            "rubric score": self.rubric_score(query_id, text),
            "grade": max(range(len(overlaps)), key=overlaps.__getitem__),  # the answers stand from worst to best
            "overlap": 100 * overlaps[-1],
            "real words": 100 * sum(real) / max(len(real), 1),
        }


def words(text: str) -> list[str]:
    """Split a text into words in lower case, without punctuation."""
    return WORD.findall(text.lower())


def overlap(text: str, reference: str) -> float:
    """Return the F1 of the word sets of two texts."""
    mine, theirs = set(words(text)), set(words(reference))
    return 2 * len(mine & theirs) / max(len(mine) + len(theirs), 1)


def sample_policy(path: Path, queries: Dataset, args: RankBufferConfig) -> dict[str, list[str]]:
    """Sample `SAMPLES_PER_QUERY` responses per query, with the settings of training."""
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(path)
    batch = tokenizer.apply_chat_template(
        queries["prompt"][:], add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
    )
    torch.manual_seed(args.seed)  # the same for both policies
    with torch.inference_mode():
        output = model.generate(
            **batch,
            do_sample=True,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            max_new_tokens=args.max_completion_length,
            num_return_sequences=SAMPLES_PER_QUERY,
        )
    texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return {id: texts[SAMPLES_PER_QUERY * i : SAMPLES_PER_QUERY * (i + 1)] for i, id in enumerate(queries["query_id"])}


def mean_measures(measure: QualityMeasures, responses: dict[str, list[str]]) -> dict[str, float]:
    """Return the measures of a policy, as means over all its responses."""
    rows = [measure(query_id, text) for query_id, texts in responses.items() for text in texts]
    return {name: sum(row[name] for row in rows) / len(rows) for name in QUALITY_MEASURES}


def settings_of(model_path: Path, output_dir: Path, extra: list[str]) -> tuple:
    """Read the settings of `recipes/train_rankbuffer.py`."""
    command = ["--config", str(HERE / "quickstart.yaml"), "--dataset_name", str(policy.DATA)]
    command += ["--model_name_or_path", str(model_path)]
    return RecipeParser().parse_args_and_config([*command, "--output_dir", str(output_dir), *extra])


def train(script_args: ScriptArguments, training_args: RankBufferConfig, model_args: ModelConfig) -> RankBufferConfig:
    """Run the parts of `recipes/train_rankbuffer.py` in this process. Return the settings that it used."""
    trainer = build_trainer(script_args, model_args, make_plan(script_args, training_args))
    for callback in (ProgressCallback, PrinterCallback):  # they print a dictionary per step
        trainer.remove_callback(callback)
    trainer.add_callback(Bar)  # the tables below have the numbers of each step
    try:
        trainer.train()
        if trainer.interrupted:
            sys.exit(f"quickstart: stopped after step {trainer.state.global_step} of {trainer.state.max_steps}")
        trainer.save_model()
    finally:
        trainer.close()
    return trainer.args


class Bar(ProgressCallback):
    """The bar of transformers without the numbers of each step."""

    def on_log(self, *args, **kwargs):
        """Print nothing."""


def before_after_table(before: dict[str, float], after: dict[str, float]) -> Table:
    """Build the table of the measures before and after training."""
    table = Table("quality (mean)", "before", "after", "what it is", title="The policy")
    for name, meaning in QUALITY_MEASURES.items():
        table.add_row(name, f"{before[name]:.1f}", f"{after[name]:.1f}", meaning)
    return table


def epoch_table(store: BufferStore, curve: list[TableRow]) -> Table:
    """Build the table of quality, buffers and costs by epoch."""
    epochs, costs = buffer_size_table(store), history.totals_by(store, "epoch")
    epoch_of = {row["step"]: row["epoch"] for row in step_tables(store).rewards}
    sources = [source for source in SOURCES if any(row[source] for row in epochs)]
    columns = ["epoch", "score", "anchors", *sources, "judge calls", "judge tokens"]
    table = Table(title="Rubric score of the rollouts, anchors per query by source, cost of the judge")
    for column in columns:
        table.add_column(column, justify="right")
    for row in epochs:
        values = [step["quality"] for step in curve if epoch_of[step["step"]] == row["epoch"]]
        cost = costs[row["epoch"]]
        counts = [f"{row[source]:.2f}" for source in sources]
        mean = f"{sum(values) / len(values):.1f}" if values else "-"
        table.add_row(str(row["epoch"]), mean, f"{row['anchors']:.2f}", *counts, f"{cost.calls:,}", f"{cost.tokens:,}")
    totals = store.totals()
    table.add_section()
    table.add_row("all", "", "", *[""] * len(sources), f"{totals.calls:,}", f"{totals.tokens:,}")
    return table


def example_table(queries: Dataset, measure: QualityMeasures, responses: dict[str, dict[str, list[str]]]) -> Table:
    """Build the table of the first samples of the queries whose rubric score rose most."""
    rises = {}
    for query_id in queries["query_id"]:
        before, after = (measure.rubric_score(query_id, responses[name][query_id][0]) for name in ("before", "after"))
        rises[query_id] = after - before
    shown = sorted(rises, key=rises.__getitem__, reverse=True)[:EXAMPLES]
    prompts = {row["query_id"]: row["prompt"][0]["content"] for row in queries}
    title = f"The first sample, for the {EXAMPLES} queries whose score rose most"
    table = Table("query", "before", "after", title=title, show_lines=True)
    for query_id in shown:
        table.add_row(prompts[query_id], *(texts[query_id][0] for texts in responses.values()))
    return table


def main() -> None:
    """Build the policy, train it, measure it, and show the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm_start_steps", type=int, default=250)
    arguments, extra = parser.parse_known_args()  # what is left goes to rankbuffer-train
    out, started = arguments.output_dir, time.time()
    # Before the policy is built, so that a typo costs nothing.
    settings = settings_of(out / "policy", out / "train", ["--seed", str(arguments.seed), *extra])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()

    queries = load_queries(str(policy.DATA))
    measure = QualityMeasures(queries)
    console.rule("1. A policy that has read good and bad answers equally often")
    policy.build_policy(out / "policy", queries, arguments.seed, arguments.warm_start_steps)

    console.rule("2. RankBuffer")
    args = train(*settings)

    console.rule("3. What the policy has learned")
    responses = {
        "before": sample_policy(out / "policy", queries, args),
        "after": sample_policy(out / "train", queries, args),
    }
    before, after = (mean_measures(measure, responses[name]) for name in ("before", "after"))
    store = BufferStore(out / "train" / LIVE_STORE)
    curve = quality_table(store, measure.rubric_score)
    console.print(before_after_table(before, after))
    console.print(epoch_table(store, curve))
    console.print(example_table(queries, measure, responses))

    growth = buffer_size_table(store)
    write_whole(out / "quality.png", curve_chart("quality", "Quality", "", "rubric score", {"train": curve}).png())
    write_whole(out / "buffers.png", growth_chart(growth).png())
    totals = store.totals()
    summary = {
        "seed": arguments.seed,
        "before": before,
        "after": after,
        "judge": totals.as_dict(),
        "anchors_per_query": [row["anchors"] for row in growth],
        "seconds": time.time() - started,
    }
    store.close()
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    page = write_report([out / "train"], out / "report", QueryTable(queries))
    console.print(f"Figures: {out / 'quality.png'}, {out / 'buffers.png'}. Numbers: {out / 'summary.json'}.")
    console.print(
        f"{totals.calls:,} judge calls, {totals.tokens:,} judge tokens, {totals.failures} failed."
        f" The quickstart took {summary['seconds'] / 60:.1f} minutes."
    )
    console.print(f"Open {page} in a browser to see every buffer at every step.")
    first, last = (mean["rubric score"] for mean in (before, after))
    console.print(
        f"Rubric score of the policy, 0 to 100: {first:.0f} before training, {last:.0f} after.", style="bold"
    )


if __name__ == "__main__":
    try:
        main()
    except RankBufferError as error:
        sys.exit(f"quickstart: {error}")
