"""Responses of models to the prompts of benchmarks, in each benchmark's official output format.

    python -m evaluation.generate --config evaluation/paper.yaml

`evaluation.run` does this first by itself. Alone it needs no judge, for machines that cannot hold the model and the
judge at once.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from trl import TrlParser

from rankbuffer_trl.judge import JudgeError
from rankbuffer_trl.rewards.format import read_answer

from .benchmark import Benchmark, OutputError, without_markers
from .config import EvaluationConfig
from .engines import TransformersEngine, VllmEngine, load_tokenizer
from .files import read_json, write_json
from .serving import EngineError, base_of, vllm_server


class Engine(Protocol):
    """See [`VllmEngine`]."""

    def respond(self, prompts, log: Path, what: str) -> dict[str, str]:
        """One response per prompt, by its id."""


def generate(config: EvaluationConfig, benchmarks: Mapping[str, Benchmark]) -> None:
    """Generate whatever outputs are missing. Outputs that are there are checked, whoever made them.

    Raises:
        [`OutputError`]: if outputs cannot be judged, or prompts are left without a response.
        [`EngineError`]: if a model cannot be loaded or served.
    """
    todo = []
    for label, model in config.labelled_models().items():  # what is wrong with any is said before the first generates
        weights = check_label(config, label, model)
        missing = [b for b in benchmarks.values() if not has_outputs(b, config.folder(label, b.name), label)]
        if missing:
            adapter_of = base_of(model)
            opened = opens_thinking(load_tokenizer(model, adapter_of), config.template_kwargs())
            todo.append((label, model, adapter_of, opened, missing))
        write_json(label_path(config, label), weights)  # the model was found, so that a typo takes no label
    for label, model, adapter_of, opened, missing in todo:
        with engine(config, label, model, adapter_of) as responder:
            for benchmark in missing:
                respond(responder, benchmark, config.folder(label, benchmark.name), label, opened)


def respond(responder: Engine, benchmark: Benchmark, folder: Path, label: str, opened: bool) -> None:
    """Generate the outputs of one model for one benchmark, and say how many are empty or had markers.

    Args:
        responder (`Engine`):
            Who generates.
        benchmark (`Benchmark`):
            Whose prompts.
        folder (`Path`):
            Where the outputs go.
        label (`str`):
            The model's.
        opened (`bool`):
            Whether its responses start inside a thinking block.
    """
    what = f"{benchmark.title}: responses of {label}"
    texts = responder.respond(benchmark.prompts(), folder / "responses.jsonl", what)
    answers = read_answers(texts, opened, what)
    plain = {id: without_markers(answer) for id, answer in answers.items()}
    benchmark.write_outputs(folder, label, plain)
    benchmark.read_outputs(folder, label)
    facts = {
        "responses": len(answers),
        "empty": sum(not answer for answer in answers.values()),
        "with chat markers, which were broken up": sum(plain[id] != answer for id, answer in answers.items()),
    }
    write_json(folder / "generation.json", facts)
    print(f"{what}: " + ", ".join(f"{count:,} {name}" for name, count in facts.items()))


def label_path(config: EvaluationConfig, label: str) -> Path:
    """Where it stands whose outputs a label has."""
    return Path(config.output_dir) / label / "model.json"


def check_label(config: EvaluationConfig, label: str, model: str) -> dict[str, Any]:
    """Is a label free for a model as it is now? No outputs of another one, or of older weights, may pass for its own.

    Returns:
        `dict[str, Any]`: the model and its weights, to be written where the label is taken.

    Raises:
        [`OutputError`]: if the label has outputs of another model.
    """
    path = label_path(config, label)
    weights = sorted(file for kind in ("*.safetensors", "*.bin") for file in Path(model).glob(kind))
    mine = {"model": model, "weights": {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in weights}}
    theirs = read_json(path) if path.exists() else mine
    if theirs != mine:
        changed = f"is now {model!r}" if theirs["model"] != model else "has other weights now"
        raise OutputError(
            f"{path.parent} holds outputs of {theirs['model']!r}, and the model {label!r} {changed}. Give it another"
            f" label, such as {label}-2={model}, or delete {path} if these outputs are meant"
        )
    return mine


def has_outputs(benchmark: Benchmark, folder: Path, label: str) -> bool:
    """Whether outputs that can be judged are there already."""
    try:
        benchmark.read_outputs(folder, label)
    except FileNotFoundError:
        return False
    return True


@contextmanager
def engine(config: EvaluationConfig, label: str, model: str, adapter_of: str | None) -> Iterator[Engine]:
    """What generates for one model."""
    if config.engine == "transformers":
        yield TransformersEngine(model, adapter_of, config)
    elif config.engine_url:
        yield VllmEngine(config.engine_url, config.engine_model or model, model, config)
    else:
        log = Path(config.output_dir) / label / "vllm.log"
        program, arguments = config.engine_command.split(), config.engine_arguments
        with vllm_server(program, arguments, label, model, adapter_of, log) as url:
            yield VllmEngine(url, label, model, config)


def opens_thinking(tokenizer, chat_template_kwargs: Mapping[str, Any]) -> bool:
    """Whether the chat template ends its prompts with `<think>`, so that responses start inside the block."""
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}], tokenize=False, add_generation_prompt=True, **chat_template_kwargs
    )
    return rendered.rstrip().endswith("<think>")


def read_answers(texts: Mapping[str, str], opened: bool, what: str) -> dict[str, str]:
    """The answers in responses, without their thinking.

    Args:
        texts (`Mapping[str, str]`):
            Responses by prompt id.
        opened (`bool`):
            Whether they start inside a thinking block.
        what (`str`):
            Whose they are, for the message.

    Raises:
        [`OutputError`]: if every response should start inside a thinking block and none ends one.
    """
    if opened and texts and not any("</think>" in text for text in texts.values()):
        raise OutputError(
            f"{what}: the chat template opens a thinking block, and no response closes it. Does the server run with"
            " --reasoning-parser? Start it without. Or is max_new_tokens too small for a single thought?"
        )
    return {id: answer_in(text, opened) for id, text in texts.items()}


def answer_in(text: str, opened: bool) -> str:
    """What follows the thinking, or all of a text without any; empty if the thinking does not end."""
    if opened or "</think>" in text or text.lstrip().startswith("<think>"):
        return read_answer(text, "think").text
    return text.strip()


def main() -> None:
    """The command."""
    from .run import load_benchmarks

    try:
        (config,) = TrlParser((EvaluationConfig,)).parse_args_and_config()
        benchmarks = load_benchmarks(config, config.assets())
        config.claim_folder()
        generate(config, benchmarks)
    except (ValueError, EngineError, JudgeError, OSError) as error:
        sys.exit(f"evaluation: {error}")
    except KeyboardInterrupt:
        sys.exit("evaluation: interrupted. The same command goes on where it was")


if __name__ == "__main__":
    main()
