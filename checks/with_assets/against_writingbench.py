"""Validate WritingBench against its own scripts, on made-up outputs and answers. It publishes no verdicts."""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from evaluation.assets import Assets
from evaluation.files import read_json, read_jsonl
from evaluation.metric import weighted_mean
from evaluation.official import run_official
from evaluation.writingbench.benchmark import WritingBench, outputs_path, scores_path
from rankbuffer_tools.batch.chat import Chat
from rankbuffer_trl.judge import VerdictError

from .comparison import Check, worst

PARTS = "WritingBench/benchmark_query/requirement"
"""Folder with parts of the queries, used if the whole benchmark is missing."""
MODEL = "candidate"
SEED = 0
ROUNDING = 1e-9
INVALID = ('{"score": 7', "no", "[]", '{"score": 7}', '{"score": "7", "reason": "x"}', '{"score": 11, "reason": ""}')

AGENT = """
import hashlib, json
class ClaudeAgent:
    def __init__(self, system_prompt):
        self.system = system_prompt
        self.answers = json.load(open("answers.json"))
    def run(self, prompt, success_check_fn):
        digest = hashlib.sha256((self.system + prompt).encode()).hexdigest()
        tries = self.answers.get(digest, ['{"score": 1, "reason": "not the prompt that ours is"}'])
        return next(((answer, True) for answer in tries if success_check_fn(answer)), (tries[-1], False))
CriticAgent = ClaudeAgent
"""
JSON_LINES = """
import contextlib, json
@contextlib.contextmanager
def open(path, builtin=open):
    with builtin(path, encoding="utf-8") as lines:
        yield map(json.loads, lines)
"""
PROGRESS = """
import contextlib, types
def tqdm(*arguments, **options):
    return contextlib.nullcontext(types.SimpleNamespace(update=lambda *n: None))
"""
EXACT_TABLE = """
import json, pathlib, pandas
def to_json(table, path, **options):
    pathlib.Path(path).write_text(json.dumps(table.to_dict("records")))
pandas.DataFrame.to_excel = to_json
"""


def writingbench_checks(assets: Assets) -> Iterator[Check]:
    """Compare prompts and parsed scores with `evaluate_benchmark.py`, and numbers with `calculate_scores.py`.

    Raises:
        [`AssetError`]: if a script or all queries are missing, or a script fails.
    """
    judging = assets.path("writingbench", "evaluate_benchmark")
    scoring = assets.path("writingbench", "calculate_scores")
    generator = random.Random(SEED)
    with TemporaryDirectory() as place:
        folder = Path(place)
        assets, queries = with_queries(folder, assets)
        bench = WritingBench(assets)
        outputs = {index: generator.choice(("", "{query}", "A {thing}.\n\\1 ```")) for index in bench.queries}
        dropped = set(generator.sample(sorted(bench.queries), len(bench.queries) // 50))
        asked = bench.chats(outputs)
        tries = {key: made_up_answers(generator, key.partition("/")[0] in dropped) for key in asked}
        verdicts, failures = {}, {}
        for key, chat in asked.items():
            try:
                verdicts[key] = first_valid(chat, tries[key])
            except VerdictError as fault:
                failures[key] = str(fault)
        bench.write_outputs(folder, MODEL, outputs)
        bench.write_scores(folder, MODEL, verdicts, failures)

        # The official script stops at the first failed judgment, so it gets no query with one.
        kept = [row for row in read_jsonl(outputs_path(folder, MODEL)) if str(row["index"]) not in dropped]
        (folder / "kept.jsonl").write_text("\n".join(map(json.dumps, kept)), encoding="utf-8")
        answers = {chat_digest(chat): tries[key] for key, chat in asked.items()}
        (folder / "answers.json").write_text(json.dumps(answers), encoding="utf-8")
        run_official(
            judging,
            *("--evaluator", "claude", "--query_criteria_file", str(queries.absolute())),
            *("--input_file", "kept.jsonl", "--output_file", "theirs.jsonl"),
            cwd=folder,
            stubs={"evaluator": AGENT, "jsonlines": JSON_LINES, "tqdm": PROGRESS},
            first=f"sys.path.append({str(judging.parent.absolute())!r})",
        )
        ours, theirs = list(read_jsonl(scores_path(folder, MODEL))), list(read_jsonl(folder / "theirs.jsonl"))
        alike = sum(a == b for a, b in zip(ours, theirs, strict=True))
        yield Check("prompts and parsed scores like the official script's, by query", alike, len(theirs))
        yield from table_checks(folder, scoring, queries, bench)


def with_queries(folder: Path, assets: Assets) -> tuple[Assets, Path]:
    """Return the assets and the file of queries, which is a part of them if the whole benchmark is missing.

    Raises:
        [`AssetError`]: if there are no queries at all.
    """
    entry = assets.manifest["writingbench"]
    parts = sorted((assets.folder / PARTS).glob("*/*_subset.jsonl"))
    if not parts or any((assets.folder / path).is_file() for path in entry["questions"]["path"]):
        return assets, assets.path("writingbench", "questions")
    manifest = {
        "questions": {"path": [str(parts[0].absolute())], "sha256": None, "source": "a part of the benchmark"},
        "prompt": entry["prompt"] | {"path": [str(assets.path("writingbench", "prompt").absolute())]},
    }
    (folder / "assets.yaml").write_text(yaml.safe_dump({"writingbench": manifest}), encoding="utf-8")
    return Assets(folder, folder / "assets.yaml"), parts[0]


def made_up_answers(generator: random.Random, failing: bool) -> list[str]:
    """Make up the answers to one question and its repeats. Only the last one is valid, and none if `failing`."""
    tries = generator.choices(INVALID, k=generator.choice((0, 0, 0, 1, 4)) if not failing else 5)
    if not failing:
        verdict = json.dumps({"score": generator.randrange(1, 11), "reason": "so", "more": generator.random()})
        tries.append(generator.choice((verdict, f"```json\n{verdict}\n```", f"json\n{verdict}")))
    return tries


def first_valid(chat: Chat, answers: list[str]) -> dict:
    """Return the first answer that can be read.

    Raises:
        [`VerdictError`]: if no answer can be read.
    """
    for answer in answers[:-1]:
        try:
            return chat.read(answer)
        except VerdictError:
            continue
    return chat.read(answers[-1])


def chat_digest(chat: Chat) -> str:
    """Return the digest of both messages of a chat."""
    return hashlib.sha256("".join(message["content"] for message in chat.messages).encode()).hexdigest()


def table_checks(folder: Path, script: Path, queries: Path, bench: WritingBench) -> Iterator[Check]:
    """Compare the overall score, the number of queries and the domains with the official script's."""
    for name in ("style", "format", "length"):
        (folder / "requirement" / name).mkdir(parents=True)
        for part in ("subset", "subset_C"):
            (folder / "requirement" / name / f"{name}_{part}.jsonl").touch()
    run_official(
        script,
        *("--score_dir", str(scores_path(folder, MODEL).parent), "--benchmark_file", str(queries.absolute())),
        *("--output_excel", "table.json", "--requirement_dir", "requirement"),
        cwd=folder,
        stubs={},
        first=EXACT_TABLE,
    )
    (official,) = read_json(folder / "table.json")
    rows = bench.scores(folder, MODEL).rows
    yield Check("queries counted", len(rows["Overall"]), official["Count"])
    yield Check("Overall x 10", weighted_mean(rows["Overall"]), 10 * official["Overall"], ROUNDING)
    domains = {
        name: (weighted_mean(each), 10 * official[f"Domain1_{name}"])
        for name, each in rows.items()
        if name != "Overall"
    }
    yield worst("domains x 10", domains, ROUNDING)
