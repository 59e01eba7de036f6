"""What a RankBuffer run changes beside the policy: buffers, history and ledger. Checkpoints hold them with it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..checkpointing._checkpoint import publishable
from ..checkpointing._distributed import made_on_main_process
from ..judge import Judge, RubricJudge
from ..monitoring._card_template import public
from ..rewards._method import find_method
from ..settings import changed_arguments, load_path
from ..store import BufferStore
from ..store._places import SAVED
from ._config import RankBufferConfig
from ._first import first_question
from ._plan import RunPlan, check_budget
from ._reward_function import GroupReward
from ._scorer import open_scorer

# What buffers depend on: its name in a checkpoint, what it means, and where a run has it. The strings are the classes
# of the clients of judge and reference judge. The keys of settings that have left
# stay here with `None`: a checkpoint that used one cannot be resumed.
RESUME_KEYS: dict[str, tuple[str, Callable[[RunPlan, str, str | None], Any]]] = {
    "method": ("the reward method", lambda plan, *_: plan.args.method),
    "method_args": ("its arguments", lambda plan, *_: asdict(plan.method)),
    "judge": ("the judge model", lambda plan, judge, _: plan.args.judge_client or plan.args.judge_model or judge),
    "judge_args": ("the arguments of the judge client", lambda plan, *_: client_arguments(plan.args)),
    "judge_guard": ("how responses are quoted for the judge", lambda plan, *_: plan.args.judge_guard),
    "judge_samples": (
        "the answers that stand for probabilities",
        lambda plan, *_: n if (n := plan.args.judge_samples) > 1 else None,  # as before this key
    ),
    "reader": (
        "the second judge, its reference_groups, and reader_every, which is gone",
        lambda plan, _, reference_judge: reference_identity(plan.args, reference_judge),
    ),
    "format_check": ("what counts as an answer", lambda plan, *_: plan.args.format_check),
    "rubric_dropout": ("the share of rubrics that a visit leaves out", lambda *_: None),
    "judge_view": ("what the judge sees of a rollout with tools", lambda plan, *_: view(plan.args)),
    "queries": ("the number of queries", lambda plan, *_: len(plan.queries)),
    "data_sha256": ("the data, as this method reads them", lambda plan, *_: plan.queries.sha256),
    "seed": ("the seed, and with it the order of the data", lambda plan, *_: seeds(plan.args)),
    "num_generations": ("rollouts per query", lambda plan, *_: plan.args.num_generations),
    "queries_per_generation": ("queries per generation batch", lambda plan, *_: plan.args.queries_per_generation),
    "steps_per_generation": ("optimizer steps per generation batch", lambda plan, *_: plan.args.steps_in_generation),
}


class StoreState:
    """The state of a RankBuffer run, as [`RunState`] asks for it.

    Args:
        judge, reference_judge ([`Judge`], *optional*):
            As those of [`RankBufferTrainer`].
    """

    file = SAVED

    def __init__(self, plan: RunPlan, judge: Judge | None = None, reference_judge: Judge | None = None):
        self.plan = plan
        scorer = made_on_main_process(
            lambda: open_scorer(plan.args, judge, plan.method, plan.batches.ends_generation, reference_judge)
        )
        self.reward = GroupReward(plan.queries, scorer, plan.args, plan.eval_queries)
        self.names: dict[str, str | None] = {}  # of policy and data, for people
        self.steps_per_epoch = plan.batches.steps_per_epoch
        self.ends_generation = plan.batches.ends_generation
        self.wake = self.reward.leave_step

    @property
    def store(self) -> BufferStore:
        """The store of the run. Only the main process has one."""
        return self.reward.scorer.store

    def facts(self) -> dict[str, Any]:
        """Return what buffers depend on, and for people the names of policy and data and the sums of the ledger."""
        scorer = self.reward.scorer
        reference_judge = type(scorer.debiasing.reference_judge.client).__name__ if scorer.debiasing else None
        names = {key: public(name) if name else None for key, name in self.names.items()}
        totals = {phase: self.store.totals(phase).as_dict() for phase in ("train", "eval")}
        return {**names, "totals": totals, **identity(self.plan, type(scorer.judge.client).__name__, reference_judge)}

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        return differences(saved, self.facts())

    def check_start(self, saved: Path | None, step: int) -> None:
        """Refuse to start when a budget of the judge is used up."""
        if not saved or step < self.plan.batches.steps:  # a run without steps left may still save its policy
            check_budget(self.plan.args, self.plan.args.output_dir, saved)

    def start(self, saved: Path | None) -> None:
        """Take up the store of a checkpoint, or begin with an empty one. The judge first answers one real question."""
        queries, scorer = self.plan.queries, self.reward.scorer
        if saved:
            self.store.restore(saved)
            if scorer.debiasing:
                scorer.debiasing.warn_if_late(self.store)
        if not saved or self.plan.done < self.plan.batches.steps:  # at the end of a run nothing is asked
            first_question(scorer, queries[queries.ids[0]])
        if not saved:
            # At once, so that an evaluation before the first step does not see the buffers of another run.
            self.store.rewind(0)
        self.reward.restart(rewound=not saved)

    def save(self, folder: Path) -> None:
        self.store.save(folder)

    def rewind(self, step: int) -> None:
        self.store.rewind(step)

    def over_budget(self) -> str | None:
        return self.plan.args.over_budget(self.store.spent)


def identity(plan: RunPlan, judge: str = RubricJudge.__name__, reference_judge: str | None = None) -> dict[str, Any]:
    """Return what buffers depend on.

    `judge` and `reference_judge` are the classes of the clients that a program passed.
    """
    values = {key: value(plan, judge, reference_judge) for key, (_, value) in RESUME_KEYS.items()}
    return json.loads(json.dumps(values, default=str))  # as a manifest holds it, so that the two compare


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return one line for everything that a checkpoint and a run do not have in common."""
    config, classes = saved.get("config", {}), {"method_args": find_method(current["method"])}
    # An older manifest has no `judge_args`: its `judge` names the arguments too.
    if saved.get("judge_args") is None and (client := config.get("judge_client")):
        saved = {**saved, "judge": client, "judge_args": config.get("judge_client_args") or {}}
    if current.get("judge_args") is not None:
        classes["judge_args"] = load_path(current["judge"])

    def compared(run: Mapping[str, Any], key: str) -> Any:  # an argument that one does not name had its default
        value = publishable(run.get(key)) if key == "judge_args" else run.get(key)
        return changed_arguments(classes[key], value) if key in classes and isinstance(value, dict) else value

    return [
        f"{key} ({meaning}): {saved.get(key)!r} in the checkpoint, {current.get(key)!r} now"
        for key, (meaning, _) in RESUME_KEYS.items()
        if compared(saved, key) != compared(current, key)
    ]


def reference_identity(args: RankBufferConfig, reference_judge: str | None) -> list | None:
    """Return the name of the reference judge, and how many groups it reads; `None` without a reference judge."""
    settings = args.reference_config()
    if settings is None and reference_judge is None:
        return None
    named = settings and (settings.judge_client or settings.judge_model)
    return [named or reference_judge or RubricJudge.__name__, args.reference_groups, None]  # once `reader_every`


def client_arguments(args: RankBufferConfig) -> dict | str | None:
    """Return the arguments of the client that a recipe names; `None` if it names none."""
    return publishable(args.judge_client_args or {}) if args.judge_client else None  # the manifest goes to the Hub


def view(args: RankBufferConfig) -> list | None:
    """Return the view of a rollout with tools and its limit; `None` for the answer alone, as without tools."""
    return None if args.judge_view == "answer" else [args.judge_view, args.judge_view_limit]


def seeds(args: RankBufferConfig) -> int | list:
    """Return the seed, or both if the data has its own."""
    return args.seed if args.data_seed is None else [args.seed, args.data_seed]
