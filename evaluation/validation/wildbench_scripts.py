"""WildBench's own scripts from prompts to tables beside ours, on made-up conversations, outputs and answers."""

import json
import random
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow
import yaml
from pyarrow.parquet import write_table

from rankbuffer_trl.judge.verdicts import VerdictError

from ..assets import Assets
from ..files import read_json
from ..metric import Rows, mean
from ..wildbench import REFERENCES, WildBench, pairwise_path, score_path
from ..wildbench_scores import GROUP_OF, REWARDS, is_whole
from .check import Check, run_official, worst

MODEL = "candidate"
ROWS = 200
SEED = 0
SHORT = dict(zip(REFERENCES, ("gpt4t", "haiku", "llama"), strict=True))
ROUNDING = 1e-9

LOAD_DATASET = """
import json, pathlib
def load_dataset(path, name, split):
    return json.loads(pathlib.Path(f"{path.split('/')[1]}.{name}.json").read_text())
def get_dataset_config_names(path):
    return []
"""
JSON_LINES = """
import contextlib, json
@contextlib.contextmanager
def open(path, mode, builtin=open):
    with builtin(path) as lines:
        yield map(json.loads, lines)
"""
STUBS = {
    "datasets": LOAD_DATASET,
    "jsonlines": JSON_LINES,
    "tabulate": "tabulate = None",
    "tqdm": "def tqdm(items, **options): return items",
    "openai": "",
    "tiktoken": "",
    "unified_utils": "retry_handler = openai_chat_request = anthropic_chat_request = None",
}


def script_checks(assets: Assets, official: Assets) -> Iterator[Check]:
    """Prompts, result files and tables of the official scripts and of this project, made of the same data."""
    generator = random.Random(SEED)
    with TemporaryDirectory() as place:
        folder = Path(place)
        rows, outputs = made_up(generator)
        bench = WildBench(write_assets(folder, assets, rows, outputs), reward=True)
        asked = dict(bench.chats(outputs[MODEL]))
        keys = [f"{kind}/{session}" for kind in ("score", *REFERENCES) for session in outputs[MODEL]]
        answers = {key: made_up_answer(generator, key, key in asked) for key in keys}
        verdicts, failures = {}, {}
        for key, chat in asked.items():
            try:
                verdicts[key] = chat.read(answers[key])
            except VerdictError as fault:
                failures[key] = str(fault)
        bench.write_verdicts(folder, MODEL, outputs[MODEL], verdicts, failures)

        prompts: dict[str, str] = {}
        for reference in (None, *REFERENCES):
            prompts |= run_scripts(folder, assets, official, answers, reference)
        alike = sum(chat.messages[0]["content"] == prompts[key] for key, chat in asked.items())
        yield Check("prompts as the official script writes them, with who is A", alike, len(asked))
        for reference in (None, *REFERENCES):
            ours = read_json(pairwise_path(folder, MODEL, reference) if reference else score_path(folder, MODEL))
            theirs = read_json(folder / f"{results(reference)}.json")
            alike = sum(a == b for a, b in zip_longest(map(essence, ours), map(essence, theirs)))
            yield Check(
                f"result rows as the official script writes them, {reference or 'ratings'}", alike, len(theirs)
            )
        yield from table_checks(folder, bench.scores(folder, MODEL).rows)


def made_up(generator: random.Random) -> tuple[list[dict[str, Any]], dict[str, dict[str, str]]]:
    """Conversations, and outputs by model and session: some empty, some too long, none with placeholders."""

    def text(most: int) -> str:
        return " ".join(generator.choices(("tea", "cup", "\n", "\\1", "é", "1."), k=generator.randrange(1, most)))

    def output() -> str:
        return generator.choice(("", " \n", text(1500), *(text(40) for _ in range(5))))

    tags = sorted(GROUP_OF)
    rows: list[dict[str, Any]] = [
        {
            "id": f"s{number}",
            "session_id": f"s{number}",
            "conversation_input": [
                {"role": ("user", "assistant")[turn % 2], "content": text(30 if generator.random() < 0.95 else 3000)}
                for turn in range(generator.choice((1, 3, 5)))
            ],
            "checklist": [text(9) for _ in range(generator.randrange(1, 5))],
            "primary_tag": generator.choice(tags),
            "secondary_tags": generator.choices(tags, k=generator.randrange(3)),
        }
        for number in range(ROWS)
    ]
    return rows, {name: {row["id"]: output() for row in rows} for name in (MODEL, *REFERENCES)}


def made_up_answer(generator: random.Random, key: str, asked: bool) -> str:
    """A judge's answer: valid, or none that can be read. Where we do not ask, the one that we assume."""
    if asked and generator.random() < 0.1:
        return generator.choice(('{"score": "7", "choice": "A+"', "no", '{"strengths": "none"}'))
    if key.startswith("score/"):
        score = generator.randrange(1, 11) if asked else 1
        return json.dumps({"strengths": "x", "score": generator.choice((score, str(score))) if asked else "1"})
    return json.dumps({"choice": generator.choice(sorted(REWARDS))})


def write_assets(
    folder: Path, assets: Assets, rows: list[dict[str, Any]], outputs: Mapping[str, Mapping[str, str]]
) -> Assets:
    """Made-up data in the form of the Hub's files and, for the scripts, of what they load; templates are official."""
    data = {"questions": rows}
    for name, texts in outputs.items():
        data[name] = [{"session_id": key, "output": [text], "generator": name} for key, text in texts.items()]
    manifest = {}
    for name, table in data.items():
        loaded = "WildBench.v2" if name == "questions" else f"WildBench-V2-Model-Outputs.{name}"
        (folder / f"{loaded}.json").write_text(json.dumps(table), encoding="utf-8")
        write_table(pyarrow.Table.from_pylist(table), folder / f"{name}.parquet")
        manifest[name] = {"path": [f"{name}.parquet"], "sha256": None, "source": "made up"}
    for name in ("score_template", "pairwise_template"):
        manifest[name] = {"path": [str(assets.path("wildbench", name).absolute())], "sha256": None, "source": "above"}
    (folder / "assets.yaml").write_text(yaml.safe_dump({"wildbench": manifest}), encoding="utf-8")
    return Assets(folder, folder / "assets.yaml")


def run_scripts(
    folder: Path, assets: Assets, official: Assets, answers: Mapping[str, str], reference: str | None
) -> dict[str, str]:
    """From requests to a table, for ratings or against one reference. Gives the prompts by our keys."""
    base = results(reference)
    (folder / base).parent.mkdir(parents=True)
    (folder / "leaderboard/data_dir").mkdir(parents=True, exist_ok=True)
    requests, replies = f"{base}.batch-submit.jsonl", f"{base}.batch_results.jsonl"
    template = assets.path("wildbench", "pairwise_template" if reference else "score_template").absolute()
    arguments = ["--batch_mode", "--action", "eval", "--model", "judge", "--target_model_name", MODEL]
    arguments += ["--eval_template", str(template), "--eval_output_file", requests]
    if reference:
        arguments += ["--mode", "pairwise", "--max_words_to_eval", "1000", "--ref_model_name", reference]
    else:
        arguments += ["--mode", "score", "--max_words_to_eval", "-1"]
    run_official(official.path("wildbench", "eval"), *arguments, cwd=folder, stubs=STUBS)

    prompts, lines = {}, []
    for request in map(json.loads, (folder / requests).read_text(encoding="utf-8").splitlines()):
        key = f"{reference or 'score'}/{request['custom_id'].partition('||')[0]}"
        prompts[key] = request["body"]["messages"][0]["content"]
        body = {"choices": [{"message": {"content": answers[key]}}], "usage": {}}
        lines.append({"custom_id": request["custom_id"], "id": key, "error": None, "response": {"body": body}})
    (folder / replies).write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    run_official(official.path("wildbench", "batch_results_format"), requests, replies, cwd=folder, stubs=STUBS)
    run_official(official.path("wildbench", "create_tables"), table(reference), cwd=folder, stubs=STUBS)
    return prompts


def table(reference: str | None) -> str:
    """The official name of a table."""
    return f"pairwise-{SHORT[reference]}" if reference else "score"


def results(reference: str | None) -> str:
    """Where the official scripts keep results, without the ending."""
    if reference:
        return f"eval_results/v2.0522/pairwise.v2/eval=gpt-4-turbo-2024-04-09/ref={reference}/{MODEL}"
    return f"eval_results/v2.0625/score.v2/eval=gpt-4o-2024-05-13/{MODEL}"


def essence(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a result row says, as far as the tables read it."""
    texts = row.get("model_outputs", {})
    kept = {"session_id", "score", "model_test", "model_output", "model_A", "model_B", "model_outputs"}
    counted = {"winner", "extent"} if all(map(is_whole, texts.values())) else set()
    return {name: row[name] for name in (kept | counted) & row.keys()}


def table_checks(folder: Path, rows: Mapping[str, Rows]) -> Iterator[Check]:
    """Every metric beside the official table's number."""

    def official(reference: str | None) -> dict[str, Any]:
        name = table(reference) + ("-K=-1" if reference else "")
        return read_json(folder / f"leaderboard/data_dir/{name}.json")[MODEL]

    ratings, rewards = official(None), [official(reference) for reference in REFERENCES]
    numbers = {
        "WB-Score": ratings["adjusted_score"] * 10,
        "WB-Score (task macro)": ratings["task_macro_score"] * 10,
        "WB-Reward": 100 * sum(row["reward"] for row in rewards) / len(rewards),
        "WB-Reward (task macro)": 100 * sum(row["task_macro_reward"] for row in rewards) / len(rewards),
    }
    numbers |= {f"WB-Score: {group}": 10 * score for group, score in ratings["task_categorized_scores"].items()}
    numbers |= {f"WB-Reward: {name}": 100 * row["reward"] for name, row in zip(REFERENCES, rewards, strict=True)}
    yield worst(
        "metrics as the official tables have them", {k: (mean(rows[k]), v) for k, v in numbers.items()}, ROUNDING
    )
