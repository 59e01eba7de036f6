"""The paper's comparison in small: every method trains the same tiny policy, and the truth about it is known.

    python benchmarks/miniature.py                      # three methods, one seed: minutes
    python benchmarks/miniature.py --full --seeds 5     # all rows of the paper's tables: an hour, resumable

Real training by TRL's trainer of the quickstart's policy (`recipes/quickstart/policy.py`), warm-started once and
shared by all runs. A row is a file of `recipes/paper`: method, arguments and objective are read from it, and only what
makes the run small is overridden, the same for all. The judge errs to a known degree, the same for all
(`miniature_judge.py`). What is reported is what no method sees: the rubric score, without error, of responses sampled
from the trained policy. Runs of one seed share data order and sampling seeds, so methods are compared seed by seed.

Seeds are the outer loop and each finished run is one line of `results.jsonl`, so an interrupted comparison is fair as
far as it got: the tables take the seeds that every method has finished. Prints tables for people and one JSON line
last, and writes two figures.
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
from rankbuffer_trl.report.history import buffers_by_epoch, quality_by_step
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.store.places import LIVE_STORE
from rankbuffer_trl.training.trainer import RankBufferTrainer

RECIPES = Path(__file__).parent.parent / "recipes"
sys.path[:0] = [str(RECIPES), str(RECIPES / "quickstart")]
import policy  # noqa: E402
import train_rankbuffer  # noqa: E402

ALL = tuple(path.stem for path in sorted((RECIPES / "paper").glob("*.yaml")))
SHORT = ("grpo", "rrc_scr", "rankbuffer")
G = 8
START_SAMPLES = 16  # responses per query that place the policy on the judge's scale
LENGTH = 64  # tokens of a response at most
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
    """What all runs of a comparison share.

    Args:
        policy (`str`):
            Folder of the warm-started policy.
        steps (`int`):
            Training steps of every run.
        queries_per_step (`int`):
            Each has a group of 8 rollouts.
        learning_rate (`float`):
            Constant.
        samples (`int`):
            Responses per query by which a policy is measured.
        noise (`float`):
            The judge's, see `miniature_judge.py`.
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
            Of data order, sampling and method.
        settings (`Settings`):
            What all runs share.
        mean, deviation (`float`):
            Rubric scores of the policy before training, for the judge.
        folder (`str`):
            Where it may write.
        keep (`bool`):
            Leave the folder there for `rankbuffer-report`.
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
        judge = Judge(NoisyRubricJudge(self.mean, self.deviation, self.settings.noise))
        trainer = RankBufferTrainer(self.settings.policy, args=args, train_dataset=queries, judge=judge)
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        finally:
            trainer.close()
        samples = sample(trainer.model, trainer.processing_class, queries, self.settings.samples, self.seed)
        store = BufferStore(folder / LIVE_STORE)
        totals, buffers = store.totals(), buffers_by_epoch(store)
        curve = quality_by_step(store, true_quality(queries))
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
            anchors=buffers[-1].size - buffers[-1].sources["candidate"] if buffers else None,
            curve=[round(value, 2) for _, value in curve],
            seconds=round(time.perf_counter() - started, 1),
            cpu_seconds=round(time.process_time() - cpu, 1),
        )


def quieten() -> None:
    """No progress bars of models and data sets."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()


def recipe_arguments(run: Run):
    """The recipe's arguments with what makes the run small."""
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
    _, args, _ = train_rankbuffer.make_parser().parse_args_and_config(command)
    return args


def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, queries: Dataset, samples: int, seed: int
) -> list[list[str]]:
    """Responses by query, sampled as in training."""
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
    """The rubric score without error, 0 to 100, by query and text."""
    rubrics = {row["query_id"]: [(rubric["weight"], rubric["text"]) for rubric in row["rubrics"]] for row in queries}
    return lambda query_id, text: 100 * score(text, rubrics[query_id])


def qualities(samples: Sequence[Sequence[str]], queries: Dataset) -> list[list[float]]:
    """The true quality of each response."""
    quality = true_quality(queries)
    pairs = zip(queries["query_id"], samples, strict=True)
    return [[quality(query_id, text) for text in texts] for query_id, texts in pairs]


def measure_start(path: str) -> tuple[float, float]:
    """Mean rubric score of the policy before training, and the deviation within a group, both in 0..1."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    queries = load_queries(str(policy.DATA))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    groups = qualities(sample(model, tokenizer, queries, START_SAMPLES, seed=0), queries)
    mean = fmean(value for values in groups for value in values)
    return mean / 100, fmean(stdev(values) ** 2 for values in groups) ** 0.5 / 100


def prepare(output_dir: Path, settings: Settings) -> tuple[float, float]:
    """The policy, and where it stands. The same settings must have made what is already in `output_dir`.

    Raises:
        `ValueError`: if others have.
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
    """The runs that have finished. A last line without its end was being written and is dropped from the file."""
    if not path.is_file():
        return []
    whole, newline, rest = path.read_text().rpartition("\n")
    if rest:
        path.write_text(whole + newline)
    return [Result(**json.loads(line)) for line in whole.splitlines()]


def execute(runs: Sequence[Run], workers: int) -> Iterator[Result]:
    """The results, as they come. With one worker everything happens in this process."""
    if workers == 1:
        yield from (run() for run in runs)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(Run.__call__, runs)


def work_off(runs: Sequence[Run], path: Path, workers: int, console: Console) -> None:
    """Do the runs and write each down as soon as it has finished."""
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
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/miniature"))
    parser.add_argument("--policy", type=Path, help="warm-started policy, made if it is not there (OUTPUT_DIR/policy)")
    parser.add_argument("--methods", nargs="+", choices=ALL, metavar="METHOD", help=f"of {', '.join(ALL)}")
    parser.add_argument("--full", action="store_true", help="all methods")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0 to N-1, the outer loop")
    parser.add_argument("--workers", type=int, default=1, help="runs side by side, one thread each")
    parser.add_argument("--steps", type=int, default=36, help="training steps of every run")
    parser.add_argument("--queries_per_step", type=int, default=6, help="with 8 rollouts each")
    parser.add_argument("--learning_rate", type=float, default=2e-4, help="of the policy, constant")
    parser.add_argument("--samples", type=int, default=16, help="responses per query that measure a policy")
    parser.add_argument("--noise", type=float, default=NOISE, help="the judge's error, as in benchmarks/judge_cost.py")
    parser.add_argument("--keep_runs", action="store_true", help="leave each run's folder there for rankbuffer-report")
    parser.add_argument("--report_only", action="store_true", help="tables and figures of the runs that have finished")
    parser.add_argument(
        "--docs", type=Path, help="folder of docs, whose miniature.md and images are brought up to date"
    )
    arguments = parser.parse_args(words)
    if arguments.full and arguments.methods:
        parser.error("--full takes all methods: leave out --methods")
    arguments.methods = ALL if arguments.full else tuple(arguments.methods or SHORT)
    arguments.policy = arguments.policy or arguments.output_dir / "policy"
    return arguments


def report(results: Iterable[Result], arguments: argparse.Namespace, start: float, console: Console) -> dict:
    """Tables, figures and the JSON line of the seeds that all methods have finished."""
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
    """Do the runs that are missing, then report."""
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
