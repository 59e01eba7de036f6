"""The paper's comparison in small: every method trains the same tiny policy, whose true quality is known.

    python -m experiments.toy_policy.run                      # three methods, one seed: minutes
    python -m experiments.toy_policy.run --full --seeds 5     # all rows of the paper's tables: an hour, resumable
    python -m experiments.toy_policy.run --beyond --seeds 8   # our own rows beside three of the paper's
    python -m experiments.toy_policy.run --claims --seeds 10 --references weak  # a policy that outgrows its references

TRL's trainer trains the quickstart's policy (`recipes/quickstart/policy.py`), which is warm-started once and shared by
all runs. A row of the tables is a file of `recipes/paper`. A row that is ours and not the paper's is a file of
`recipes/beyond`. Method, arguments and objective are read from this file; only the settings that make a run small are
overridden, and they are the same for all. The judge makes errors of a known size, the same for all
(`judge.py`). The result is a number that no method sees: the rubric score, without error, of responses
sampled from the trained policy. Runs of one seed share data order and sampling seeds, so methods are compared seed by
seed.

Seeds are the outer loop, and each finished run is one line of `results.jsonl`. The tables use the seeds that every
method has finished, so an interrupted comparison is fair too. The program prints tables for people and one JSON line
at the end, and writes two figures.
"""

import argparse
import json
import multiprocessing
import os
import shlex
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev

import torch
from datasets import Dataset, disable_progress_bars
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from transformers.utils import logging

from experiments.simulated_judge import RECORDED
from experiments.toy_policy.judge import NOISE, PLACE, TRAITS, Again, NoisyRubricJudge, ReferenceRubricJudge, Weakness
from experiments.toy_policy.references import REFERENCES, with_references
from experiments.toy_policy.report import (
    BESIDE,
    BEYOND,
    CLAIMED,
    OURS,
    Result,
    claims_table,
    compare_ours,
    differences_table,
    efficiency_figures,
    groups_table,
    judge_claims,
    mean_of,
    methods_table,
    outgrown_table,
    whole_seeds,
)
from experiments.toy_policy.second import SECOND, Alone, Twice
from rankbuffer_tools.batch.recipes import find_recipe
from rankbuffer_tools.report.tables import quality_table
from rankbuffer_tools.train.parser import RecipeParser
from rankbuffer_trl.data import load_queries
from rankbuffer_trl.errors import RankBufferError, SettingsError
from rankbuffer_trl.judge import Judge, rubric_score
from rankbuffer_trl.monitoring import buffer_size_table, progress
from rankbuffer_trl.store import LIVE_STORE, BufferStore, history
from rankbuffer_trl.training import RankBufferTrainer, RunPlan
from recipes.quickstart import policy

RECIPES = Path(__file__).parents[2] / "recipes"

ALL = tuple(path.stem for path in sorted((RECIPES / "paper").glob("*.yaml")))
SHORT = ("grpo", "rrc_scr", "rankbuffer")
G = 8
START_SAMPLES = 16  # responses per query that calibrate the judge's scale
LENGTH = 64  # largest number of tokens of a response
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
    "top_k": 0,
}


READ = {"reference_groups": 11}  # 5 % of the groups of a run, all of them at its beginning

# The C library gives the memory of every large tensor back to the system. New pages were a tenth of a run's CPU time.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_TOP_PAD_": str(2**28)}


class InterruptedRun(RankBufferError):
    """A SIGTERM has ended a run before its last step."""


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
            The judge's error, see `judge.py`.
        temperature, top_p (`float`):
            How responses are sampled, in training and for the measurement.
        references (`str`):
            The references of the queries, one of `REFERENCES`, see `references.py`.
        doubts (`bool`):
            Whether the judge is the one with doubts, `RECORDED` in `simulated_judge.py`. It then has no `noise`.
        weakness (`str`):
            What the judge likes without reason, see [`Weakness`]. Empty for nothing.
        strength (`float`):
            How much it likes that.
        set (`tuple[str, ...]`):
            Further settings of every run, as words of the command line.
        second (`str`):
            What a second judge is for, one of `SECOND`, see `second.py`.
    """

    policy: str
    steps: int
    queries_per_step: int
    learning_rate: float
    samples: int
    noise: float
    temperature: float = 1.0
    top_p: float = 0.95
    references: str = "written"
    doubts: bool = False
    weakness: str = ""
    strength: float = 0.0
    set: tuple[str, ...] = ()
    second: str = ""


@dataclass(frozen=True)
class Run:
    """One method with one seed.

    Args:
        method (`str`):
            A file of `recipes/paper` or `recipes/beyond`.
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
        trait (`tuple[float, float]`, *optional*):
            Mean and deviation, before training, of what the judge likes without reason.
    """

    method: str
    seed: int
    settings: Settings
    mean: float
    deviation: float
    folder: str
    keep: bool = False
    trait: tuple[float, float] = (0.0, 1.0)

    def __call__(self) -> Result:
        """Train, measure, clean up.

        Raises:
            `InterruptedRun`: if a SIGTERM ended the training.
        """
        torch.set_num_threads(1)
        quieten()
        started, cpu = time.perf_counter(), time.process_time()
        queries, folder = read_queries(self.settings), Path(self.folder)
        shutil.rmtree(folder, ignore_errors=True)
        args = recipe_arguments(self)
        doubts = RECORDED if self.settings.doubts else None
        weakness = Weakness.of(self.settings.weakness, self.settings.strength, self.trait)
        client = NoisyRubricJudge(self.mean, self.deviation, self.settings.noise, doubts, weakness)
        judge = Judge(client, guard=args.judge_guard)
        reference_judge = Judge(ReferenceRubricJudge(self.mean, self.deviation), guard=args.judge_guard)
        plan = RunPlan.of(args, queries, None)
        if self.settings.second == "again":
            errs = Again(self.mean, self.deviation, self.settings.noise, doubts, weakness)
            plan = replace(plan, method=Twice(plan.method, Judge(errs, guard=args.judge_guard)))
        if self.settings.second == "alone":
            plan = replace(plan, method=Alone(plan.method, reference_judge, tuple(plan.queries.ids)))
        more = {"reference_judge": reference_judge} if self.settings.second == "debias" else {}
        trainer = RankBufferTrainer(self.settings.policy, args, queries, judge=judge, plan=plan, **more)
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        finally:
            trainer.close()
        if trainer.interrupted:  # TRL's `train` returns as if it had finished
            raise InterruptedRun(
                f"a SIGTERM ended the run of {self.method} with seed {self.seed}: the same command makes it again"
            )
        samples = sample(trainer.model, trainer.processing_class, queries, self.settings, self.seed)
        store = BufferStore(folder / LIVE_STORE)
        totals, growth = store.totals(), buffer_size_table(store)
        spent = history.totals_by(store, "step")
        curve = quality_table(store, true_quality(queries))
        believed = quality_table(store, believed_quality(queries, client)) if weakness else []
        repeats, cosines, better = measure_groups(store, queries)
        saturated = measure_saturation(store)
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
            believed=[round(row["quality"], 2) for row in believed],
            repeats=repeats,
            cosines=cosines,
            better=better,
            saturated=saturated,
            tokens_by_step=[spent[row["step"]].tokens if row["step"] in spent else 0 for row in curve],
            seconds=round(time.perf_counter() - started, 1),
            cpu_seconds=round(time.process_time() - cpu, 1),
        )


def read_queries(settings: Settings) -> Dataset:
    """Return the queries with the references of a comparison."""
    return with_references(load_queries(str(policy.DATA)), settings.references)


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
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "seed": run.seed,
        **(READ if settings.second == "debias" else {}),
    }
    words = [word for key, value in overrides.items() for word in (f"--{key}", str(value))] + [*settings.set]
    known, folder = (*ALL, *BEYOND), "beyond" if run.method in BEYOND else "paper"
    recipe = RECIPES / folder / f"{run.method}.yaml" if run.method in known else find_recipe(run.method)
    command = ["--config", str(recipe), *words]
    _, args, _ = RecipeParser().parse_args_and_config(command)
    return args


def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, queries: Dataset, settings: Settings, seed: int
) -> list[list[str]]:
    """Sample `settings.samples` responses of each query, as in training."""
    tokenizer.padding_side = "left"
    batch = tokenizer.apply_chat_template(
        queries["prompt"][:], add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
    )
    model.eval()
    torch.manual_seed(seed)
    with torch.inference_mode():
        output = model.generate(
            **batch,
            do_sample=True,
            max_new_tokens=LENGTH,
            num_return_sequences=settings.samples,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=SMALL["top_k"],
        )
    texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return [texts[i : i + settings.samples] for i in range(0, len(texts), settings.samples)]


def rubrics_of(queries: Dataset) -> dict[str, list[tuple[int, str]]]:
    """Return weight and text of the rubrics of each query."""
    return {row["query_id"]: [(rubric["weight"], rubric["text"]) for rubric in row["rubrics"]] for row in queries}


def true_quality(queries: Dataset):
    """Return a function of query id and text that gives the rubric score without error, 0 to 100."""
    rubrics = rubrics_of(queries)
    return lambda query_id, text: 100 * rubric_score(text, rubrics[query_id])


def believed_quality(queries: Dataset, client: NoisyRubricJudge):
    """Return a function of query id and text that gives the rubric score in which a judge without noise believes."""
    rubrics = rubrics_of(queries)
    return lambda query_id, text: 100 * client.believed(text, rubrics[query_id])


def qualities(samples: Sequence[Sequence[str]], queries: Dataset) -> list[list[float]]:
    """Return the true quality of each response."""
    quality = true_quality(queries)
    pairs = zip(queries["query_id"], samples, strict=True)
    return [[quality(query_id, text) for text in texts] for query_id, texts in pairs]


def measure_groups(store: BufferStore, queries: Dataset) -> tuple[list[float], list[float], list[float]]:
    """Return three means over the groups of each epoch.

    The first is the share of rollouts with the same words as another one of their group. The second is the cosine
    between the group's rewards and its true qualities, each less its mean. Groups of one true quality do not count in
    the second. The third is the share of rollouts that are truly better than the query's best reference.
    """
    quality = true_quality(queries)
    best = {row["query_id"]: max(quality(row["query_id"], text) for text in row["responses"]) for row in queries}
    repeats, cosines, better = defaultdict(list), defaultdict(list), defaultdict(list)
    texts = {(id, found.id): found.text for id in history.query_ids(store) for found in history.responses(store, id)}
    for group in history.groups(store):
        pairs = ((texts.get((group.query_id, f"{group.step}-{i}"), ""), r) for i, r in enumerate(group.rewards))
        scored = [(text, reward) for text, reward in pairs if reward is not None]
        repeats[group.epoch] += repeated(text for text, _ in scored)
        worth = [quality(group.query_id, text) for text, _ in scored]
        better[group.epoch] += [each > best[group.query_id] for each in worth]
        if len(set(worth)) > 1:
            cosines[group.epoch].append(cosine([reward for _, reward in scored], worth))
    return tuple(
        [round(fmean(values), 4) for _, values in sorted(each.items())] for each in (repeats, cosines, better)
    )


def measure_saturation(store: BufferStore) -> list[float]:
    """Return the share of the rollouts of each epoch that the judge placed above all anchors of their buffer.

    The list is empty if the method has no buffers, or if the judge does not see the anchors.
    """
    saturated = defaultdict(list)
    for visit in chain(*progress.visits_by_query(store).values()):
        if visit.above and visit.placed:  # a pool of anchors has no positions
            highest = list(visit.above.values())[-1]
            saturated[visit.epoch] += [i < highest for i in range(visit.placed)]
    return [round(fmean(values), 4) for _, values in sorted(saturated.items())]


def repeated(texts: Iterable[str]) -> list[bool]:
    """Return for each text whether another one has the same words."""
    texts = list(texts)
    words = Counter(texts)
    return [words[text] > 1 for text in texts]


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the cosine between two vectors, each less its mean; 0 if either is constant."""
    x, y = (torch.tensor(each, dtype=torch.float64) for each in (a, b))
    return float(torch.cosine_similarity(x - x.mean(), y - y.mean(), dim=0))


def measure_start(settings: Settings) -> tuple[float, float]:
    """Return the mean rubric score of the policy before training and its deviation within a group, both in 0..1."""
    queries = read_queries(settings)
    groups = qualities(sample_of(settings, queries), queries)
    mean = fmean(value for values in groups for value in values)
    return mean / 100, fmean(stdev(values) ** 2 for values in groups) ** 0.5 / 100


def measure_trait(settings: Settings) -> tuple[float, float]:
    """Return mean and deviation of what the judge likes without reason, in the policy's responses before training."""
    trait = TRAITS.get(settings.weakness)
    if trait is None:
        return 0.0, 1.0
    queries = read_queries(settings)
    found = sample_of(settings, queries)
    values = [trait(text, of) for texts, of in zip(found, rubrics_of(queries).values(), strict=True) for text in texts]
    return fmean(values), stdev(values)


def sample_of(settings: Settings, queries: Dataset) -> list[list[str]]:
    """Sample the policy before training."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = settings.policy
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    return sample(model, tokenizer, queries, replace(settings, samples=START_SAMPLES), seed=0)


def prepare(output_dir: Path, settings: Settings) -> tuple[float, float, tuple[float, float]]:
    """Make the policy if it is missing, and return mean and deviation of its rubric scores, and those of the trait.

    Raises:
        `ValueError`: if `output_dir` holds runs that were made with other settings.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    policy.build_policy(Path(settings.policy), load_queries(str(policy.DATA)))
    made = output_dir / "settings.json"
    if not made.is_file():
        mean, deviation = measure_start(settings)
        measured = {"mean": mean, "deviation": deviation, "trait": measure_trait(settings)}
        made.write_text(json.dumps(asdict(settings) | measured) + "\n")
    found = json.loads(made.read_text())
    mean, deviation, trait = found.pop("mean"), found.pop("deviation"), found.pop("trait", (0.0, 1.0))
    found["set"] = tuple(found.get("set", ()))
    before = asdict(Settings(**found))  # runs that are older than a setting were made with its default
    if different := [key for key, value in asdict(settings).items() if before[key] != value]:
        raise ValueError(
            f"{output_dir} holds runs with other settings ({', '.join(different)}): name another --output_dir, or"
            " give the same arguments"
        )
    return mean, deviation, tuple(trait)


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
    os.environ.update(KEEP_MEMORY)
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
    parser.add_argument("--output_dir", type=Path, default=Path("runs/toy_policy"))
    parser.add_argument(
        "--policy", type=Path, help="warm-started policy, made if it is missing (default: OUTPUT_DIR/policy)"
    )
    known = (*ALL, *BEYOND)
    rows = parser.add_mutually_exclusive_group()
    several = f"some of {', '.join(known)}, and paths of recipes of your own"
    rows.add_argument("--methods", nargs="+", metavar="METHOD", help=several)
    rows.add_argument("--full", action="store_true", help="all methods of the paper")
    rows.add_argument("--claims", action="store_true", help=f"rows of the paper's claims: {', '.join(CLAIMED)}")
    rows.add_argument("--beyond", action="store_true", help=f"all methods of ours, beside {', '.join(BESIDE)}")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0 to N-1, the outer loop")
    parser.add_argument("--workers", type=int, default=1, help="runs at the same time, one thread each")
    parser.add_argument("--steps", type=int, default=36, help="training steps of every run")
    parser.add_argument("--queries_per_step", type=int, default=6, help="queries in a step, with 8 rollouts each")
    parser.add_argument("--learning_rate", type=float, default=2e-4, help="constant learning rate of the policy")
    parser.add_argument("--samples", type=int, default=16, help="responses per query that measure a policy")
    parser.add_argument("--noise", type=float, default=NOISE, help="the judge's error, as in experiments/judge_cost")
    parser.add_argument("--doubts", action="store_true", help="a judge fitted to a record, with probabilities")
    parser.add_argument(
        "--weakness", default="", choices=["", *TRAITS, PLACE], help="what the judge likes without reason"
    )
    parser.add_argument(
        "--strength", type=float, default=0.0, help="how much, in deviations of quality within a group"
    )
    parser.add_argument("--second", default="", choices=SECOND, help="what a second judge is for, see `second.py`")
    parser.add_argument("--set", default="", help='more settings of all runs, such as "--format_weight 0.5"')
    parser.add_argument("--temperature", type=float, default=1.0, help="temperature of the rollouts")
    parser.add_argument("--top_p", type=float, default=0.95, help="nucleus of the rollouts")
    parser.add_argument(
        "--references",
        choices=REFERENCES,
        default="written",
        help="weak: the best answers of the data set are withheld from the methods",
    )
    parser.add_argument("--keep_runs", action="store_true", help="keep each run's folder, for rankbuffer-report")
    parser.add_argument(
        "--report_only", action="store_true", help="train nothing; make tables and figures of the finished runs"
    )
    arguments = parser.parse_args(words)
    named = {arguments.full: ALL, arguments.claims: CLAIMED, arguments.beyond: (*BESIDE, *OURS)}
    arguments.methods = tuple(arguments.methods or named.get(True, SHORT))
    arguments.policy = arguments.policy or arguments.output_dir / "policy"
    for name in {*arguments.methods} - {*known}:
        try:
            find_recipe(name)
        except SettingsError as error:
            parser.error(str(error))
    return arguments


def report(results: Iterable[Result], arguments: argparse.Namespace, start: float, console: Console) -> dict:
    """Print the tables and draw the figures of the seeds that all methods have finished; return the JSON line."""
    wanted = [r for r in results if r.method in arguments.methods and r.seed < arguments.seeds]
    complete = whole_seeds(wanted, arguments.methods)
    line: dict = {"benchmark": "toy_policy", "seeds": len({r.seed for r in complete}), "runs": len(wanted)}
    if not complete:
        console.print("No seed has been finished by all methods yet.")
        return line
    means = {
        method: {
            name: round(mean_of([r for r in complete if r.method == method], name), 2)
            for name in ("quality", "calls", "tokens", "cpu_seconds")
        }
        for method in arguments.methods
    }
    line |= {"start": round(start, 2), "methods": means}
    if set(arguments.methods) & set(BEYOND):
        found = compare_ours(complete)
        console.print(methods_table(complete, start), differences_table(found), groups_table(complete))
        return line | {"differences": {f"{each.ours} - {each.other}": each.found.verdict for each in found}}
    outcomes = judge_claims(complete, start)
    tables = [methods_table(complete, start), claims_table(outcomes)]
    if arguments.references == "weak":
        tables.append(outgrown_table(complete))
    console.print(*tables)
    figures = efficiency_figures(complete, start, arguments.output_dir)
    console.print("Figures: " + ", ".join(map(str, figures)))
    return line | {"claims": {outcome.claim: outcome.verdict for outcome in outcomes}}


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
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        references=arguments.references,
        doubts=arguments.doubts,
        weakness=arguments.weakness,
        strength=arguments.strength,
        set=tuple(shlex.split(arguments.set)),
        second=arguments.second,
    )
    mean, deviation, trait = prepare(arguments.output_dir, settings)
    path = arguments.output_dir / "results.jsonl"
    done = {(result.method, result.seed) for result in read_results(path)}
    runs = [
        Run(
            method,
            seed,
            settings,
            mean,
            deviation,
            str(arguments.output_dir / "runs" / f"{Path(method).stem}-{seed}"),
            arguments.keep_runs,
            trait,
        )
        for seed in range(arguments.seeds)
        for method in arguments.methods
        if (method, seed) not in done
    ]
    if runs and not arguments.report_only:
        try:
            work_off(runs, path, arguments.workers, console)
        except RankBufferError as error:
            sys.exit(f"toy_policy: {error}")
    print(json.dumps(report(read_results(path), arguments, 100 * mean, console)))


if __name__ == "__main__":
    main()
