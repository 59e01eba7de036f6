"""Validate WildBench against its published tables, and against its scripts on made-up conversations and answers.

Every number that is compared comes from [`score_wildbench`], which also computes what reports print.
"""

import ast
import json
import random
from collections.abc import Iterator, Mapping
from itertools import count, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow
import yaml
from pyarrow.parquet import write_table

from evaluation.assets import Assets
from evaluation.files import read_json
from evaluation.metric import Rows, weighted_mean
from evaluation.official import ScriptError, run_official
from evaluation.wildbench.benchmark import REFERENCES, WildBench, pairwise_path, score_path
from evaluation.wildbench.prompts import read_conversations
from evaluation.wildbench.scores import GROUP_OF, REWARDS, Judged, is_whole, score_judged, score_wildbench
from rankbuffer_trl.judge import VerdictError

from .comparison import Check, worst

MODEL = "candidate"
ROWS = 200
SEED = 0
SHORT = dict(zip(REFERENCES, ("gpt4t", "haiku", "llama"), strict=True))
RESULTS = "WildBench/eval_results/v2.0625/score.v2/eval=gpt-4o-2024-05-13"
WORTH = {"win_much": 1.0, "win": 0.5, "tie": 0.0, "lose": -0.5, "lose_much": -1.0}
ROUNDING = 1e-9
"""The official tables add the same numbers in another order, so the last bits differ."""

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


def wildbench_checks(assets: Assets) -> Iterator[Check]:
    """Yield all comparisons for which the files are there.

    Raises:
        [`AssetError`]: if an official table is missing or wrong.
    """
    tables = {name: read_json(assets.path("wildbench", name)) for name in ("all_stat", "score", *SHORT.values())}
    yield from published_scores(assets, tables["all_stat"])
    yield worst(
        "WB-Score (task macro) from the table's group means",
        {
            model: (
                reported(from_group_means(row["task_categorized_scores"]), "WB-Score (task macro)"),
                tables["all_stat"][model]["WB_score.task_macro"],
            )
            for model, row in tables["score"].items()
        },
        ROUNDING,
    )
    rewards = {name: {model: from_counts(row) for model, row in tables[name].items()} for name in SHORT.values()}
    for name in SHORT.values():
        yield from published_rewards(name, tables[name], rewards[name])
    yield worst(
        "WB-Reward, mean of the three references",
        {
            model: (
                reported({}, "WB-Reward", {name: rewards[name][model] for name in SHORT.values()}),
                row["mixture_of_rewards.K=-1"],
            )
            for model, row in tables["all_stat"].items()
            if all(model in rewards[name] for name in SHORT.values())
        },
        ROUNDING,
    )
    theirs = tag_groups(assets.path("wildbench", "create_tables"))
    alike = sum(GROUP_OF.get(tag) == group for tag, group in theirs.items())
    yield Check("tags in the group of the official script", alike, len(theirs | GROUP_OF))
    yield from script_checks(assets)


def reported(
    scored: Mapping[str, Judged], metric: str, rewards: Mapping[str, Mapping[str, Judged]] | None = None
) -> float:
    """Return a metric as a report prints it."""
    return weighted_mean(score_wildbench(scored, rewards or {}, len(scored)).rows[metric])


def published_scores(assets: Assets, table: Mapping[str, Any]) -> Iterator[Check]:
    """Compare WB-Score of each model whose verdicts are in the checkout and whose row is in the table."""
    groups = None
    if has_file(assets, "questions"):
        conversations = read_conversations(assets.path("wildbench", "questions"))
        groups = {session: conversation.groups for session, conversation in conversations.items()}
    for path in sorted((assets.folder / RESULTS).glob("*.json")):
        if (row := table.get(path.stem)) is None:
            continue
        rows = read_json(path)
        judged = score_judged(rows, groups or {each["session_id"]: () for each in rows})
        yield Check(f"WB-Score of {path.stem}", reported(judged, "WB-Score"), row["WB_score"], ROUNDING)
        lengths = [len(each["model_output"]) for each in rows if judged[each["session_id"]].whole]
        yield Check(f"mean length of {path.stem}", sum(lengths) / len(lengths), row["Length"], ROUNDING)
        if groups:
            ours = reported(judged, "WB-Score (task macro)")
            yield Check(f"WB-Score (task macro) of {path.stem}", ours, row["WB_score.task_macro"], ROUNDING)


def published_rewards(
    name: str, table: Mapping[str, Any], judged: Mapping[str, Mapping[str, Judged]]
) -> Iterator[Check]:
    """Compare WB-Reward and its task macro against one reference, from the table's counts of verdicts."""
    plain, macro = {}, {}
    for model, row in table.items():
        plain[model] = (reported({}, "WB-Reward", {name: judged[model]}), 100 * row["reward"])
        by_group: dict[str, Judged] = {}
        for group, counts in row["task_categorized_results"].items():
            by_group |= from_counts(counts | {"total": sum(counts.values())}, group)
        macro[model] = (
            reported({}, "WB-Reward (task macro)", {name: by_group}),
            100 * row["task_macro_reward"],
        )
    yield worst(f"WB-Reward against {name} from counts", plain, ROUNDING)
    yield worst(f"WB-Reward (task macro) against {name} from counts", macro, ROUNDING)


def from_counts(row: Mapping[str, Any], group: str = "") -> dict[str, Judged]:
    """Make up judged rows with the counts of a table. The rows that the table skipped are not whole."""
    keys = (f"{group}/{number}" for number in count())
    judged = {
        next(keys): Judged(worth, (group,) if group else (), True)
        for outcome, worth in WORTH.items()
        for _ in range(row[outcome])
    }
    return judged | {next(keys): Judged(0.0, (), False) for _ in range(row["total"] - len(judged))}


def from_group_means(means: Mapping[str, float]) -> dict[str, Judged]:
    """Make up one judged row for each group, with the group's mean in the table, which is on the scale -8..10."""
    return {group: Judged(score / 2 + 5, (group,), True) for group, score in means.items()}


def tag_groups(script: Path) -> dict[str, str]:
    """Return the group of each tag in the official script, read without running the script.

    Raises:
        [`ScriptError`]: if the script does not define the groups.
    """
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "task_group_new":
            return ast.literal_eval(node.value)
    raise ScriptError(f"{script} has no task_group_new")


def has_file(assets: Assets, name: str) -> bool:
    """Return whether an official file of WildBench is in the folder, with any content."""
    return any((assets.folder / path).is_file() for path in assets.manifest["wildbench"][name]["path"])


def script_checks(assets: Assets) -> Iterator[Check]:
    """Compare prompts, result files and tables with those of the official scripts, from the same data."""
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
            prompts |= run_scripts(folder, assets, answers, reference)
        alike = sum(chat.messages[0]["content"] == prompts[key] for key, chat in asked.items())
        yield Check("prompts as the official script writes them, with who is A", alike, len(asked))
        for reference in (None, *REFERENCES):
            ours = read_json(pairwise_path(folder, MODEL, reference) if reference else score_path(folder, MODEL))
            theirs = read_json(folder / f"{official_results(reference)}.json")
            alike = sum(a == b for a, b in zip_longest(map(essence, ours), map(essence, theirs)))
            yield Check(
                f"result rows as the official script writes them, {reference or 'ratings'}", alike, len(theirs)
            )
        yield from table_checks(folder, bench.scores(folder, MODEL).rows)


def made_up(generator: random.Random) -> tuple[list[dict[str, Any]], dict[str, dict[str, str]]]:
    """Make up conversations, and outputs by model and session. Some are empty or too long, none has placeholders."""

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
    """Make up a judge's answer, readable or not. For a question that is not asked, return the assumed answer."""
    if asked and generator.random() < 0.1:
        return generator.choice(('{"score": "7", "choice": "A+"', "no", '{"strengths": "none"}'))
    if key.startswith("score/"):
        score = generator.randrange(1, 11) if asked else 1
        return json.dumps({"strengths": "x", "score": generator.choice((score, str(score))) if asked else "1"})
    return json.dumps({"choice": generator.choice(sorted(REWARDS))})


def write_assets(
    folder: Path, assets: Assets, rows: list[dict[str, Any]], outputs: Mapping[str, Mapping[str, str]]
) -> Assets:
    """Write made-up data as files of the Hub and as the files that the scripts load. The templates are official."""
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


def run_scripts(folder: Path, assets: Assets, answers: Mapping[str, str], reference: str | None) -> dict[str, str]:
    """Run the official scripts from requests to a table, for ratings or one reference.

    Returns:
        `dict[str, str]`: the prompts by the keys of [`WildBench.chats`].
    """
    base = official_results(reference)
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
    run_official(assets.path("wildbench", "eval"), *arguments, cwd=folder, stubs=STUBS)

    prompts, lines = {}, []
    for request in map(json.loads, (folder / requests).read_text(encoding="utf-8").splitlines()):
        key = f"{reference or 'score'}/{request['custom_id'].partition('||')[0]}"
        prompts[key] = request["body"]["messages"][0]["content"]
        body = {"choices": [{"message": {"content": answers[key]}}], "usage": {}}
        lines.append({"custom_id": request["custom_id"], "id": key, "error": None, "response": {"body": body}})
    (folder / replies).write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    run_official(assets.path("wildbench", "batch_results_format"), requests, replies, cwd=folder, stubs=STUBS)
    run_official(assets.path("wildbench", "create_tables"), table_name(reference), cwd=folder, stubs=STUBS)
    return prompts


def table_name(reference: str | None) -> str:
    """Return the official name of a table."""
    return f"pairwise-{SHORT[reference]}" if reference else "score"


def official_results(reference: str | None) -> str:
    """Return the path of the official scripts' results, without the suffix."""
    if reference:
        return f"eval_results/v2.0522/pairwise.v2/eval=gpt-4-turbo-2024-04-09/ref={reference}/{MODEL}"
    return f"eval_results/v2.0625/score.v2/eval=gpt-4o-2024-05-13/{MODEL}"


def essence(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a result row that the tables read."""
    texts = row.get("model_outputs", {})
    kept = {"session_id", "score", "model_test", "model_output", "model_A", "model_B", "model_outputs"}
    counted = {"winner", "extent"} if all(map(is_whole, texts.values())) else set()
    return {name: row[name] for name in (kept | counted) & row.keys()}


def table_checks(folder: Path, rows: Mapping[str, Rows]) -> Iterator[Check]:
    """Compare every metric with the official table's number."""

    def official(reference: str | None) -> dict[str, Any]:
        name = table_name(reference) + ("-K=-1" if reference else "")
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
        "metrics as the official tables have them",
        {k: (weighted_mean(rows[k]), v) for k, v in numbers.items()},
        ROUNDING,
    )
