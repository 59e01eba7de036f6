"""The paper's comparison in small: every method trains the same tiny policy, whose true quality is known.

    python benchmarks/miniature.py                      # three methods, one seed: minutes
    python benchmarks/miniature.py --full --seeds 5     # all rows of the paper's tables: an hour, resumable

TRL's trainer trains the quickstart's policy (`recipes/quickstart/policy.py`), which is warm-started once and shared by
all runs. A row of the tables is a file of `recipes/paper`. Method, arguments and objective are read from this file;
only the settings that make a run small are overridden, and they are the same for all. The judge makes errors of a
known size, the same for all (`miniature_judge.py`). The result is a number that no method sees: the rubric score,
without error, of responses sampled from the trained policy. Runs of one seed share data order and sampling seeds, so
methods are compared seed by seed.

Seeds are the outer loop, and each finished run is one line of `results.jsonl`. The tables use the seeds that every
method has finished, so an interrupted comparison is fair too. The program prints tables for people and one JSON line
at the end, and writes two figures.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

import torch
from datasets import Dataset, disable_progress_bars
from miniature_judge import NOISE, NoisyRubricJudge
from miniature_report import (
    Result,
    claims_table,
    efficiency_figures,
    judge_claims,
    methods_table,
    refresh,
    whole_seeds,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from transformers.utils import logging

from rankbuffer_trl.data.queries import load_queries
from rankbuffer_trl.judge import Judge
from rankbuffer_trl.judge.rubric_judge import score
from rankbuffer_trl.report.tables import growth_table, quality_table
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.store.places import LIVE_STORE
from rankbuffer_trl.training.parser import RecipeParser
from rankbuffer_trl.training.trainer import RankBufferTrainer

RECIPES = Path(__file__).parent.parent / "recipes"
sys.path.insert(0, str(RECIPES / "quickstart"))
import policy  # noqa: E402

ALL = tuple(path.stem for path in sorted((RECIPES / "paper").glob("*.yaml")))
SHORT = ("grpo", "rrc_scr", "rankbuffer")
G = 8
START_SAMPLES = 16  # responses per query that calibrate the judge's scale
LENGTH = 64  # largest number of tokens of a response
SAMPLING = {"temperature": 1.0, "top_p": 0.95, "top_k": 0}
SMALL = {
    "use_cpu": True,
    "bf16": False,
    "dtype": "float32",
    "gradient_checkpointing": False,
    "use_vllm": False,
    "push_to_hub": False,
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "num_generations": G,
    "gradient_accumulation_steps": 1,
    "format_check": "none",
    "max_completion_length": LENGTH,
    **SAMPLING,
}


@dataclass(frozen=True)
class Settings:
    """The settings that all runs of a comparison share.

    Args:
        policy (`str`):
            Folder of the warm-started policy.
        steps (`int`):
            Number of training steps of every run.
        queries_per_step (`int`):
            Number of queries in a step; each has a group of 8 rollouts.
        learning_rate (`float`):
            Learning rate, which is constant.
        samples (`int`):
            Number of responses per query that measure a policy.
        noise (`float`):
            The judge's error, see `miniature_judge.py`.
    """

    policy: str
    steps: int
    queries_per_step: int
    learning_rate: float
    samples: int
    noise: float


@dataclass(frozen=True)
class Run:
    """One method with one seed.

    Args:
        method (`str`):
            A file of `recipes/paper`.
        seed (`int`):
            Seed of data order, sampling and method.
        settings (`Settings`):
            The settings that all runs share.
        mean (`float`), deviation (`float`):
            Mean and deviation of the policy's rubric scores before training, in 0..1, for the judge's scale.
        folder (`str`):
            The folder of the run.
        keep (`bool`, *optional*, defaults to `False`):
            Keep the folder, for `rankbuffer-report`.
    """

    method: str
    seed: int
    settings: Settings
    mean: float
    deviation: float
    folder: str
    keep: bool = False

    def __call__(self) -> Result:
        """Train, measure, clean up."""
        torch.set_num_threads(1)
        quieten()
        started, cpu = time.perf_counter(), time.process_time()
        queries, folder = load_queries(str(policy.DATA)), Path(self.folder)
        shutil.rmtree(folder, ignore_errors=True)
        args = recipe_arguments(self)
        judge = Judge(NoisyRubricJudge(self.mean, self.deviation, self.settings.noise), guard=args.judge_guard)
        trainer = RankBufferTrainer(self.settings.policy, args=args, train_dataset=queries, judge=judge)
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        finally:
            trainer.close()
        samples = sample(trainer.model, trainer.processing_class, queries, self.settings.samples, self.seed)
        store = BufferStore(folder / LIVE_STORE)
        totals, growth = store.totals(), growth_table(store)
        curve = quality_table(store, true_quality(queries))
        store.close()
        if not self.keep:
            shutil.rmtree(folder)
        return Result(
            method=self.method,
            seed=self.seed,
            quality=fmean(value for values in qualities(samples, queries) for value in values),
            calls=totals.calls,
            tokens=totals.tokens,
            failures=totals.failures,
            anchors=growth[-1]["anchors"] - growth[-1]["candidate"] if growth else None,
            curve=[round(row["quality"], 2) for row in curve],
            seconds=round(time.perf_counter() - started, 1),
            cpu_seconds=round(time.process_time() - cpu, 1),
        )


def quieten() -> None:
    """Turn off the progress bars of models and data sets."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()


def recipe_arguments(run: Run):
    """Return the recipe's arguments, overridden by the settings that make the run small."""
    settings = run.settings
    overrides = SMALL | {
        "model_name_or_path": settings.policy,
        "dataset_name": str(policy.DATA),
        "output_dir": run.folder,
        "max_steps": settings.steps,
        "per_device_train_batch_size": settings.queries_per_step * G,
        "learning_rate": settings.learning_rate,
        "seed": run.seed,
    }
    words = [word for key, value in overrides.items() for word in (f"--{key}", str(value))]
    command = ["--config", str(RECIPES / "paper" / f"{run.method}.yaml"), *words]
    _, args, _ = RecipeParser().parse_args_and_config(command)
    return args


def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, queries: Dataset, samples: int, seed: int
) -> list[list[str]]:
    """Sample responses of each query, as in training."""
    tokenizer.padding_side = "left"
    batch = tokenizer.apply_chat_template(
        queries["prompt"][:], add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
    )
    model.eval()
    torch.manual_seed(seed)
    with torch.inference_mode():
        output = model.generate(
            **batch, do_sample=True, max_new_tokens=LENGTH, num_return_sequences=samples, **SAMPLING
        )
    texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return [texts[i : i + samples] for i in range(0, len(texts), samples)]


def true_quality(queries: Dataset):
    """Return a function of query id and text that gives the rubric score without error, 0 to 100."""
    rubrics = {row["query_id"]: [(rubric["weight"], rubric["text"]) for rubric in row["rubrics"]] for row in queries}
    return lambda query_id, text: 100 * score(text, rubrics[query_id])


def qualities(samples: Sequence[Sequence[str]], queries: Dataset) -> list[list[float]]:
    """Return the true quality of each response."""
    quality = true_quality(queries)
    pairs = zip(queries["query_id"], samples, strict=True)
    return [[quality(query_id, text) for text in texts] for query_id, texts in pairs]


def measure_start(path: str) -> tuple[float, float]:
    """Return the mean rubric score of the policy before training and its deviation within a group, both in 0..1."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    queries = load_queries(str(policy.DATA))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    groups = qualities(sample(model, tokenizer, queries, START_SAMPLES, seed=0), queries)
    mean = fmean(value for values in groups for value in values)
    return mean / 100, fmean(stdev(values) ** 2 for values in groups) ** 0.5 / 100


def prepare(output_dir: Path, settings: Settings) -> tuple[float, float]:
    """Make the policy if it is missing, and return mean and deviation of its rubric scores.

    Raises:
        `ValueError`: if `output_dir` holds runs that were made with other settings.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    policy.build_policy(Path(settings.policy), load_queries(str(policy.DATA)))
    made = output_dir / "settings.json"
    if not made.is_file():
        mean, deviation = measure_start(settings.policy)
        made.write_text(json.dumps(asdict(settings) | {"mean": mean, "deviation": deviation}) + "\n")
    found = json.loads(made.read_text())
    mean, deviation = found.pop("mean"), found.pop("deviation")
    if different := [key for key, value in asdict(settings).items() if found.get(key) != value]:
        raise ValueError(
            f"{output_dir} holds runs with other settings ({', '.join(different)}): name another --output_dir, or"
            " give the same arguments"
        )
    return mean, deviation


def read_results(path: Path) -> list[Result]:
    """Return the runs that have finished, and remove a last line that was only written in part."""
    if not path.is_file():
        return []
    whole, newline, rest = path.read_text().rpartition("\n")
    if rest:
        path.write_text(whole + newline)
    return [Result(**json.loads(line)) for line in whole.splitlines()]


def execute(runs: Sequence[Run], workers: int) -> Iterator[Result]:
    """Yield the results in the order in which runs finish. With one worker, all runs train in this process."""
    if workers == 1:
        yield from (run() for run in runs)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(Run.__call__, runs)


def work_off(runs: Sequence[Run], path: Path, workers: int, console: Console) -> None:
    """Do the runs, and write each result to the file as soon as its run has finished."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with path.open("a") as file, Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=len(runs))
        for result in execute(runs, workers):
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            os.fsync(file.fileno())
            progress.advance(task)
            console.print(
                f"{result.method}, seed {result.seed}: true quality {result.quality:.1f}, {result.calls:,} calls,"
                f" {result.tokens:,} tokens, {result.seconds:.0f} s"
            )


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/miniature"))
    parser.add_argument(
        "--policy", type=Path, help="warm-started policy, made if it is missing (default: OUTPUT_DIR/policy)"
    )
    parser.add_argument("--methods", nargs="+", choices=ALL, metavar="METHOD", help=f"one or more of {', '.join(ALL)}")
    parser.add_argument("--full", action="store_true", help="all methods")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0 to N-1, the outer loop")
    parser.add_argument("--workers", type=int, default=1, help="runs at the same time, one thread each")
    parser.add_argument("--steps", type=int, default=36, help="training steps of every run")
    parser.add_argument("--queries_per_step", type=int, default=6, help="queries in a step, with 8 rollouts each")
    parser.add_argument("--learning_rate", type=float, default=2e-4, help="constant learning rate of the policy")
    parser.add_argument("--samples", type=int, default=16, help="responses per query that measure a policy")
    parser.add_argument("--noise", type=float, default=NOISE, help="the judge's error, as in benchmarks/judge_cost.py")
    parser.add_argument("--keep_runs", action="store_true", help="keep each run's folder, for rankbuffer-report")
    parser.add_argument(
        "--report_only", action="store_true", help="train nothing; make tables and figures of the finished runs"
    )
    parser.add_argument(
        "--docs", type=Path, help="folder of the documentation, whose results/miniature.md and images are updated"
    )
    arguments = parser.parse_args(words)
    if arguments.full and arguments.methods:
        parser.error("--full takes all methods: leave out --methods")
    arguments.methods = ALL if arguments.full else tuple(arguments.methods or SHORT)
    arguments.policy = arguments.policy or arguments.output_dir / "policy"
    return arguments


def report(results: Iterable[Result], arguments: argparse.Namespace, start: float, console: Console) -> dict:
    """Print the tables and draw the figures of the seeds that all methods have finished; return the JSON line."""
    wanted = [r for r in results if r.method in arguments.methods and r.seed < arguments.seeds]
    complete = whole_seeds(wanted, arguments.methods)
    line: dict = {"benchmark": "miniature", "seeds": len({r.seed for r in complete}), "runs": len(wanted)}
    if not complete:
        console.print("No seed has been finished by all methods yet.")
        return line
    outcomes = judge_claims(complete, start)
    tables = methods_table(complete, start), claims_table(outcomes)
    console.print(*tables)
    figures = efficiency_figures(
        complete, start, arguments.docs / "images" if arguments.docs else arguments.output_dir
    )
    if arguments.docs:
        refresh(arguments.docs / "results" / "miniature.md", tables)
    console.print("Figures: " + ", ".join(map(str, figures)))
    means = {
        method: {
            name: round(fmean(getattr(r, name) for r in complete if r.method == method), 2)
            for name in ("quality", "calls", "tokens", "cpu_seconds")
        }
        for method in arguments.methods
    }
    claims = {outcome.claim: outcome.verdict for outcome in outcomes}
    return line | {"start": round(start, 2), "methods": means, "claims": claims}


def main() -> None:
    """Do the runs that are missing, then print the report."""
    arguments = parse()
    quieten()
    console = Console(width=max(Console().width, 110), highlight=False)
    if arguments.report_only and not (arguments.output_dir / "settings.json").is_file():
        sys.exit(f"{arguments.output_dir} holds no runs yet: leave out --report_only")
    settings = Settings(
        policy=str(arguments.policy),
        steps=arguments.steps,
        queries_per_step=arguments.queries_per_step,
        learning_rate=arguments.learning_rate,
        samples=arguments.samples,
        noise=arguments.noise,
    )
    mean, deviation = prepare(arguments.output_dir, settings)
    path = arguments.output_dir / "results.jsonl"
    done = {(result.method, result.seed) for result in read_results(path)}
    runs = [
        Run(
            method,
            seed,
            settings,
            mean,
            deviation,
            str(arguments.output_dir / "runs" / f"{method}-{seed}"),
            arguments.keep_runs,
        )
        for seed in range(arguments.seeds)
        for method in arguments.methods
        if (method, seed) not in done
    ]
    if runs and not arguments.report_only:
        work_off(runs, path, arguments.workers, console)
    print(json.dumps(report(read_results(path), arguments, 100 * mean, console)))


if __name__ == "__main__":
    main()
