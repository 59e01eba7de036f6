"""Arena-Hard v2.0: each output is judged twice against a strong baseline, once in each position.

Questions, baselines, prompts and patterns are read from a checkout of the official repository. Judgments are written
in its format, so its `show_result.py` can score them too.
"""

import runpy
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import yaml

from rankbuffer_tools.batch.chat import Chat
from rankbuffer_trl.judge import Totals, VerdictError, after_thought
from rankbuffer_trl.judge.config import FailureLimit

from ..asking import ask_judge, need_judge, need_verdicts, try_judge
from ..assets import Assets
from ..benchmark import BenchmarkScores, OutputError, Prompt, check_outputs
from ..files import BROUGHT, file_name, read_jsonl, write_failed_judgments, write_jsonl
from .scores import read_label, score_judgments


class ArenaHard:
    """See [`Benchmark`]. A `limit` applies to each category."""

    name = "arena_hard"
    title = "Arena-Hard v2.0"

    def __init__(self, assets: Assets, limit: int | None = None):
        assets.check(self.name, ("questions", "judge_settings", "judge_config"))
        self.config = yaml.safe_load(assets.path(self.name, "judge_config").read_text(encoding="utf-8"))
        settings = runpy.run_path(str(assets.path(self.name, "judge_settings")))["JUDGE_SETTINGS"]
        seen: Counter[str] = Counter()
        self.questions = {}
        for question in read_jsonl(assets.path(self.name, "questions")):
            seen[question["category"]] += 1
            # Each category has a baseline and a score of its own.
            if limit is None or seen[question["category"]] <= limit:
                self.questions[question["uid"]] = question
        self.categories = list(seen)
        # System prompt and baseline differ by category.
        self.settings = {category: settings[category] for category in self.categories}
        names = list(dict.fromkeys(setting["baseline"] for setting in self.settings.values()))
        assets.check(self.name, names)
        self.baselines = {name: read_answer_file(assets.path(self.name, name)) for name in names}

    def prompts(self) -> list[Prompt]:
        """See [`Benchmark`]."""
        return [Prompt(uid, [{"role": "user", "content": q["prompt"]}]) for uid, q in self.questions.items()]

    def outputs_path(self, folder: Path, model: str) -> Path:
        """Return the official path of a model's answers below `folder`."""
        return folder / "model_answer" / f"{file_name(model)}.jsonl"

    def write_outputs(self, folder: Path, model: str, responses: Mapping[str, str]) -> None:
        """See [`Benchmark`]."""
        rows = (
            {
                "uid": uid,
                "ans_id": uid,
                "model": file_name(model),
                "messages": [
                    {"role": "user", "content": question["prompt"]},
                    {"role": "assistant", "content": {"answer": responses[uid]}},
                ],
                "tstamp": 0.0,  # style control also needs `metadata`, which an official script adds
            }
            for uid, question in self.questions.items()
        )
        write_jsonl(self.outputs_path(folder, model), rows)

    def read_outputs(self, folder: Path, model: str) -> dict[str, str]:
        """See [`Benchmark`]."""
        path = self.outputs_path(folder, model)
        return check_outputs(
            list(self.questions), ((row.get("uid"), row_answer(row, path)) for row in read_jsonl(path, BROUGHT)), path
        )

    def chats(self, outputs: Mapping[str, str], need_label: bool = False) -> dict[str, Chat]:
        """Return the chats of both games of every question, by `uid/game`."""
        read = partial(read_judgment, patterns=self.config["regex_patterns"], need_label=need_label)
        request = {"temperature": self.config["temperature"], "max_tokens": self.config["max_tokens"]}
        chats = {}
        for uid, question in self.questions.items():
            settings = self.settings[question["category"]]
            baseline = self.baselines[settings["baseline"]][uid]
            # As officially, the model stands once in each position.
            for game, (a, b) in enumerate([(baseline, outputs[uid]), (outputs[uid], baseline)]):
                user = self.config["prompt_template"].format(QUESTION=question["prompt"], ANSWER_A=a, ANSWER_B=b)
                messages = [
                    {"role": "system", "content": settings["system_prompt"]},
                    {"role": "user", "content": user},
                ]
                chats[f"{uid}/{game}"] = Chat("arena-hard", uid, messages, read, request)
        return chats

    def judge(self, folder: Path, model: str, settings: FailureLimit) -> Totals:
        """See [`Benchmark`]."""
        outputs, log, title = self.read_outputs(folder, model), folder / "judge.jsonl", f"{self.title}: {model}"
        # The official reader takes an answer without a label.
        try_judge(settings, self.chats(outputs, need_label=True), log, title)
        chats = self.chats(outputs)
        # One without a verdict is null, as officially, and not repeated.
        answers = ask_judge(settings, chats, log, title)
        write_failed_judgments(folder, answers.failures)
        self.write_judgments(folder, model, need_judge(settings), chats, answers.values)
        labels = {key: value["score"] for key, value in answers.values.items()}
        need_verdicts(settings, labels, len(chats), log, title)
        return answers.totals

    def write_judgments(
        self, folder: Path, model: str, judge: str, chats: Mapping[str, Chat], values: Mapping[str, Mapping]
    ) -> None:
        """Write the official judgment file. `values` holds the judge's answers by the keys of `chats`."""

        def game(key: str) -> dict | None:
            if key not in values:  # a judgment that failed is null
                return None
            answer = {"answer": values[key]["answer"]}
            return {"score": values[key]["score"], "judgment": answer, "prompt": list(chats[key].messages)}

        rows = (
            {
                "uid": uid,
                "category": question["category"],
                "judge": judge,
                "model": file_name(model),
                "baseline": self.settings[question["category"]]["baseline"],
                "games": [game(f"{uid}/0"), game(f"{uid}/1")],
            }
            for uid, question in self.questions.items()
        )
        write_jsonl(folder / "model_judgment" / file_name(judge) / f"{file_name(model)}.jsonl", rows)

    def scores(self, folder: Path, model: str) -> BenchmarkScores:
        """See [`Benchmark`]."""
        files = list((folder / "model_judgment").glob(f"*/{file_name(model)}.jsonl"))
        if len(files) != 1:  # each judge has a folder, and a score is of one judge
            raise OutputError(
                f"{folder / 'model_judgment'} must hold judgments of {model!r} by one judge, not {len(files)}"
            )
        return score_judgments(files[0], {uid: question["category"] for uid, question in self.questions.items()})


def read_judgment(text: str, cut_off: bool = False, *, patterns: Sequence[str], need_label: bool = False) -> dict:
    """Return a judge's answer with its label. With `need_label`, raise [`VerdictError`] if there is none."""
    answer, closed = after_thought(text) if cut_off else (text, True)  # a draft inside a thought holds labels too
    label = read_label(answer, patterns) if closed else None
    if need_label and label is None:
        raise VerdictError("the answer has no label such as [[A>B]]")
    return {"score": label, "answer": text}


def row_answer(row: Mapping, path: Path) -> str:
    """Return the text of a row of an official answer file, or raise [`OutputError`] if the row has none."""
    try:
        return row["messages"][-1]["content"]["answer"]
    except (LookupError, TypeError):
        raise OutputError(f"{path}: the row of uid {row.get('uid')!r} has no messages[-1].content.answer") from None


def read_answer_file(path: Path) -> dict[str, str]:
    """Return the answers of an official answer file by uid."""
    return {row["uid"]: row_answer(row, path) for row in read_jsonl(path)}
