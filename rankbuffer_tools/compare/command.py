"""The command `rankbuffer-compare`: which of two policies does the judge prefer?

    rankbuffer-compare --run_dir runs/a --dataset_name data/apart.jsonl --models before=Qwen/Qwen3-8B after=runs/a
    rankbuffer-compare --run_dir runs/a --dataset_name data/a.jsonl

The first line samples answers of two policies, the second one takes stored answers of two epochs. The judge sees each
pair in both orders. It is the judge of the run, and `--judge_url` says where it is served. With `--dry_run true` the
command prints the price alone. Answers and judgments are kept, so the same command continues after a kill.
"""

import asyncio
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rankbuffer_trl.data import QueryTable, load_queries
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.files import write_whole
from rankbuffer_trl.groups import Query
from rankbuffer_trl.judge import JudgeError, Question, Reading, Totals, explain
from rankbuffer_trl.store import FOLDER, STORE_FILE, StoreError, history, read_store

from ..batch import script
from ..batch.ask import PILOT, ask_many
from ..batch.server_check import estimate_tokens
from ..report.runs import Run, open_runs, place_of_store
from .config import CompareConfig, CompareParser
from .duel import Duels, draw, duel_score, measures_of, questions_of

COLUMN_WIDTH = 56
MUCH = 0.2  # a change of a share that a reader should look at
SIGNS = {  # of answers, each with the sign of a change for the worse
    "ended": (-1, "answers end before the limit"),
    "answered": (-1, "answers pass the format check"),
    "repeated_4_grams": (1, "4-grams are repeats"),
    "commonest_word": (1, "words are the commonest one of their answer"),
}
FIRST = ("I do not know.", "Let me explain step by step.")  # answers to ask about before there are any


def compare(config: CompareConfig) -> int:
    """Print the price, sample if there are models, show answers, ask, and write the result. Return the exit code.

    Raises:
        [`RankBufferError`]: for all that the user can mend.
    """
    queries = QueryTable(load_queries(config.dataset_name, config.dataset_config, config.dataset_train_split))
    result: dict[str, Any] = {"judge": config.named, "seed": config.seed, "probabilities": bool(config.probabilities)}
    if config.models:
        from . import policies  # here, since stored answers need no engine

        if config.run_dir:  # another folder would have given other settings of judge and sampling
            place_of_store(Path(config.run_dir))
        result |= {"models": config.labelled_models(), "dataset": config.dataset_name}
        prompts = policies.prompts_of(config, queries)
        duels = policies.longest(config, prompts)
        result["run"] = seen_in_training(config, queries, result["models"].values())
    else:
        with open_runs([str(config.run_dir)]) as (run,):
            check_rubrics(run)
            epochs, duels = draw(run.store, config.duels, config.epochs, config.seed)
            result |= {"run": history.run_id(run.store), "epochs": epochs}
    how = (queries, bool(config.probabilities), config.no_rubrics)
    questions = questions_of(duels, *how)
    tokens = estimate_tokens(questions.values(), config.judge_guard, config.judge_samples)
    most = f" of at most {config.max_new_tokens:,} tokens" if config.models else ""
    what = f"{len(duels.pairs):,} duels between answers{most}, each in both orders, by {config.named}"
    script.announce(config.endpoint, what, (len(questions), len(questions)), *tokens, config.log)
    if config.models:
        check_same_comparison(config, result)  # after the price, which a dry run is for
    if config.dry_run:  # the price is said, and nothing asked
        return 0
    if config.models:
        policies.check_policies(config)
        # Some questions before hours of sampling: one alone may be refused for its query.
        first = questions_of(Duels((), {f"first {id}": (id, *FIRST) for id in queries.ids[:PILOT]}), *how)
        ask(config, dict([*first.items()][::2]))  # each in one order
        duels = policies.sample_answers(config, queries, prompts)
        questions = questions_of(duels, *how)
    examples: dict[str, list[str]] = {}
    for id, *pair in duels.pairs.values():
        examples.setdefault(id, pair)  # the first pair of a query, whichever is better
    for id in list(examples)[: config.show]:
        print(side_by_side(queries[id], duels.labels, examples[id]))
    verdicts = ask(config, questions)
    result |= {"measures": measures_of(duels), **duel_score(duels.pairs, verdicts)}
    print("", *lines_of(result), sep="\n")
    stored = {
        name: verdict.as_dict() if isinstance(verdict, Reading) else verdict for name, verdict in verdicts.items()
    }
    result |= {"answers": duels.pairs, "verdicts": stored}  # from which `duel_score` counts again
    write_whole(config.result, json.dumps(result, indent=2, allow_nan=False, default=asdict) + "\n")
    print(f"Numbers: {config.result}. Judgments: {config.log}.")
    return 0


def check_same_comparison(config: CompareConfig, planned: Mapping[str, Any]) -> None:
    """Refuse to write over the result of other policies or prompts, which may be the only proof of a training."""
    old: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # there is none, or it cannot be read
        old = json.loads(config.result.read_text(encoding="utf-8"))
    if not isinstance(old, dict) or "models" not in old:
        return
    if any(resolved(old.get(name, planned[name])) != resolved(planned[name]) for name in ("models", "dataset")):
        models = " ".join(f"{label}={model}" for label, model in old["models"].items())
        raise SettingsError(
            f"{config.result} holds the comparison of {models} on {old.get('dataset', 'other prompts')}: name another"
            " file with --output, or delete that one"
        )


def resolved(names: Any) -> Any:
    """Return names of policies or data in the one form that two spellings of a path share."""
    if isinstance(names, Mapping):
        return {label: resolved(name) for label, name in names.items()}
    return str(Path(names).resolve()) if Path(names).exists() else names


def seen_in_training(config: CompareConfig, queries: QueryTable, models: Iterable[str]) -> str:
    """Return the id of the run if one of the policies is in its folder, and say if it was trained on these prompts."""
    home = Path(config.run_dir or "").resolve()
    own = [path for model in models if (path := Path(model).resolve()).is_relative_to(home)]
    saved = [file for path in own if (file := path / FOLDER / STORE_FILE).is_file()]
    try:
        # A later run in the same folder has a live store of its own.
        with closing(read_store([home, *saved][-1])) if config.run_dir else nullcontext() as store:
            seen = {*queries.ids} & {*history.query_ids(store)} if store else ()
            if seen:
                print(
                    f"{len(seen):,} of {len(queries.ids):,} prompts are among those that the run was trained on, so"
                    " they do not show what it does with others: compare on prompts that were kept apart"
                )
            return history.run_id(store) if store and own else ""
    except StoreError:  # a folder without a store, such as a policy's
        return ""


def check_rubrics(run: Run) -> None:
    """Refuse a run whose visits left out rubrics, by a setting that is gone: their questions cannot be repeated."""
    if run.manifest.get("config", {}).get("rubric_dropout"):
        raise SettingsError(
            f"{run.path} was trained with rubric_dropout, which drew the rubrics of each visit: use the version"
            " of rankbuffer-trl that its run.json names"
        )


def ask(config: CompareConfig, questions: Mapping[str, Question]) -> dict[str, Any]:
    """Return the verdicts of the judge, and print what they cost.

    Raises:
        [`JudgeError`]: if the judge does not answer, or too many judgments failed.
    """
    judge, most = config.judge(), config.judge_max_failures
    answers = asyncio.run(ask_many(judge, questions, config.log, "asking the judge", max_failures=most))
    if len(answers.failures) > most * len(questions):  # a duel without both verdicts is left out of the score
        failed = [call for call in answers.asked.values() if call.failed]
        raise JudgeError(
            f"the judge ({judge.client.name}) failed {len(failed)} of {len(answers.asked)} judgments, more than"
            f" judge_max_failures={most:g} allows. {explain(failed[-1])} The answers so far are kept: run the same"
            " command again to ask the others"
        )
    print(f"[price] asked: {script.cost_line(config.endpoint, Totals.of(answers.asked.values()))}")
    return answers.values


def side_by_side(query: Query, labels: Sequence[str], answers: Sequence[str]) -> str:
    """Return two answers in two columns."""
    columns = [[label, "", *textwrap.wrap(text, COLUMN_WIDTH)] for label, text in zip(labels, answers, strict=True)]
    lines = [f"{left:{COLUMN_WIDTH + 2}}{right}".rstrip() for left, right in zip_longest(*columns, fillvalue="")]
    return "\n".join([f"\n== {query.text}", "", *lines])


def lines_of(result: Mapping[str, Any]) -> list[str]:
    """Return the numbers as lines."""
    (first, before), (second, after) = result["measures"].items()
    lines = [f"{'':18} {first:>10} {second:>10}"]
    lines += [f"{name:18} {before[name]:10.3f} {after[name]:10.3f}" for name in before]
    lines += [
        f"by the {how}, {second} wins {share} of {result['duels']:,} duels with {first} over {share.queries:,} queries"
        for how, share in result["wins"].items()
    ]
    if result["mean_log_odds"] is not None:
        lines.append(f"mean log odds of {second}: {result['mean_log_odds']:+.3f}")
    lines += degenerate(result["measures"])
    lines.append(f"the answer that is shown first wins {result['first_shown_wins']:.0%} of all duels")
    if 2 * (by_place := result["by_place"]) >= (duels := result["duels"]):
        lines.append(
            f"ask a better judge: {by_place:,} of {duels:,} duels went to the answer shown first, or second, both"
            f" times, so only the other {duels - by_place:,} say anything"
        )
    return lines


def degenerate(measures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a line for what has become much worse about the second policy's answers, which a judge may not mind."""
    (first, before), (second, after) = measures.items()
    return [
        f"look at the answers of {second} before you believe that: {before[name]:.0%} of {first}'s and"
        f" {after[name]:.0%} of {second}'s {what}"
        for name, (sign, what) in SIGNS.items()
        if sign * (after.get(name, 0) - before.get(name, 0)) >= MUCH
    ]


def main() -> None:
    script.run_script(CompareConfig, compare, CompareParser)


if __name__ == "__main__":
    main()
