"""Generate the responses of models to the benchmarks' prompts, in each benchmark's official output format."""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from rankbuffer_tools.batch.answers import opens_thinking, read_answers, refuse_tags
from rankbuffer_tools.batch.engines import Engine, VllmEngine, base_of, engine, load_policy_tokenizer, weights_of

from .benchmark import Benchmark, OutputError, without_markers
from .config import EvaluationConfig
from .files import read_json, write_json

GENERATION = "generation.json"
"""Beside the outputs that a run generated: what it counted, and how it read the answers."""


class Missing(NamedTuple):
    """A model that has no outputs for some benchmarks, as it will be loaded."""

    label: str
    model: str
    adapter_of: str | None
    opened: bool  # its chat template opens the thinking
    benchmarks: list[Benchmark]


def missing_outputs(config: EvaluationConfig, benchmarks: Mapping[str, Benchmark]) -> list[Missing]:
    """Check all outputs that there are, whoever made them, and return which ones have to be generated.

    Raises:
        [`OutputError`]: if outputs cannot be judged.
        [`EngineError`]: if a model is not there.
    """
    found = []
    for label, model in config.labelled_models().items():  # check all models before the first one generates
        weights = check_label(config, label, model)
        missing = [
            b
            for b in benchmarks.values()
            if not has_outputs(b, config.folder(label, b.name), label, config.format_check)
        ]
        if missing:
            adapter_of = base_of(model)
            opened = opens_thinking(load_policy_tokenizer(model, adapter_of), config.template_kwargs())
            found.append(Missing(label, model, adapter_of, opened, missing))
        write_json(label_path(config, label), weights)  # after the model was found: a typo must not take the label
    return found


def generate(config: EvaluationConfig, missing: Iterable[Missing]) -> None:
    """Generate outputs.

    Raises:
        [`OutputError`], [`AnswerError`]: if outputs cannot be judged.
        [`EngineError`]: if a model cannot be loaded or served, or prompts have no response.
        [`JudgeError`]: if the model's server cannot be reached or its context is too small.
    """
    for label, model, adapter_of, opened, benchmarks in missing:
        log = Path(config.output_dir) / label / "vllm.log"
        running = config.engine_url and VllmEngine(config.engine_url, config.engine_model or model, model, config)
        # A server of the user's is not ended.
        with nullcontext(running) if running else engine(config, label, model, adapter_of, log) as responder:
            for benchmark in benchmarks:
                folder = config.folder(label, benchmark.name)
                respond(responder, benchmark, folder, label, opened, config)


def respond(
    responder: Engine, benchmark: Benchmark, folder: Path, label: str, opened: bool, config: EvaluationConfig
) -> None:
    """Generate the outputs of one model for one benchmark. For `opened` see [`read_answers`]."""
    what = f"{benchmark.title}: responses of {label}"
    responses = responder.respond(benchmark.prompts(), folder / "responses.jsonl", what)
    answers = read_answers(responses.values, opened, what, config.format_check)
    plain = {id: without_markers(answer) for id, answer in answers.items()}  # markers would change the judge's prompt
    benchmark.write_outputs(folder, label, plain)
    benchmark.read_outputs(folder, label)  # checks them before anything else is generated
    facts: dict[str, Any] = {
        "responses": len(answers),
        "empty": sum(not answer for answer in answers.values()),
        "cut off at max_new_tokens": len(responses.cut_at(config.max_new_tokens)),
        "with chat markers, which were broken up": sum(plain[id] != answer for id, answer in answers.items()),
    }
    write_json(folder / GENERATION, facts | {"format_check": config.format_check})
    print(f"{what}: " + ", ".join(f"{count:,} {name}" for name, count in facts.items()))


def label_path(config: EvaluationConfig, label: str) -> Path:
    """Return the file that records the model of a label."""
    return Path(config.output_dir) / label / "model.json"


def check_label(config: EvaluationConfig, label: str, model: str) -> dict[str, Any]:
    """Check that a label is free for a model with its present weights, and return both as [`label_path`] records them.

    Raises:
        [`OutputError`]: if the label has outputs of another model, or its record is damaged.
    """
    path = label_path(config, label)
    mine = {"model": model, "weights": weights_of(model)}
    theirs = read_json(path) if path.exists() else mine
    if not (isinstance(theirs, dict) and isinstance(theirs.get("model"), str)):
        raise OutputError(
            f"{path} does not say which model has the label {label!r}: delete it to use the outputs beside it for"
            f" {model!r}"
        )
    if theirs != mine:  # other weights' outputs would count as the model's own
        changed = f"is now {model!r}" if theirs["model"] != model else "has other weights now"
        raise OutputError(
            f"{path.parent} holds outputs of {theirs['model']!r}, and the model {label!r} {changed}. Give it another"
            f" label, such as {label}-2={model}, or delete {path} to use these outputs for it"
        )
    return mine


def has_outputs(benchmark: Benchmark, folder: Path, label: str, check: str | None = None) -> bool:
    """Return whether there are outputs, and check them. `check` is the setting `format_check`.

    Raises:
        [`OutputError`], [`AnswerError`]: if they cannot be judged, or were read from their responses in another way.
    """
    try:
        outputs = benchmark.read_outputs(folder, label)
    except FileNotFoundError:
        return False
    if not (folder / GENERATION).exists():  # those that we generated were read by `read_answers`
        refuse_tags(outputs, f"{folder}: outputs from elsewhere", check)
    elif (theirs := read_json(folder / GENERATION).get("format_check")) != check:
        raise OutputError(
            f"{folder} holds outputs that were read with format_check={theirs!r}, and it is now {check!r}. Choose"
            " another output_dir"
        )
    return True
