"""The command `rankbuffer-rejudge`: compare stored responses of a run, after an estimate of the cost.

    rankbuffer-rejudge --run_dir runs/mine --dataset_name data/mine.jsonl --judge_url URL --judge_model NAME
    rankbuffer-rejudge --run_dir runs/mine --dataset_name data/mine.jsonl --dry_run true

The second line prints the price alone.
"""

import asyncio
import json
from dataclasses import asdict
from typing import Any

from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.files import replacing
from rankbuffer_trl.store import history

from ..batch import script as recipe
from ..batch.ask import ask_many
from ..batch.output import beside
from ..batch.server_check import estimate_tokens
from ..report.runs import Run, open_runs
from .config import RejudgeConfig
from .duel import check_failures, draw, questions_of, read_answers


def rejudge(config: RejudgeConfig) -> int:
    """Print the price, ask, and write the result. Return the exit code.

    Raises:
        [`RankBufferError`]: for all that the user can mend.
    """
    with open_runs([config.run_dir]) as (run,):
        check_rubrics(run)
        found = duel(config, run)
    if found is None:
        return 0
    with replacing(config.result) as draft:
        draft.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    print(f"Numbers: {config.result}. Answers: {beside(config.result, 'answers.jsonl')}.")
    return 0


def check_rubrics(run: Run) -> None:
    """Refuse a run whose visits left out rubrics, by a setting that is gone: their questions cannot be repeated."""
    if run.manifest.get("config", {}).get("rubric_dropout"):
        raise SettingsError(
            f"{run.path} was trained with rubric_dropout, which drew the rubrics of each visit: use the version"
            " of rankbuffer-trl that its run.json names"
        )


def duel(config: RejudgeConfig, run: Run) -> dict[str, Any] | None:
    """Compare responses of the first and the last epoch, and print the result. Return it, `None` after a dry run."""
    queries, judge = config.queries(), config.judge()
    drawn = draw(run.store, config.duels, config.control, config.seed)
    questions = questions_of(drawn, queries, config.probabilities)
    tokens = estimate_tokens(questions.values(), judge.guard, config.judge_samples)
    what = f"{len(drawn.duels):,} duels in both orders, {len(drawn.control):,} insertions"
    recipe.announce(config.endpoint, what, (len(questions), len(questions)), *tokens, config.log)
    if config.dry_run:
        return None
    answers = asyncio.run(ask_many(judge, questions, config.log, "asking the judge"))
    check_failures(
        judge, [call for call in answers.calls if call.failed], len(answers.asked), config.judge_max_failures
    )
    n, won, control = read_answers(drawn, answers.values)
    first, last = drawn.epochs
    print(f"epoch {last} beats epoch {first} in {won} of {n:,} duels over {won.queries:,} queries")
    if drawn.control:
        print(f"control, {len(drawn.control):,} first-epoch responses inserted again (50 % is right): {control}")
    found: dict[str, Any] = {"run": history.run_id(run.store), "judge": config.named, "seed": config.seed}
    found |= {"epochs": drawn.epochs, "probabilities": config.probabilities, "duels": n, "won": asdict(won)}
    return found | {"insertions": len(drawn.control), "control": asdict(control)}


def main() -> None:
    recipe.run_script(RejudgeConfig, rejudge)


if __name__ == "__main__":
    main()
