"""What a run and a checkpoint must have in common for the one to go on from the other."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from . import __version__
from .config import RankBufferConfig
from .data.queries import QueryTable
from .judge import Judge, Totals
from .rewards.method import RewardMethod

BINDING = {
    "method": "the reward method",
    "method_args": "its arguments",
    "judge": "the judge model",
    "judge_guard": "how responses are quoted for the judge",
    "format_check": "what counts as an answer",
    "queries": "the number of queries",
    "data_sha256": "the data",
    "seed": "the seed, and with it the order of the data",
    "num_generations": "rollouts per query",
    "queries_per_generation": "queries per generation batch",
    "steps_per_generation": "optimizer steps per generation batch",
}


def identity(args: RankBufferConfig, method: RewardMethod, judge: Judge, queries: QueryTable) -> dict[str, Any]:
    """What buffers depend on, as it stands in a checkpoint's `run.json`."""
    generation = args.steps_per_generation * args.num_iterations
    found = {
        "method": args.method,
        "method_args": dataclasses.asdict(method),
        "judge": args.judge_model or type(judge.client).__name__,
        "judge_guard": args.judge_guard,
        "format_check": args.format_check,
        "queries": len(queries),
        "data_sha256": queries.sha256,
        "seed": args.seed if args.data_seed is None else [args.seed, args.data_seed],
        "num_generations": args.num_generations,
        "queries_per_generation": args.generation_batch_size // args.num_generations,
        "steps_per_generation": generation / args.gradient_accumulation_steps,
        "processes": args.world_size,
    }
    return json.loads(json.dumps(found, default=str))


def describe(identity: Mapping[str, Any], step: int, totals: Mapping[str, Totals], args: RankBufferConfig) -> dict:
    """The contents of `run.json`: project version, identity, step, ledger totals and all settings.

    Addresses of judges and tokens for the Hub are left out, since a checkpoint may be published.
    """
    settings = {
        key: value for key, value in args.to_dict().items() if key != "judge_url" and not key.endswith("_token")
    }
    sums = {phase: total.as_dict() for phase, total in totals.items()}
    described = {"rankbuffer_trl": __version__, "step": step, **identity, "totals": sums, "config": settings}
    return json.loads(json.dumps(described, default=str))


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """One line for everything that a checkpoint and a run do not have in common."""
    return [
        f"{key} ({meaning}): {saved.get(key)!r} in the checkpoint, {current[key]!r} now"
        for key, meaning in BINDING.items()
        if saved.get(key) != current[key]
    ]
