"""Validate Arena-Hard against the official scripts, and against published scores if their judgments are there."""

import hashlib
import json
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from evaluation.arena_hard.benchmark import ArenaHard
from evaluation.arena_hard.scores import BATTLE_SCORES, OFFICIAL_RESAMPLES, score_judgments
from evaluation.arena_hard.style_control import BENCH, JUDGE_LABEL, NOTHING, official_layout
from evaluation.assets import AssetError, Assets
from evaluation.files import read_jsonl, write_json, write_jsonl
from evaluation.metric import Row, weighted_mean
from evaluation.official import run_official
from rankbuffer_tools.batch.chat import Chat

from .comparison import Check

MODEL = "candidate"
SEED = 0
ROUNDING = 1e-9
PUBLISHED = {"deepseek-r1": 77.0, "qwq-32b": 60.9}
"""Creative writing without style control, judged by GPT-4.1 and Gemini 2.5 together, from the official README."""

MADE_UP_LABELS = (*BATTLE_SCORES, "A>>>B", "A > B", "AB", "")
ANSWER = """
import hashlib, json
import utils.completion as completion
answers = json.load(open("answers.json"))
def answer(messages, temperature, max_tokens, **others):
    assert (temperature, max_tokens) == SETTINGS
    text = answers[hashlib.sha256(json.dumps(messages).encode()).hexdigest()]
    return None if text is None else {"answer": text}
completion.registered_api_completion["answers"] = answer
"""
MEANS = """
import json
import show_result
battles = show_result.load_judgments(["judge"], "arena-hard-v2.0")
battles["scores"] = battles["scores"].astype(float)
print("MEANS " + json.dumps(battles.groupby("category")["scores"].mean().to_dict()))
"""


def arena_hard_checks(assets: Assets) -> Iterator[Check]:
    """Yield all comparisons. Those that need the fewest files come first.

    Raises:
        [`AssetError`]: if an official file is missing or wrong.
    """
    assets.check("arena_hard", ("gen_judgment", "show_result", "completion", "math_utils"))
    yield from script_checks(assets)
    yield from published_checks(assets)


def script_checks(assets: Assets) -> Iterator[Check]:
    """Compare prompts, labels and scores with those of the official scripts, for made-up outputs and answers."""
    generator = random.Random(SEED)
    with TemporaryDirectory() as place:
        folder = Path(place)
        bench = ArenaHard(made_up_baselines(folder / "assets", assets, generator))
        outputs = {uid: made_up_text(generator) for uid in bench.questions}
        chats = bench.chats(outputs)
        answers = {key: None if generator.random() < 0.02 else made_up_answer(generator) for key in chats}
        values = {key: chats[key].read(text) for key, text in answers.items() if text is not None}
        bench.write_outputs(folder, MODEL, outputs)
        bench.write_judgments(folder, MODEL, JUDGE_LABEL, chats, values)
        ours = list(read_jsonl(judgments_path(folder)))

        there = official_layout(folder / "official", assets.path("arena_hard", "gen_judgment").parent)
        for name, texts in (bench.baselines | {MODEL: outputs}).items():
            rows = ({"uid": uid, "model": name, "messages": [{"content": {"answer": t}}]} for uid, t in texts.items())
            write_jsonl(there / "data" / BENCH / "model_answer" / f"{name}.jsonl", rows)
        replies = {chat_digest(chats[key]): text for key, text in answers.items()}
        theirs = judge_officially(there, assets, bench, replies)
        games = [(a, b) for mine in ours for a, b in zip(mine["games"], theirs[mine["uid"]]["games"], strict=True)]
        yield Check(
            "games as the official script writes them: prompt, answer, label",
            sum(a == b for a, b in games),
            len(games),
        )

        known = [
            row
            for row in ours
            if all(game is None or game["score"] in (None, *BATTLE_SCORES) for game in row["games"])
        ]
        write_jsonl(there / "data" / BENCH / "model_judgment" / JUDGE_LABEL / f"{MODEL}.jsonl", known)
        (there / "means.py").write_text(MEANS)
        printed = run_official(there / "means.py", cwd=there, stubs={})
        means = json.loads(printed.partition("MEANS ")[2])
        scores = score_judgments(judgments_path(folder), {uid: q["category"] for uid, q in bench.questions.items()})
        for category, judged in scores.rows.items():
            yield Check(f"{category}: mean over battles", weighted_mean(judged), 100 * means[category], ROUNDING)
            table = run_official(there / "show_result.py", "-j", JUDGE_LABEL, "-c", category, cwd=there, stubs={})
            shown = next(line.split() for line in table.splitlines() if MODEL in line)
            drawn = str(scores.official[f"{category}, official bootstrap"]).split()[0]
            deviation = 50 / math.sqrt(sum(row.weight for row in judged.values()) * OFFICIAL_RESAMPLES)  # at most
            noise = 4 * math.sqrt(2) * deviation
            yield Check(f"{category}: mean of 100 resamples, theirs unseeded", float(drawn), float(shown[2]), noise)


def published_checks(assets: Assets) -> Iterator[Check]:
    """Compare the README's ensemble scores, computed from the repository's own judgments.

    Raises:
        [`AssetError`]: if the judgments are missing.
    """
    folder = assets.path("arena_hard", "questions").parent
    categories = {row["uid"]: row["category"] for row in read_jsonl(assets.path("arena_hard", "questions"))}
    for model, score in PUBLISHED.items():
        files = [folder / "model_judgment" / judge / f"{model}.jsonl" for judge in ("gpt-4.1", "gemini-2.5")]
        if missing := [str(file) for file in files if not file.exists()]:
            raise AssetError(f"the published scores need {' and '.join(missing)}, which a whole checkout has")
        rows: dict[str, Row] = {}
        for file in files:
            judged = score_judgments(file, categories).rows["creative_writing"]
            rows |= {f"{file.parent.name} {uid}": row for uid, row in judged.items()}
        yield Check(f"creative_writing of {model}, both judges", weighted_mean(rows), score, 0.3)


def judge_officially(
    place: Path, assets: Assets, bench: ArenaHard, answers: Mapping[str, str | None]
) -> dict[str, dict]:
    """Return the rows that the official `gen_judgment.py` writes, by uid, if the judge gives `answers`."""
    config = bench.config | {"judge_model": JUDGE_LABEL, "model_list": [MODEL]}
    endpoint = {"endpoints": None, "api_type": "answers", "parallel": 4, "max_tokens": 1, "temperature": 0.0}
    (place / "settings.yaml").write_text(yaml.safe_dump(config))
    (place / "endpoints.yaml").write_text(yaml.safe_dump({JUDGE_LABEL: endpoint}))
    write_json(place / "answers.json", dict(answers))
    settings = (config["temperature"], config["max_tokens"])
    arguments = ("--setting-file", "settings.yaml", "--endpoint-file", "endpoints.yaml")
    script = assets.path("arena_hard", "gen_judgment")
    run_official(script, *arguments, cwd=place, stubs=NOTHING, first=ANSWER.replace("SETTINGS", repr(settings)))
    written = place / "data" / BENCH / "model_judgment" / JUDGE_LABEL / f"{MODEL}.jsonl"
    return {row["uid"]: row for row in read_jsonl(written)}


def made_up_baselines(folder: Path, assets: Assets, generator: random.Random) -> Assets:
    """Return the official prompts and questions with made-up baselines, since not every copy has the official ones."""
    questions = [row["uid"] for row in read_jsonl(assets.path("arena_hard", "questions"))]
    manifest = {}
    for name, entry in assets.manifest["arena_hard"].items():
        if entry["path"][0].endswith(f"model_answer/{name}.jsonl"):
            path = folder / f"{name}.jsonl"
            texts = ((uid, made_up_text(generator)) for uid in questions)
            rows = ({"uid": uid, "model": name, "messages": [{"content": {"answer": text}}]} for uid, text in texts)
            write_jsonl(path, rows)
            manifest[name] = entry | {"path": [str(path)], "sha256": None}
        elif name in ("questions", "judge_settings", "judge_config"):
            manifest[name] = entry | {"path": [str(assets.path("arena_hard", name).absolute())]}
    (folder / "assets.yaml").write_text(yaml.safe_dump({"arena_hard": manifest}))
    return Assets(folder, folder / "assets.yaml")


def made_up_text(generator: random.Random) -> str:
    """Make up a unique output with text that could confuse a template or a reader."""
    words = ("tea", "{QUESTION}", "{", "[[A>B]]", "é", "\n# 1", "\\1")
    return " ".join((str(generator.random()), *generator.choices(words, k=generator.randrange(9))))


def made_up_answer(generator: random.Random) -> str:
    """Make up a judgment with one verdict, several or none."""
    brackets = generator.choice(("[[{}]]", "[[{}]]", "[{}]", "({})", "[[{}\n]]"))
    labels = generator.choices(
        MADE_UP_LABELS[:-4] if generator.random() < 0.9 else MADE_UP_LABELS, k=generator.choice((0, 1, 1, 1, 2))
    )
    text = " so ".join(brackets.format(label) for label in labels)
    return generator.choice((text, text.lower(), f"My verdict: {text}.\n", f"[1] {text} [[]]"))


def judgments_path(folder: Path) -> Path:
    """Return the path of our judgment file."""
    return folder / "model_judgment" / JUDGE_LABEL / f"{MODEL}.jsonl"


def chat_digest(chat: Chat) -> str:
    """Return the digest of a chat's messages, by which the official script looks up the answer."""
    return hashlib.sha256(json.dumps(list(chat.messages)).encode()).hexdigest()
