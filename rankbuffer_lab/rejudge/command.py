"""The command `rankbuffer-rejudge`: judge the stored rollouts of a run again, after an estimate of the cost.

    rankbuffer-rejudge --run_dir runs/mine --dataset_name data/mine.jsonl --judge_url URL --judge_model NAME
    rankbuffer-rejudge --run_dir runs/mine --dataset_name data/mine.jsonl --mode duel --dry_run true
    rankbuffer-rejudge --config judge.yaml --run_dir runs/mine --mode watch --reader '{"judge_url": URL, ...}'

The first line replays recorded groups with another judge. The second one prints the price of duels. The third one lets
a reader watch a run whose data set and judge are in a file.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from rankbuffer_trl.data import recipe
from rankbuffer_trl.data.output import beside
from rankbuffer_trl.data.queries import QueryTable, load_queries
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.files import replacing
from rankbuffer_trl.judge import Totals, ask_many
from rankbuffer_trl.judge.config import JudgeConfig, read_object
from rankbuffer_trl.judge.endpoint import Endpoint
from rankbuffer_trl.judge.reach import estimate_tokens
from rankbuffer_trl.rewards.method import RewardMethod, load_method
from rankbuffer_trl.settings import check_at_least, documented
from rankbuffer_trl.store import numbers
from rankbuffer_trl.store.places import DUEL, report_folder

from ..report.runs import Run, open_runs
from .duel import draw, questions_of, read_answers
from .evidence import WATCH
from .replay import Visits, check_failures, measure, price_of, read_visits, replay
from .watch import named, watch


@documented
@dataclass
class RejudgeConfig(JudgeConfig):
    r"""
    Configuration of a second judgment.

    It adds the parameters below to those of [`JudgeConfig`].

    Parameters:
        run_dir (`str`):
            Output folder of a run, one of its checkpoints, or a store file.
        dataset_name (`str`):
            The run's data set, for prompts, rubrics and references. A file with other rubrics replays with these.
        dataset_config (`str`, *optional*):
            Configuration of a data set on the Hub.
        dataset_train_split (`str`, *optional*, defaults to `"train"`):
            Split of the data set.
        mode (`str`, *optional*, defaults to `"replay"`):
            `"replay"` scores recorded groups again. `"duel"` compares responses of the first and the last epoch.
            `"watch"` lets a reader compare old and new responses while the run trains.
        sample (`int`, *optional*, defaults to `50`):
            Number of queries to replay, drawn at random.
        epochs (`int`, *optional*):
            Number of epochs to replay, from the first one. Default: all.
        method (`str`, *optional*):
            Reward method of the replay. Default: that of the run, with its arguments.
        method_args (`dict`, *optional*):
            Arguments of the method, as JSON on the command line. If the method is the run's, they change its own.
        duels (`int`, *optional*, defaults to `200`):
            Number of duels. Each takes two questions.
        probabilities (`bool`, *optional*, defaults to `False`):
            In duels and a watch, let the probabilities of both orders together name the winner, and not the words. For
            a judge that often names the response that is shown first. Its server must give `top_logprobs`.
        control (`int`, *optional*, defaults to `200`):
            Number of first-epoch responses that are inserted again into their own buffer. 0 is no control.
        reader (`dict`, *optional*):
            Settings of the reader of a watch (`judge_url`, `judge_model` and so on), as JSON on the command line. The
            settings outside it name the judge of the run. Default: the judge of the run.
        reader_rubrics (`bool`, *optional*, defaults to `True`):
            Show the rubrics of a query to the reader. With `False` it sees the same general rubrics for all queries.
        reader_share (`float`, *optional*, defaults to `0.02`):
            What a watch may take, both judges together, as a share of the judge's tokens in the run so far.
        tolerance (`float`, *optional*, defaults to `0.1`):
            By how much the judge's share of pairs that the new response wins may exceed the reader's, in 0..1.
        false_alarm_rate (`float`, *optional*, defaults to `0.05`):
            Probability of a false alarm over the whole run, at most.
        output (`str`, *optional*):
            JSON file of the result. Default: `rejudge.json`, `duel.json` or `watch.json` in `_report` in the run's
            folder.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the queries and responses drawn.
        dry_run (`bool`, *optional*, defaults to `False`):
            Print the estimated cost and ask nothing.
    """

    run_dir: str = ""
    dataset_name: str = ""
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    mode: Literal["replay", "duel", "watch"] = "replay"
    sample: int = 50
    epochs: int | None = None
    method: str | None = None
    method_args: dict | str | None = None
    duels: int = 200
    probabilities: bool = False
    control: int = 200
    reader: dict | str | None = None
    reader_rubrics: bool = True
    reader_share: float = 0.02
    tolerance: float = 0.1
    false_alarm_rate: float = 0.05
    output: str | None = None
    seed: int = 0
    dry_run: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.method_args = read_object("method_args", self.method_args)
        if not self.run_dir:
            raise SettingsError("run_dir is not set: name the output folder of a run, a checkpoint, or a store file")
        if not self.dataset_name:
            raise SettingsError("dataset_name is not set: name the data set of the run, for prompts and rubrics")
        check_at_least(self, sample=1, epochs=1, duels=1, control=0, tolerance=0)
        for name in ("reader_share", "tolerance", "false_alarm_rate"):
            if not 0 < (value := getattr(self, name)) < 1 and (name, value) != ("tolerance", 0):
                raise SettingsError(f"{name} is a share between 0 and 1, got {value}")
        reader = self.judges()["reader"]
        if not (self.reader_rubrics or reader.judge_url or reader.judge_client):
            raise SettingsError("reader_rubrics is false, but the embedded judge reads nothing else: name a reader")

    @property
    def result(self) -> Path:
        """The file of the result."""
        name = {"duel": DUEL, "watch": WATCH, "replay": "rejudge.json"}[self.mode]
        return Path(self.output) if self.output else report_folder(Path(self.run_dir)) / name

    @property
    def log(self) -> Path:
        """The file of the answers."""
        return beside(self.result, "answers.jsonl")

    @property
    def named(self) -> str:
        """The name of the judge, without an address."""
        return named(self)

    def judges(self) -> dict[str, JudgeConfig]:
        """Return the judge of the run and the reader of a watch, by these names.

        Raises:
            [`SettingsError`]: if `reader` is not a mapping of settings of a judge.
        """
        own = {each.name: getattr(self, each.name) for each in fields(JudgeConfig)}
        other = read_object("reader", self.reader)
        if unknown := sorted(set(other or ()) - own.keys()):
            raise SettingsError(f"reader has no setting {unknown[0]!r}; it has {', '.join(own)}")
        try:
            return {"judge": JudgeConfig(**own), "reader": JudgeConfig(**(own if other is None else other))}
        except SettingsError as error:
            raise SettingsError(f"reader: {error}") from None

    def queries(self, responses_needed: int = 0) -> QueryTable:
        """Load the data set."""
        rows = load_queries(self.dataset_name, self.dataset_config, self.dataset_train_split)
        return QueryTable(rows, responses_needed)

    def reward_method(self, manifest: Mapping[str, Any]) -> tuple[str, RewardMethod]:
        """Return the method of the replay and its name in a recipe.

        Raises:
            [`SettingsError`]: if neither the settings nor the run's manifest name one, or if the manifest alone names
                code outside this package: the run may be a stranger's.
        """
        arguments = read_object("method_args", self.method_args) or {}
        name = self.method or manifest.get("method")
        if name is None:
            raise SettingsError(
                f"{self.run_dir} has no checkpoint that names its reward method: set method and method_args"
            )
        if self.method is None and "." in str(name):
            raise SettingsError(
                f"{self.run_dir} names the reward method {name!r}, which may be a stranger's code: if you trust it,"
                f" add --method {name} to import and execute it"
            )
        if name == manifest.get("method"):
            arguments = manifest.get("method_args", {}) | arguments
        return name, load_method(name, arguments, manifest.get("config", {}).get("seed", self.seed))


def rejudge(config: RejudgeConfig) -> int:
    """Print the price, ask, and write the result. Return the exit code.

    Raises:
        [`RankBufferError`]: for all that the user can mend.
    """
    if config.mode == "watch":
        return watch(config)
    with open_runs([config.run_dir]) as (run,):
        check_rubrics(run)
        found = duel(config, run) if config.mode == "duel" else replay_run(config, run)
    if found is None:
        return 0
    with replacing(config.result) as draft:
        draft.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    print(f"Numbers: {config.result}. Answers: {beside(config.result, 'answers.jsonl')}.")
    return 0


def replay_run(config: RejudgeConfig, run: Run) -> dict[str, Any] | None:
    """Replay a run and print the comparison with the recorded rewards. Return it, `None` after a dry run."""
    name, method = config.reward_method(run.manifest)
    queries = config.queries(method.responses_needed)
    settings = run.manifest.get("config", {})
    visits = read_visits(run.store, queries, config.sample, config.epochs, config.seed)
    recorded = recorded_totals(run, visits)
    same_method = name == run.manifest.get("method")
    judge = config.judge()
    groups = sum(map(len, visits.values()))
    known = recorded if same_method else Totals()
    price = price_of(visits, method, judge.guard, known)
    what = f"{groups:,} groups of {len(visits):,} queries"
    recipe.announce(config.endpoint(), what, *price, config.log, by_characters=not known.prompt_tokens)
    if config.dry_run:
        return None
    scores, calls = asyncio.run(replay(visits, method, judge, config.log, price[0][1], config.judge_max_failures))
    found: dict[str, Any] = {"run": numbers.run_id(run.store), "queries": len(visits), "groups": groups}
    found |= {"epochs": config.epochs, "seed": config.seed, "dataset": config.dataset_name}
    if config.method is None and not config.method_args:  # another method may read other columns
        found["same_data"] = queries.sha256 == run.manifest.get("data_sha256")
    prices = Endpoint(
        prompt_price=settings.get("judge_prompt_price"), completion_price=settings.get("judge_completion_price")
    )
    found["recorded"] = {key: run.manifest.get(key) for key in ("judge", "judge_guard", "method", "method_args")}
    found["recorded"] |= {"totals": recorded.as_dict(), "price": prices.price(recorded)}
    spent = Totals.of(calls)
    arguments = json.loads(json.dumps(asdict(method), default=str))
    found["replayed"] = {
        "judge": config.named, "judge_guard": judge.guard, "method": name, "method_args": arguments,
        "totals": spent.as_dict(), "price": config.endpoint().price(spent),
    }  # fmt: skip
    found["measures"] = measure(visits, scores, config.seed)
    print(*replay_lines(found), sep="\n")
    return found


def check_rubrics(run: Run) -> None:
    """Refuse a run whose visits left out rubrics, by a setting that is gone: their questions cannot be repeated."""
    if run.manifest.get("config", {}).get("rubric_dropout"):
        raise SettingsError(
            f"{run.path} was trained with rubric_dropout, which drew the rubrics of each visit: use the version"
            " of rankbuffer-trl that its run.json names"
        )


def recorded_totals(run: Run, visits: Visits) -> Totals:
    """Return what the recorded judgments of the visits cost."""
    ledger = numbers.totals_by_visit(run.store)
    steps = ((query_id, visit.row.step) for query_id, each in visits.items() for visit in each)
    return sum((ledger.get(key, Totals()) for key in steps), Totals())


def replay_lines(found: Mapping[str, Any]) -> list[str]:
    """Return what a replay found as lines."""
    lines = [
        f"{side}: judge {of['judge']}, judge_guard {of['judge_guard']}, method {of['method']} {of['method_args']}"
        for side, of in ((side, found[side]) for side in ("recorded", "replayed"))
    ]
    if not found.get("same_data", True):
        lines.append("the data set differs from that of the run")
    for name, one in found["measures"].items():
        span = "" if one["low"] is None else f" ({one['low']:.3f} to {one['high']:.3f})"
        value = "-" if one["value"] is None else f"{one['value']:.3f}"
        lines.append(f"{name.replace('_', ' '):32} {value}{span}")
    for side in ("recorded", "replayed"):
        totals = Totals(**found[side]["totals"])
        price = found[side]["price"]
        cost = "" if price is None else f", {price:,.4f}"
        lines.append(f"{side + ' judging':32} {totals.calls:,} calls, {totals.spent_tokens:,} tokens{cost}")
    return lines


def duel(config: RejudgeConfig, run: Run) -> dict[str, Any] | None:
    """Compare responses of the first and the last epoch, and print the result. Return it, `None` after a dry run."""
    queries, judge = config.queries(), config.judge()
    drawn = draw(run.store, config.duels, config.control, config.seed)
    questions = questions_of(drawn, queries, config.probabilities)
    tokens = estimate_tokens(questions.values(), judge.guard)
    what = f"{len(drawn.duels):,} duels in both orders, {len(drawn.control):,} insertions"
    recipe.announce(config.endpoint(), what, (len(questions), len(questions)), *tokens, config.log)
    if config.dry_run:
        return None
    answers = asyncio.run(ask_many(judge, questions, config.log, "asking the judge"))
    check_failures(judge, [call for call in answers.calls if call.failed], len(questions), config.judge_max_failures)
    n, won, control = read_answers(drawn, answers.values)
    first, last = drawn.epochs
    print(f"epoch {last} beats epoch {first} in {won} of {n:,} duels over {won.queries:,} queries")
    if drawn.control:
        print(f"control, {len(drawn.control):,} first-epoch responses inserted again (50 % is right): {control}")
    found: dict[str, Any] = {"run": numbers.run_id(run.store), "judge": config.named, "seed": config.seed}
    found |= {"epochs": drawn.epochs, "probabilities": config.probabilities, "duels": n, "won": asdict(won)}
    return found | {"insertions": len(drawn.control), "control": asdict(control)}


def main() -> None:
    recipe.run(RejudgeConfig, rejudge)


if __name__ == "__main__":
    main()
