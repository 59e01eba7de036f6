"""WildBench v2: each output is rated alone (WB-Score) and optionally against three references (WB-Reward).

Templates are read from a checkout of the official repository; conversations and the references' outputs are read from
its data sets. Verdicts are written in the official format, so `leaderboard/data_dir/_create_tables.py` can read them.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rankbuffer_tools.batch.chat import Chat
from rankbuffer_trl.judge import Totals
from rankbuffer_trl.judge.config import FailureLimit

from ..asking import ask_judge
from ..assets import Assets
from ..benchmark import BenchmarkScores, OutputError, Prompt, check_outputs, count_around
from ..files import BROUGHT, file_name, read_failed_judgments, read_json, write_failed_judgments, write_json
from .prompts import (
    display,
    output_texts,
    pairwise_prompt,
    positions,
    read_conversations,
    read_pairwise_choice,
    read_reference,
    read_score,
    scoring_prompt,
)
from .scores import (
    is_whole,
    pairwise_row,
    read_rows,
    reward_judged,
    score_judged,
    score_row,
    score_wildbench,
)

REFERENCES = ("gpt-4-turbo-2024-04-09", "claude-3-haiku-20240307", "Llama-2-70b-chat-hf")
POSITION_SEED = 42
REQUEST = {"temperature": 0, "max_tokens": 1024, "response_format": {"type": "json_object"}}
# The official code, too, records a score of 1 for an empty response.
UNASKED = {"score": "1", "weaknesses": "There is no response, so no judge was asked."}


class WildBench:
    """See [`Benchmark`]. With `reward`, WB-Reward is judged as well: up to three more judgments of each output."""

    name = "wildbench"
    title = "WildBench v2"

    def __init__(self, assets: Assets, limit: int | None = None, reward: bool = False):
        references = REFERENCES if reward else ()
        templates = ("score_template", "pairwise_template") if reward else ("score_template",)
        assets.check(self.name, ("questions", *templates, *references))
        every = read_conversations(assets.path(self.name, "questions"))
        self.conversations = dict(islice(every.items(), limit))
        self.first = positions(POSITION_SEED, list(every))  # drawn over all rows, so that a limit changes no position
        self.templates = {name: assets.path(self.name, name).read_text(encoding="utf-8") for name in templates}
        self.references = {
            name: read_reference(assets.path(self.name, name), self.conversations) for name in references
        }

    def prompts(self) -> list[Prompt]:
        """See [`Benchmark`]. A conversation comes with all its turns."""
        return [
            Prompt(session, [{"role": role, "content": text} for role, text in conversation.turns])
            for session, conversation in self.conversations.items()
        ]

    def write_outputs(self, folder: Path, model: str, responses: Mapping[str, str]) -> None:
        """See [`Benchmark`]."""
        rows = [
            {
                "session_id": session,
                "chat_history": [text for _, text in conversation.turns],
                "model_input": "n/a",
                "output": [responses[session]],
                "generator": model,
                "configs": {},
                "dataset": "wild_bench",
                "primary_tag": conversation.tags[0],
            }
            for session, conversation in self.conversations.items()
        ]
        write_json(outputs_path(folder, model), rows)

    def read_outputs(self, folder: Path, model: str) -> dict[str, str]:
        """See [`Benchmark`]."""
        path = outputs_path(folder, model)
        return check_outputs(list(self.conversations), output_texts(read_json(path, BROUGHT), path), path)

    def judge(self, folder: Path, model: str, settings: FailureLimit) -> Totals:
        """See [`Benchmark`]."""
        if model in self.references:  # a verdict names its two models, and must tell them apart
            raise OutputError(f"the label {model!r} is the name of a WB-Reward reference; choose another label")
        outputs = self.read_outputs(folder, model)
        answers = ask_judge(settings, dict(self.chats(outputs)), folder / "judge.jsonl", f"{self.title}: {model}")
        self.write_verdicts(folder, model, outputs, answers.values, answers.failures)
        return answers.totals

    def write_verdicts(
        self,
        folder: Path,
        model: str,
        outputs: Mapping[str, str],
        verdicts: Mapping[str, dict[str, Any]],
        failures: Mapping[str, str],
    ) -> None:
        """Write the official result files. `verdicts` and `failures` have the keys of [`WildBench.chats`]."""
        write_failed_judgments(folder, failures)
        scored = [
            score_row(session, model, response, verdict)
            for session, response in outputs.items()
            if (verdict := verdicts.get(f"score/{session}", None if response.strip() else UNASKED))
        ]
        write_json(score_path(folder, model), scored)
        for reference, texts in self.references.items():
            rows = []
            for session, response in outputs.items():
                key = f"{reference}/{session}"
                if key not in failures:  # a row without a verdict is a pair that was not asked
                    pair = {model: display(response), reference: display(texts[session])}
                    names = [model, reference] if self.first[session] else [reference, model]
                    rows.append(pairwise_row(session, names, pair, verdicts.get(key)))
            write_json(pairwise_path(folder, model, reference), rows)

    def chats(self, outputs: Mapping[str, str]) -> Iterator[tuple[str, Chat]]:
        """Yield the chats with their keys, `score/session` or `reference/session`."""
        for session, response in outputs.items():
            if response.strip():  # an empty one scores 1 without a judge, see `UNASKED`
                prompt = scoring_prompt(self.templates["score_template"], self.conversations[session], response)
                yield f"score/{session}", chat("score", session, prompt, read_score)
        for reference, texts in self.references.items():
            for session, response in outputs.items():
                pair = [display(response), display(texts[session])]
                if all(map(is_whole, pair)):  # the official tables drop the verdict on any other pair
                    a, b = pair if self.first[session] else reversed(pair)
                    prompt = pairwise_prompt(self.templates["pairwise_template"], self.conversations[session], a, b)
                    yield f"{reference}/{session}", chat("reward", session, prompt, read_pairwise_choice)

    def scores(self, folder: Path, model: str) -> BenchmarkScores:
        """See [`Benchmark`]."""
        failures = read_failed_judgments(folder)

        def rows_of(path: Path, kind: str) -> list[dict[str, Any]]:
            dropped = {key.partition("/")[2] for key in failures if key.partition("/")[0] == kind}
            return read_rows(path, set(self.conversations), dropped)

        groups = {session: conversation.groups for session, conversation in self.conversations.items()}
        rated = rows_of(score_path(folder, model), "score")
        paired = {each: rows_of(pairwise_path(folder, model, each), each) for each in self.references}
        rewards = {reference: reward_judged(rows, reference, groups) for reference, rows in paired.items()}
        scores = score_wildbench(score_judged(rated, groups), rewards, len(self.conversations))
        return count_around(scores, (row.get("parsed_result") for rows in (rated, *paired.values()) for row in rows))


def chat(kind: str, session: str, prompt: str, read: Any) -> Chat:
    """Return a chat with the official request."""
    return Chat(f"wildbench-{kind}", session, [{"role": "user", "content": prompt}], read, REQUEST)


def outputs_path(folder: Path, model: str) -> Path:
    """Return the official path of a model's outputs below `folder`."""
    return folder / "result_dirs" / "wild_bench_v2" / f"{file_name(model)}.json"


def score_path(folder: Path, model: str) -> Path:
    """Return the path of ratings in the official format."""
    return folder / "score.v2" / f"{file_name(model)}.json"


def pairwise_path(folder: Path, model: str, reference: str) -> Path:
    """Return the path of verdicts against a reference in the official format."""
    return folder / "pairwise.v2" / f"ref={reference}" / f"{file_name(model)}.json"
