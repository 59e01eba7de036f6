"""AlpacaEval 2: each output against GPT-4 Turbo's, by the probabilities of the judge's one token.

Judging and scoring are the official library's, with its `weighted_alpaca_eval_gpt4_turbo` annotator and another judge.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankbuffer_trl.judge import Chat, JudgeError, Totals
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.judge.reach import check_servers

from ..asking import need_judge
from ..assets import Assets
from ..benchmark import BenchmarkScores, OutputError, Prompt, check_outputs, shortened
from ..files import file_name, read_json, write_json, write_text
from ..metric import Row
from . import library

WIN_RATE = "win rate"
LENGTH_CONTROLLED = "length-controlled win rate"
PILOT = 4
"""Rows that are asked before all others, to see whether the judge's tokens can be read at all."""


class AlpacaEval:
    """See [`Benchmark`]. With a `limit` there is no length-controlled win rate: its model needs all rows in order.

    Args:
        assets (`Assets`):
            Where the baseline's outputs lie.
        limit (`int`, *optional*):
            Take only the first so many instructions.
    """

    name = "alpaca_eval"
    title = "AlpacaEval 2"

    def __init__(self, assets: Assets, limit: int | None = None):
        assets.check(self.name, ("prompt", "baseline") if limit else ("prompt", "baseline", "gamed"))
        rows = read_json(assets.path(self.name, "baseline"))
        self.template = assets.path(self.name, "prompt")
        self.gamed = None if limit and limit < len(rows) else assets.path(self.name, "gamed")
        self.reference = rows[:limit]
        self.ids = {row["instruction"]: str(place) for place, row in enumerate(self.reference)}
        if len(self.ids) < len(self.reference):
            raise OutputError("alpaca_eval: the baseline has an instruction twice")

    def prompts(self) -> list[Prompt]:
        """See [`Benchmark`]."""
        return [Prompt(id, [{"role": "user", "content": instruction}]) for instruction, id in self.ids.items()]

    def outputs_path(self, folder: Path, model: str) -> Path:
        """Where a model's outputs lie, below `folder`."""
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
        rows = read_json(path)
        if not isinstance(rows, list) or any({"instruction", "output"} - set(row) for row in rows):
            raise OutputError(f"{path} must be a list of rows with `instruction` and `output`")
        found = [(self.ids.get(row["instruction"], row["instruction"][:80]), row["output"]) for row in rows]
        return check_outputs(list(self.ids.values()), found, path)

    def judge(self, folder: Path, model: str, settings: JudgeConfig) -> Totals:
        """See [`Benchmark`]. Rows whose answer has no preference are NaN, as officially, and are not asked for again.
        Those whose requests failed are."""
        judge = need_judge(settings)
        outputs = self.read_outputs(folder, model)
        candidate = [
            row | {"output": outputs[id], "generator": model} for id, row in zip(outputs, self.reference, strict=True)
        ]
        cache = folder / f"cache-{file_name(judge)}.json"
        if cache.exists():
            read_json(cache)
        else:
            asyncio.run(self._check_context(settings, candidate))
            self._pilot(settings, candidate)
        annotations = library.annotate(self.reference, candidate, settings, self.template, cache)
        import pandas

        path = folder / "annotations.json"
        # Ten digits, as in the cache: a second run then has the very same numbers.
        write_text(path, pandas.DataFrame(annotations).to_json(orient="records", indent=2) + "\n")
        return totals(read_json(path))

    async def _check_context(self, settings: JudgeConfig, candidate: Sequence[dict]) -> None:
        template = self.template.read_text(encoding="utf-8")
        chats = []
        for id, mine, theirs in zip(self.ids.values(), candidate, self.reference, strict=True):
            text = "\n".join((template, mine["instruction"], mine["output"], theirs["output"]))
            chats.append(Chat("alpaca-eval", id, [{"role": "user", "content": text}], str, {"max_tokens": 1}))
        judge = settings.judge()
        try:
            await check_servers(judge, chats)
        finally:
            await judge.client.close()

    def _pilot(self, settings: JudgeConfig, candidate: Sequence[dict]) -> None:
        """Ask a few rows whose outputs differ, and refuse a judge of whose answers none can be read."""
        pairs = zip(self.reference, candidate, strict=True)
        differ = [(theirs, mine) for theirs, mine in pairs if theirs["output"] != mine["output"]][:PILOT]
        if differ:
            theirs, mine = zip(*differ, strict=True)
            check_pilot(library.choices(theirs, mine, settings, self.template))

    def scores(self, folder: Path, model: str) -> BenchmarkScores:
        """See [`Benchmark`]."""
        import pandas

        path = folder / "annotations.json"
        rows = read_json(path)
        if [row["instruction"] for row in rows] != list(self.ids):
            raise OutputError(
                f"{path} must hold the benchmark's {len(self.ids)} instructions in official order, it has {len(rows)}"
                " rows. Delete it and run again: what was judged is cached"
            )
        frame = pandas.DataFrame(rows)
        frame["preference"] = frame["preference"].astype(float)
        if self.gamed is not None:
            official = library.length_controlled(frame, self.gamed)
        else:
            official = library.load_library().metrics.get_winrate(frame)
        preferences = dict(zip(self.ids.values(), frame["preference"], strict=True))
        metrics = {}
        if self.gamed is not None:
            glm = zip(self.ids.values(), frame["glm_preference"], strict=True)
            metrics[LENGTH_CONTROLLED] = {id: Row(100 * float(share)) for id, share in glm}
        metrics[WIN_RATE] = win_rate_rows(preferences)
        missing = [id for id, preference in preferences.items() if math.isnan(preference)]
        notes = ["The length control was fitted to GPT-4 Turbo's judgments; with another judge it is not calibrated."]
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


def win_rate_rows(preferences: Mapping[str, float | None]) -> dict[str, Row]:
    """Wins in per cent by prompt id: 0 where the baseline is better, 100 where the model is, 50 where they are equal.

    Args:
        preferences (`Mapping[str, float | None]`):
            As annotated: 1 for the baseline, 2 for the model, anything between for doubt, 1.5 or 0 for equal outputs;
            `None` or NaN where there is none.
    """
    known = {id: float(p) for id, p in preferences.items() if p is not None and not math.isnan(p)}
    return {id: Row(100 * ((preference or 1.5) - 1)) for id, preference in known.items()}


def check_pilot(choices: Sequence[Mapping[str, Any]]) -> None:
    """Can the judge's first tokens be read?

    Raises:
        [`JudgeError`]: if there are none, or not a single one can, naming what came instead.
    """
    if not any("logprobs" in choice for choice in choices):
        raise JudgeError(
            f"the judge answered none of {len(choices)} questions, because of a rate limit as a rule; nothing else was"
            " asked. Run the same command again later"
        )
    first = [((choice.get("logprobs") or {}).get("content") or [{}])[0].get("top_logprobs") for choice in choices]
    if not any(first):
        raise JudgeError(
            "the judge returns no logprobs, and AlpacaEval's verdict is nothing else. Use a server that gives"
            " `top_logprobs` for chats, such as vLLM; nothing else was asked"
        )
    if not any(each["token"] in ("m", "M") for top in first for each in top or ()):
        tokens = ", ".join(sorted({repr(choice.get("text", "")) for choice in choices}))
        raise JudgeError(
            f"the judge's first token should be m or M, and among its five likeliest neither is: it said {tokens}. A"
            " thinking judge begins with its thoughts: switch them off, such as with judge_request:"
            ' {"chat_template_kwargs": {"enable_thinking": false}}; nothing else was asked'
        )


def totals(annotations: Sequence[Mapping[str, Any]]) -> Totals:
    """What the annotations cost, those of earlier runs too.

    The library keeps one number of tokens per call, and nothing of calls whose answer it could not read.
    """
    answered = [row[library.RAW] for row in annotations if isinstance(row.get(library.RAW), Mapping)]
    tokens = int(sum(choice.get("total_tokens") or 0 for choice in answered))
    prompt = max(tokens - len(answered), 0)
    seconds = sum(row.get("preference_time_per_example") or 0.0 for row in annotations)
    return Totals(
        calls=len(answered),
        attempts=len(answered),
        prompt_tokens=prompt,
        completion_tokens=tokens - prompt,
        spent_prompt_tokens=prompt,
        spent_completion_tokens=tokens - prompt,
        seconds=seconds,
    )
