"""Train a real policy of 135M parameters under a simulated judge, one run per row, seed and judge.

    python -m experiments.real_policy.run --policy FOLDER                # the next missing runs, one after the other
    python -m experiments.real_policy.run --policy FOLDER --limit 1      # only the next one
    python -m experiments.real_policy.run --policy FOLDER --workers 6    # six at a time, for one large GPU

The order is fixed: see [`queue`]. A run whose record is in `records/` is not made again. A run that was killed goes on
from its last checkpoint, in `--output_dir`. A finished run writes one compressed record: all answers, all rewards and
what the judge read. `report.py` makes the tables from the records alone.

`--measure` samples the policy before training instead, and writes `start.json.gz`: the judge's scale, the first point
of each curve and the check of the rubrics come from it.
"""

import argparse
import gzip
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
)

from experiments.simulated_judge import WORLDS, JudgeErrors
from experiments.toy_policy.judge import NoisyRubricJudge
from rankbuffer_tools.train.parser import RecipeParser
from rankbuffer_trl.data import load_queries
from rankbuffer_trl.errors import RankBufferError
from rankbuffer_trl.judge import Judge, rubric_score
from rankbuffer_trl.store import LIVE_STORE, BufferStore, history
from rankbuffer_trl.training import RankBufferTrainer

HERE = Path(__file__).parent
RECIPES = HERE.parents[1] / "recipes"
DATA = {"trained": RECIPES / "small" / "words.jsonl", "kept_apart": RECIPES / "small" / "words_kept_apart.jsonl"}
START, RECORDS = HERE / "start.json.gz", HERE / "records"
CLAIMED = ("paper/grpo", "paper/rankbuffer", "paper/rrc_scr", "beyond/listwise_two", "paper/rankbuffer_static")
OTHERS = ("paper/gdpo", "paper/tournament_grpo", "paper/rankbuffer_bootstrap")
JUDGES = {"sharp": JudgeErrors(noise=0.09, bias=0.02), "blunt": WORLDS["blunt"]}
G, LENGTH, SAMPLES, TOP_K = 8, 48, 8, 50
ALLOCATION = {  # keep freed memory, and in large pages: a CPU's passes took 16 in place of 25 CPU-seconds a step
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**33),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
}
EVALUATED = 20  # steps between two measurements on the prompts kept apart
SAME = {  # the settings of all runs
    "num_train_epochs": 4,
    "per_device_train_batch_size": 2 * G,
    "gradient_accumulation_steps": 1,
    "num_generations": G,
    "max_completion_length": LENGTH,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": TOP_K,
    "learning_rate": 5e-5,
    "beta": 0.02,
    "format_check": "none",
    "use_vllm": False,
    "bf16": False,  # a CPU without avx512_bf16 takes 13 times as long in bfloat16
    "dtype": "float32",
    "gradient_checkpointing": False,
    "save_steps": 10,
    "save_total_limit": 1,
    "logging_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


class InterruptedRun(RankBufferError):
    """A SIGTERM has ended a run before its last step."""


@dataclass(frozen=True)
class Run:
    """One row with one seed under one judge.

    Args:
        row (`str`):
            A recipe: its folder and its name.
        judge (`str`):
            A key of `JUDGES`.
        seed (`int`):
            Seed of sampling and method.
        policy, folder, device (`str`):
            The policy before training, the folder of all runs, and `cpu` or `cuda`.
        steps (`int`, *optional*, defaults to `-1`):
            Number of steps; -1 for all epochs.
    """

    row: str
    judge: str
    seed: int
    policy: str = ""
    folder: str = ""
    device: str = "cpu"
    steps: int = -1

    @property
    def name(self) -> str:
        """The name of the run's folder and of its record."""
        return f"{self.judge}-{Path(self.row).name}-{self.seed}"

    def __call__(self) -> str:
        """Train from the last checkpoint on, write the record, remove the folder, and return the name.

        Raises:
            `InterruptedRun`: if a SIGTERM ended the training.
        """
        started, folder = time.perf_counter(), Path(self.folder) / self.name
        queries = load_queries(str(DATA["trained"]))
        mean, deviation = scale(read(START)["trained"], queries)
        args = self.arguments(folder)
        judge = Judge(Reader(mean, deviation, JUDGES[self.judge]), guard=args.judge_guard)
        trainer = RankBufferTrainer(self.policy, args=args, train_dataset=queries, judge=judge)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(KeptApart(folder, trainer.processing_class, self.seed))
        try:
            trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
        finally:
            trainer.close()
        if trainer.interrupted:
            raise InterruptedRun(f"a SIGTERM ended {self.name}: the same command continues it")
        record = {"row": Path(self.row).name, "judge": self.judge, "seed": self.seed, "device": self.device}
        kept = {path.stem.split("-")[1]: json.loads(path.read_text()) for path in sorted(folder.glob("kept-*.json"))}
        seconds = round(time.perf_counter() - started)  # of the last call, if the run was continued
        write(RECORDS / f"{self.name}.json.gz", record | {"seconds": seconds, **visits(folder), "kept_apart": kept})
        shutil.rmtree(folder)
        return self.name

    def arguments(self, folder: Path):
        """Return the arguments of the row's recipe, with the settings that all runs share."""
        own = {"model_name_or_path": self.policy, "dataset_name": str(DATA["trained"]), "output_dir": str(folder)}
        own |= {"max_steps": self.steps, "seed": self.seed, "use_cpu": self.device == "cpu"}
        words = [word for key, value in (SAME | own).items() for word in (f"--{key}", str(value))]
        return RecipeParser().parse_args_and_config(["--config", str(RECIPES / f"{self.row}.yaml"), *words])[1]


class Reader(NoisyRubricJudge):
    """The noisy judge with any errors of the simulated judge, position bias and lasting errors included."""

    def __init__(self, mean: float, deviation: float, errors: JudgeErrors):
        super().__init__(mean, deviation)
        self.errors = errors


class KeptApart(TrainerCallback):
    """Sample answers to the prompts kept apart at fixed steps, without a change of the run's random numbers."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, seed: int):
        self.folder, self.tokenizer, self.seed = folder, tokenizer, seed

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """Sample and write a file, at every `EVALUATED` steps and at the end."""
        step = state.global_step
        if step % EVALUATED == 0 or step == state.max_steps:
            answers = sample(model, self.tokenizer, load_queries(str(DATA["kept_apart"])), self.seed)
            (self.folder / f"kept-{step}.json").write_text(json.dumps(answers))
            model.train()


def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, queries: Dataset, seed: int) -> dict[str, list]:
    """Return `SAMPLES` answers to each query, sampled as in training."""
    prompts, texts, device = queries["prompt"][:], [], model.device
    tokenizer.padding_side = "left"
    model.eval()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(seed)
        for i in range(0, len(prompts), 5):  # more at once take more memory, and hardly less time
            batch = tokenizer.apply_chat_template(
                prompts[i : i + 5], add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
            ).to(device)
            how = {"do_sample": True, "max_new_tokens": LENGTH, "num_return_sequences": SAMPLES}
            made = model.generate(**batch, **how, temperature=1.0, top_p=1.0, top_k=TOP_K)
            texts += tokenizer.batch_decode(made[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return {id: texts[i * SAMPLES :][:SAMPLES] for i, id in enumerate(queries["query_id"])}


def rubrics_of(row: dict[str, Any]) -> list[tuple[int, str]]:
    """Return weight and text of the rubrics of a row of the data."""
    return [(rubric["weight"], rubric["text"]) for rubric in row["rubrics"]]


def scale(answers: dict[str, list[str]], queries: Iterable[dict]) -> tuple[float, float]:
    """Return the mean rubric score of answers and its deviation within a group, both in 0..1."""
    groups = [[rubric_score(text, rubrics_of(row)) for text in answers[row["query_id"]]] for row in queries]
    return fmean(map(fmean, groups)), fmean(stdev(values) ** 2 for values in groups) ** 0.5


def visits(folder: Path) -> dict[str, list]:
    """Return the groups of a run, in the order of its steps, and judge calls and tokens by step."""
    store = BufferStore(folder / LIVE_STORE)
    texts = {(id, each.id): each.text for id in history.query_ids(store) for each in history.responses(store, id)}
    groups = [
        {
            "query_id": group.query_id,
            "step": group.step,
            "rewards": [reward if reward is None else round(reward, 4) for reward in group.rewards],
            "answers": [texts.get((group.query_id, f"{group.step}-{i}"), "") for i in range(len(group.rewards))],
        }
        for group in history.groups(store)
    ]
    spent = [[step, each.calls, each.tokens] for step, each in sorted(history.totals_by(store, "step").items())]
    store.close()
    return {"visits": groups, "spent": spent}


def read(path: Path) -> Any:
    """Read a compressed JSON file."""
    return json.loads(gzip.decompress(path.read_bytes()))


def write(path: Path, value: Any) -> None:
    """Write a compressed JSON file, whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(gzip.compress(json.dumps(value).encode(), mtime=0))
    os.replace(part, path)


def queue(seeds: Sequence[int]) -> Iterator[tuple[str, str, int]]:
    """Yield row, judge and seed of all runs in their order.

    The rows of the claims come first: all seeds under the sharp judge, then all under the blunt one. The other rows
    follow in the same order.
    """
    for rows in (CLAIMED, OTHERS):
        yield from ((row, judge, seed) for judge in JUDGES for seed in seeds for row in rows)


def main() -> None:
    """Make the runs that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--output_dir", default="runs/real_policy", help="folder of the unfinished runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N-1")
    parser.add_argument("--rows", nargs="+", choices=[*CLAIMED, *OTHERS], default=[*CLAIMED, *OTHERS])
    parser.add_argument("--limit", type=int, help="at most so many runs in this call")
    parser.add_argument("--workers", type=int, default=1, help="runs at the same time")
    parser.add_argument("--measure", action="store_true", help="sample the policy before training, and write that")
    given = parser.parse_args()
    if given.measure:
        model, tokenizer = (each.from_pretrained(given.policy) for each in (AutoModelForCausalLM, AutoTokenizer))
        model.to(given.device)
        write(START, {of: sample(model, tokenizer, load_queries(str(path)), 0) for of, path in DATA.items()})
        return
    runs = [
        Run(row, judge, seed, given.policy, given.output_dir, given.device)
        for row, judge, seed in queue(range(given.seeds))
        if row in given.rows
    ]
    there = {path.name for path in RECORDS.glob("*.json.gz")}
    missing = [run for run in runs if f"{run.name}.json.gz" not in there][: given.limit]
    os.environ.update(ALLOCATION)  # read when a process starts
    with multiprocessing.get_context("spawn").Pool(given.workers, maxtasksperchild=1) as pool:
        for done, name in enumerate(pool.imap_unordered(Run.__call__, missing), 1):
            print(f"{time.strftime('%F %T')} {name}: {done} of {len(missing)} in this call", flush=True)


if __name__ == "__main__":
    main()
