"""The model card of a run: `card.md`, filled in from settings and store.

The card goes to the Hub, so it names no folder and no address: of a local path it shows the last part.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from huggingface_hub import ModelCard, ModelCardData
from transformers import TrainerState

from .. import __version__
from ..buffer import SOURCES
from ..rewards._method import RewardMethod
from ..store import BufferStore, history
from . import progress
from ._buffer_sizes import buffer_size_table
from ._buffer_table import TABLE_FILE
from ._card_template import Markdown, fill_card, on_hub
from .progress import duel_of

MODEL_CARD_TEMPLATE = Path(__file__).with_name("model_card.md")
PAPER = {
    "title": "RankBuffer: Efficient Ranking-Based Rewards for Open-Ended Generation",
    "citation": (
        "@inproceedings{yang2027rankbuffer,\n"
        "    title  = {{RankBuffer: Efficient Ranking-Based Rewards for Open-Ended Generation}},\n"
        "    author = {Zixuan Yang and Yiqun Chen and Qi Liu and Wei Yang and Erhan Zhang and Liyi Chen"
        " and Qimeng Wang and Yan Gao and Jiaxin Mao},\n"
        "    year   = 2027,\n"
        "    note   = {Under review at ICLR 2027},\n"
        "}"
    ),
}
VERSIONS = ("trl", "transformers", "torch", "datasets")


@dataclass(frozen=True)
class CardFacts:
    """The facts of a run that the card shows and that the store does not hold."""

    settings: Mapping[str, Any]  # in types that JSON has
    state: TrainerState
    method: RewardMethod
    queries: int  # of the training set
    base_model: str  # an id on the Hub, or a path
    peft: bool  # whether the policy is saved as an adapter
    tags: list[str]
    repo_id: str | None = None  # if it is known
    dataset_name: str | None = None  # an id on the Hub, or a path

    @classmethod
    def of(cls, trainer: Any, dataset_name: str | None, tags: Sequence[str] = ()) -> "CardFacts":
        return cls(
            settings=trainer.args.to_dict(),
            state=trainer.state,
            method=trainer.run_state.plan.method,
            queries=len(trainer.run_state.plan.queries),
            base_model=trainer.model.config.name_or_path,
            peft=is_peft_model(trainer.model),
            tags=[*trainer._tag_names, *tags],  # those that TRL's own card has
            repo_id=trainer.hub_model_id,
            dataset_name=dataset_name,
        )


def write_model_card(folder: Path, store: BufferStore, facts: CardFacts) -> None:
    """Write `README.md` into `folder`. It reads every buffer, so it is meant for pushes."""
    given, state, base, data = facts.settings, facts.state, facts.base_model, facts.dataset_name
    name = (given["hub_model_id"] or folder.absolute().name).rpartition("/")[2]  # `folder` may be "."
    checkpoints = {"checkpoint": "last-checkpoint", "all_checkpoints": f"checkpoint-{state.global_step}"}
    pushed = given["push_to_hub"] and given["save_strategy"] != "no"  # else the repository has no checkpoint
    card = fill_card(
        MODEL_CARD_TEMPLATE,
        ModelCardData(
            base_model=base if on_hub(base) else None,
            datasets=data if on_hub(data) else None,
            library_name="peft" if facts.peft else "transformers",
            pipeline_tag="text-generation",
            model_name=name,
            tags=sorted({"generated_from_trainer", *facts.tags}),
        ),
        model_name=name,
        base_model=base if on_hub(base) else None,
        repo_id=Markdown(re.sub(r"[^\w./-]+", "-", facts.repo_id or given["hub_model_id"] or name)),  # it is in code
        peft=facts.peft,
        given=given,
        method_args=", ".join(f"{key}: {value}" for key, value in asdict(facts.method).items()),
        dataset=data,
        queries=f"{facts.queries:,}",
        references=facts.method.responses_needed,
        judge=given.get("judge_client") or given["judge_model"],
        step=state.global_step,
        steps=state.max_steps,
        epoch=f"{state.epoch or 0:g}"[:5],
        epochs=f"{state.num_train_epochs:g}",
        checkpoint=checkpoints.get(given["hub_strategy"]) if pushed else None,
        paper_title=PAPER["title"],
        citation=Markdown(PAPER["citation"]),
        versions=[("rankbuffer-trl", __version__), *((package, version(package)) for package in VERSIONS)],
        duel=duel_of(folder, store),
        **judging(store),
        **describe_buffers(store),
    )
    ModelCard(card).save(folder / "README.md")


def judging(store: BufferStore) -> dict[str, Any]:
    totals = history.totals(store)
    costs = [
        (epoch, f"{sums.calls:,}", f"{sums.tokens:,}") for epoch, sums in history.totals_by(store, "epoch").items()
    ]
    counts = ("calls", "tokens", "failures", "attempts")
    return {"costs": costs, "totals": {name: f"{getattr(totals, name):,}" for name in counts}}


def describe_buffers(store: BufferStore) -> dict[str, Any]:
    growth = buffer_size_table(store)
    since_last = progress.since_last_visit(progress.visits_by_query(store))
    return {
        "buffers": growth,
        "sources": [source for source in SOURCES if any(row[source] for row in growth)],  # no method uses all of them
        "compared": [(epoch, str(found)) for epoch, found in since_last.items()],
        "table": TABLE_FILE,
    }
