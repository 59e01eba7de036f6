"""Validate AlpacaEval 2 with published annotations, published weights and published fits."""

import csv
import math
from collections.abc import Iterator

import numpy as np

from evaluation.alpaca_eval.length_control import length_controlled
from evaluation.alpaca_eval.scores import is_switched, read_preference, win_rate_rows
from evaluation.assets import AssetError, Assets
from evaluation.files import read_json
from evaluation.metric import weighted_mean

from .comparison import Check, worst

JUDGE = "weighted_alpaca_eval_gpt4_turbo"
WEIGHTS = ("instruction_difficulty", "not_gamed_baseline.astype(float)")
EXACT = 1e-6
FIT = 0.05
REFITTED = ("claude-2.1", "FuseChat-Qwen-2.5-7B-Instruct")
FEWEST = 20


def alpaca_eval_checks(assets: Assets) -> Iterator[Check]:
    """Yield all comparisons. Those that need the fewest files come first.

    Raises:
        [`AssetError`]: if an official file is missing or wrong, or too few annotations are there.
    """
    assets.check("alpaca_eval", ("leaderboard", "weights", "vicuna"))
    with assets.path("alpaca_eval", "leaderboard").open(encoding="utf-8") as lines:
        board = {row[""]: row for row in csv.DictReader(lines)}
    yield from raw_checks(assets, board)
    yield from prediction_checks(assets, board)
    yield from fit_checks(assets, board)


def raw_checks(assets: Assets, board: dict[str, dict]) -> Iterator[Check]:
    """Compare preferences and raw win rate of every model whose annotations are there.

    Preferences are read from the log probabilities that the annotations hold, of the judge's own answers.
    """
    found = {}
    read: dict[str, tuple[float, float]] = {}
    for path in sorted((assets.folder / "alpaca_eval" / "results").glob(f"*/{JUDGE}/annotations.json")):
        model = path.parent.parent.name
        if model in board:
            rows = read_json(path)
            preferences = {str(place): row["preference"] for place, row in enumerate(rows)}
            found[model] = (weighted_mean(win_rate_rows(preferences)), float(board[model]["win_rate"]))
            for place, row in enumerate(rows):
                answer = row.get("raw_completion")
                if isinstance(answer, dict) and "logprobs" in answer:
                    ours = read_preference(answer["logprobs"], is_switched(row["instruction"]))
                    read[f"{model} {place}"] = (ours or math.nan, row["preference"])
    if len(found) < FEWEST:
        raise AssetError(f"only {len(found)} models with annotations below {assets.folder}; is it a whole checkout?")
    for model, pair in found.items():
        yield Check(f"win rate of {model}", *pair, EXACT)
    yield worst("win rate", found, EXACT)
    if read:
        yield worst("preference from the judge's log probabilities", read, EXACT)


def prediction_checks(assets: Assets, board: dict[str, dict]) -> Iterator[Check]:
    """Compare the length-controlled win rate of every model, computed from its published weights.

    The difficulty of the instructions is published on the Hub only. Here it is derived from the published predictions
    and weights of one model.
    """
    with assets.path("alpaca_eval", "weights").open(encoding="utf-8") as lines:
        weights = {row[""]: [float(row[name]) for name in WEIGHTS] for row in csv.DictReader(lines)}
    slope, level = weights["vicuna-7b-v1.5"]
    shares = np.array([row["glm_preference"] for row in read_json(assets.path("alpaca_eval", "vicuna"))])
    difficulty = (np.log(shares / (1 - shares)) - level) / slope
    found = {
        model: (predicted(slope, level, difficulty), float(board[model]["length_controlled_winrate"]))
        for model, (slope, level) in weights.items()
        if model in board
    }
    agree = {model: pair for model, pair in found.items() if abs(pair[0] - pair[1]) <= EXACT}
    yield Check(
        "models whose weights give their length-controlled win rate; ten published rows do not",
        len(agree),
        len(found),
        10,
    )
    yield worst("length-controlled win rate of these, from weights", agree, EXACT)


def predicted(slope: float, level: float, difficulty: np.ndarray) -> float:
    """Return the percentage of wins of a model if all outputs had equal length."""
    return float(100 * np.mean(1 / (1 + np.exp(-(slope * difficulty + level)))))


def fit_checks(assets: Assets, board: dict[str, dict]) -> Iterator[Check]:
    """Compare the length-controlled win rate of two models, fitted again.

    Raises:
        [`AssetError`]: if the Hub's file that the fit needs is missing.
    """
    import pandas

    gamed = assets.path("alpaca_eval", "gamed")
    for model in REFITTED:
        path = assets.folder / "alpaca_eval" / "results" / model / JUDGE / "annotations.json"
        metrics = length_controlled(pandas.DataFrame(read_json(path)), gamed)
        score = float(board[model]["length_controlled_winrate"])
        yield Check(f"length-controlled win rate of {model}, fitted", metrics["length_controlled_winrate"], score, FIT)
