"""The model card of a run, with the figures it shows: `card.md`, filled in from settings and store.

It goes to the Hub, so it names neither folders nor addresses: of a local path it shows the last part.
"""

import re
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import is_peft_model
from huggingface_hub import ModelCard, ModelCardData
from transformers.trainer_utils import HubStrategy

from .. import __version__
from ..buffer import SOURCES
from ..store import BufferStore
from ..store.export import FILE
from .figures import growth_figure, quality_figure
from .history import buffers_by_epoch, costs_by_epoch, standing_by_step

if TYPE_CHECKING:
    from ..training.trainer import RankBufferTrainer

TEMPLATE = Path(__file__).with_name("card.md")
GROWTH, STANDING = "figures/buffers.png", "figures/standing.png"
VERSIONS = ("trl", "transformers", "torch", "datasets")


def write_card(trainer: "RankBufferTrainer", dataset_name: str | None = None, tags: list[str] | None = None) -> None:
    """Write `README.md` and its figures into the run's folder. Reads every buffer, so it is meant for pushes.

    Args:
        trainer ([`RankBufferTrainer`]):
            The run. Main process only.
        dataset_name (`str`, *optional*):
            The data set: its id on the Hub, or a path.
        tags (`list[str]`, *optional*):
            Tags beside the trainer's own.
    """
    args, store = trainer.args, trainer.rank_reward.scorer.store
    folder = Path(args.output_dir)
    base = trainer.model.config.name_or_path
    peft = is_peft_model(trainer.model)
    name = (args.hub_model_id or folder.absolute().name).rpartition("/")[2]
    checkpoint = {
        HubStrategy.CHECKPOINT: "last-checkpoint",
        HubStrategy.ALL_CHECKPOINTS: f"checkpoint-{trainer.state.global_step}",
    }.get(HubStrategy(args.hub_strategy))
    data = ModelCardData(
        base_model=base if on_hub(base) else None,
        datasets=dataset_name if on_hub(dataset_name) else None,
        library_name="peft" if peft else "transformers",
        pipeline_tag="text-generation",
        model_name=name,
        tags=sorted({"generated_from_trainer", *trainer._tag_names, *(tags or [])}),
    )
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        model_name=name,
        base_model=base if on_hub(base) else None,
        repo_id=trainer.hub_model_id or args.hub_model_id or name,
        peft=peft,
        method=args.method,
        step=trainer.state.global_step,
        steps=trainer.state.max_steps,
        epoch=f"{trainer.state.epoch or 0:g}"[:5],
        epochs=f"{trainer.state.num_train_epochs:g}",
        settings=settings(trainer, dataset_name),
        checkpoint=checkpoint if args.push_to_hub and args.save_strategy != "no" else None,
        paper_title=trainer._paper["title"],
        citation=trainer._paper["citation"],
        versions=[("rankbuffer-trl", __version__), *((package, version(package)) for package in VERSIONS)],
        **judging(store),
        **buffers(store, folder),
    )
    card.save(folder / "README.md")


def settings(trainer: "RankBufferTrainer", dataset_name: str | None) -> list[tuple[str, str]]:
    """What the run does, as rows of the card's table."""
    args, method = trainer.args, trainer.rank_reward.method
    given = ", ".join(f"{key}: {value}" for key, value in asdict(method).items())
    judge = public(args.judge_model) if args.judge_model else "the embedded rubric judge"
    quoted = "quoted" if args.judge_guard else "not quoted"
    rows = [
        ("method", f"`{args.method}`" + (f" ({given})" if given else "")),
        ("data", f"{public(dataset_name) + ', ' if dataset_name else ''}{len(trainer._train_queries):,} queries"),
        ("judge", f"{judge}; verdicts by `judge_decoding: {args.judge_decoding}`, responses {quoted} in prompts"),
        ("rollouts", f"{args.num_generations} a query, up to {args.max_completion_length} tokens"),
        ("sampling", f"temperature {args.temperature:g}, top-p {args.top_p:g}, top-k {args.top_k}"),
        ("format", f"`{args.format_check}`, weight {args.format_weight:g}"),
        ("batch", f"{args.generation_batch_size // args.num_generations} queries a generation"),
        ("objective", f"`{args.loss_type}`, rewards scaled by `{args.scale_rewards}`, beta {args.beta:g}"),
        ("learning rate", f"{args.learning_rate:g}, {args.lr_scheduler_type.value}"),
    ]
    if method.responses_needed:
        rows.insert(2, ("references", f"at least {method.responses_needed} responses a query, from worst to best"))
    return rows


def judging(store: BufferStore) -> dict[str, Any]:
    """What the card says of the judge's cost."""
    totals = store.totals()
    costs = [(epoch, f"{calls:,}", f"{tokens:,}") for epoch, (calls, tokens) in costs_by_epoch(store).items()]
    counts = ("calls", "tokens", "failures", "attempts")
    return {"costs": costs, "totals": {name: f"{getattr(totals, name):,}" for name in counts}}


def buffers(store: BufferStore, folder: Path) -> dict[str, Any]:
    """What the card says of the buffers; draws the figures."""
    epochs, standing = buffers_by_epoch(store), standing_by_step(store)
    if epochs:
        growth_figure(folder / GROWTH, epochs)
    if standing:
        window = max(1, min(10, len(standing) // 4))
        quality_figure(folder / STANDING, standing, "standing among the anchors", window)
    return {
        "buffers": epochs,
        "sources": [source for source in SOURCES if any(entry.sources[source] for entry in epochs)],
        "growth": GROWTH,
        "standing": STANDING if standing else None,
        "table": FILE,
    }


def on_hub(name: str | None) -> bool:
    """Whether a name looks like an id on the Hub, and is no path here."""
    return name is not None and re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()


def public(name: str) -> str:
    """A name as it may be published: an id as it is, of a path the last part."""
    return name if on_hub(name) else Path(name).name
