"""AlpacaEval 2: each output against GPT-4 Turbo's, by the probabilities of the judge's one token.

Prompt and request are those of the official annotator `weighted_alpaca_eval_gpt4_turbo`, with another judge. The
official library fits the length-controlled win rate.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from rankbuffer_tools.batch.chat import Chat
from rankbuffer_trl.judge import Totals, fill
from rankbuffer_trl.judge.config import FailureLimit

from ..asking import ask_judge, need_judge, need_verdicts, try_judge
from ..assets import AssetError, Assets
from ..benchmark import BenchmarkScores, OutputError, Prompt, check_outputs, shortened
from ..files import BROUGHT, read_json, write_failed_judgments, write_json
from ..metric import Row
from .length_control import length_controlled, load_library
from .scores import is_switched, read_pilot_preference, read_preference, win_rate_rows

WIN_RATE = "win rate"
LENGTH_CONTROLLED = "length-controlled win rate"

FIXED_FIELDS = {"max_tokens": 1, "logprobs": True, "top_logprobs": 5}
"""Fields that `judge_request` cannot change."""

REQUEST = FIXED_FIELDS | {"temperature": 1, "seed": None}  # as the official request, which has no seed


class AlpacaEval:
    """See [`Benchmark`]. With a `limit` there is no length-controlled win rate."""

    name = "alpaca_eval"
    title = "AlpacaEval 2"

    def __init__(self, assets: Assets, limit: int | None = None):
        # All at once, so that one error names every missing file.
        assets.check(self.name, ("prompt", "baseline") if limit else ("prompt", "baseline", "gamed"))
        rows = read_json(assets.path(self.name, "baseline"))
        self.template = read_template(assets.path(self.name, "prompt"))
        # The fit needs all rows in official order.
        self.gamed = None if limit and limit < len(rows) else assets.path(self.name, "gamed")
        self.reference = rows[:limit]
        self.ids = {row["instruction"]: str(place) for place, row in enumerate(self.reference)}
        if len(self.ids) < len(self.reference):
            raise AssetError("alpaca_eval: the baseline has an instruction twice")

    def prompts(self) -> list[Prompt]:
        """See [`Benchmark`]."""
        return [Prompt(id, [{"role": "user", "content": instruction}]) for instruction, id in self.ids.items()]

    def outputs_path(self, folder: Path, model: str) -> Path:
        """Return the path of a model's outputs below `folder`."""
        return folder / "model_outputs.json"

    def write_outputs(self, folder: Path, model: str, responses: Mapping[str, str]) -> None:
        """See [`Benchmark`]."""
        rows = [
            {
                "dataset": row.get("dataset", ""),
                "instruction": row["instruction"],
                "output": responses[self.ids[row["instruction"]]],
                "generator": model,
            }
            for row in self.reference
        ]
        write_json(self.outputs_path(folder, model), rows)

    def read_outputs(self, folder: Path, model: str) -> dict[str, str]:
        """See [`Benchmark`]."""
        path = self.outputs_path(folder, model)
        rows = read_json(path, BROUGHT)
        if not isinstance(rows, list):
            raise OutputError(f"{path} must be a list of rows with `instruction` and `output`")
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict) or "output" not in row or not isinstance(row.get("instruction"), str):
                raise OutputError(f"{path}: row {number} must have `instruction` (text) and `output`")
        outputs = [(self.ids.get(row["instruction"], row["instruction"][:80]), row["output"]) for row in rows]
        return check_outputs(list(self.ids.values()), outputs, path)

    def chats(
        self, outputs: Mapping[str, str], read: Callable[..., float | None] = read_preference
    ) -> dict[str, Chat]:
        """Return the chats by prompt id. `read` takes the log probabilities."""
        chats = {}
        for row in self.reference:
            instruction, theirs = row["instruction"], row["output"]
            mine = outputs[self.ids[instruction]]
            if mine != theirs:  # equal outputs count half without a judge
                switched = is_switched(instruction)
                first, second = (mine, theirs) if switched else (theirs, mine)
                # Filled in one pass: a placeholder inside an output stays text.
                texts = {"{instruction}": instruction, "{output_1}": first, "{output_2}": second}
                messages = [{"role": role, "content": fill(text, texts)} for role, text in self.template]
                reader = partial(read, switched=switched)
                id = self.ids[instruction]
                chats[id] = Chat("alpaca-eval", id, messages, str, REQUEST, afresh=True, read_logprobs=reader)
        return chats

    def judge(self, folder: Path, model: str, settings: FailureLimit) -> Totals:
        """See [`Benchmark`]."""
        outputs = self.read_outputs(folder, model)
        log, title = folder / "judge.jsonl", f"{self.title}: {model}"
        request = settings.endpoint.request
        # The log probabilities of the one token are the verdict.
        fixed = {field: value for field, value in request.items() if field not in FIXED_FIELDS}
        settings = replace(settings, judge_request=fixed)
        # The official reader takes any answer, also of a judge that thinks.
        try_judge(settings, self.chats(outputs, read_pilot_preference), log, title)
        # One without a preference is NaN, as officially, and not repeated.
        chats = self.chats(outputs)
        answers = ask_judge(settings, chats, log, title)
        write_failed_judgments(folder, answers.failures)
        self.write_annotations(folder, model, need_judge(settings), outputs, answers.values)
        need_verdicts(settings, answers.values, len(chats), log, title)
        return answers.totals

    def write_annotations(
        self, folder: Path, model: str, judge: str, outputs: Mapping[str, str], values: Mapping[str, float | None]
    ) -> None:
        """Write the official annotations. `values` holds the preferences by prompt id."""
        rows = [
            {
                "instruction": row["instruction"],
                "output_1": row["output"],
                "generator_1": row["generator"],
                "dataset": row.get("dataset", ""),
                "output_2": outputs[id],
                "generator_2": model,
                "annotator": f"weighted_alpaca_eval_{judge}",
                # Equal outputs were not judged, and are a draw.
                "preference": 1.5 if outputs[id] == row["output"] else values.get(id),
            }
            for id, row in zip(outputs, self.reference, strict=True)
        ]
        write_json(folder / "annotations.json", rows)

    def scores(self, folder: Path, model: str) -> BenchmarkScores:
        """See [`Benchmark`]."""
        import pandas

        path = folder / "annotations.json"
        rows = read_json(path)
        if [row["instruction"] for row in rows] != list(self.ids):
            raise OutputError(
                f"{path} must hold the benchmark's {len(self.ids)} instructions in official order, it has {len(rows)}"
                " rows. Delete it and run again: judgments are kept in judge.jsonl"
            )
        frame = pandas.DataFrame(rows)
        frame["preference"] = frame["preference"].astype(float)  # None becomes NaN, which the library leaves out
        if self.gamed is not None:
            official = length_controlled(frame, self.gamed)
        else:
            official = load_library().metrics.get_winrate(frame)
        preferences = dict(zip(self.ids.values(), frame["preference"], strict=True))
        metrics = {}
        if self.gamed is not None:
            glm = zip(self.ids.values(), frame["glm_preference"], strict=True)
            metrics[LENGTH_CONTROLLED] = {id: Row(100 * float(share)) for id, share in glm}
        metrics[WIN_RATE] = win_rate_rows(preferences)
        missing = [id for id, preference in preferences.items() if math.isnan(preference)]
        notes = ["The length control was fitted to GPT-4 Turbo's judgments. With another judge it is not calibrated."]
        if self.gamed is None:
            notes = ["No length-controlled win rate: it is defined on all rows in official order."]
        if missing:
            notes.append(f"Without a preference: {shortened(missing)}.")
        return BenchmarkScores(
            headline=next(iter(metrics)),
            rows=metrics,
            counts={
                "instructions": len(rows),
                "equal outputs": int((frame["output_1"] == frame["output_2"]).sum()),
                "NaN preferences": len(missing),
            },
            official={name: float(value) for name, value in official.items()},
            notes=notes,
        )


def read_template(path: Path) -> list[tuple[str, str]]:
    """Return the messages of the official prompt, which is written in ChatML, as (role, text).

    Raises:
        [`AssetError`]: if the file holds no messages.
    """
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", path.read_text(encoding="utf-8"), re.DOTALL)
    if not turns:
        raise AssetError(f"{path} holds no ChatML messages; it is not AlpacaEval's prompt")
    return [(role, text.strip()) for role, text in turns]
