"""The official `alpaca_eval` library, used as it is: it formats, asks, reads and fits.

It is loaded on first use, since it is an extra of its own: its pins (setuptools below 81, scikit-learn below 1.10)
need not suit an environment that only trains.
"""

import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import yaml

from rankbuffer_trl.data.recipe import set_fields
from rankbuffer_trl.judge import JudgeError
from rankbuffer_trl.judge.config import JudgeConfig

from ..asking import need_judge
from ..benchmark import shortened
from ..files import file_name, read_json, write_json

REQUEST = {"max_tokens": 1, "temperature": 1, "logprobs": True, "top_logprobs": 5}
"""As in the official `weighted_alpaca_eval_gpt4_turbo`. The logprobs of the one token are the verdict."""

RAW = "preference_raw_completion"

FAILED = 1.5
"""Stands for the preference of a row whose requests failed, until it is forgotten; the library takes 1 to 2 alone."""


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps the root logger as it is, which the library sets to INFO, and silent meanwhile: the library logs the
    tracebacks of refused requests, and a server may echo the key in them."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        root.setLevel(level)


@contextmanager
def failing(settings: JudgeConfig) -> Iterator[None]:
    """Says what it means when the library gives up."""
    from openai import OpenAIError

    key = os.environ.get(settings.judge_api_key_env)
    try:
        with quiet():
            yield
    except OpenAIError as error:
        text = str(error).replace(key, "[key]") if key else str(error)
        raise JudgeError(
            "AlpacaEval's library stops at the first request that fails for another reason than a rate limit"
            f" ({type(error).__name__}: {text[:300]}). What was judged before is kept, 128 rows at a time; run the"
            " same command again to go on"
        ) from None  # the library's error may hold the key


def load_library() -> ModuleType:
    """The library.

    Raises:
        [`JudgeError`]: if it is not installed, or another package breaks it.
    """
    try:
        with quiet():
            import alpaca_eval
            from alpaca_eval import annotators, metrics, utils  # noqa: F401
    except ImportError as error:
        raise JudgeError(
            f"AlpacaEval's library cannot be used: {error}. Install the extra `evaluation` of this project, with"
            " alpaca_eval==0.6.6, setuptools<81 and scikit-learn<1.10"
        ) from error
    return alpaca_eval


@contextmanager
def annotator(settings: JudgeConfig, template: Path, cache: Path | None) -> Iterator[Any]:
    """The library's annotator with the official request and prompt, and our judge's servers behind it.

    Args:
        settings (`JudgeConfig`):
            The judge. Of its `judge_request` all holds but what would change the one token and its logprobs.
        template (`Path`):
            The official prompt.
        cache (`Path`, *optional*):
            Where annotations are kept, 128 at a time, and found again.
    """
    if cache is not None and cache.exists():
        forget_failures(cache)
    library = load_library()
    name, urls, mine = need_judge(settings), settings.judge_url or [], set_fields(settings)
    known = {field: value for field, value in mine.items() if field in ("temperature", "top_p")}
    extra = {field: value for field, value in mine.items() if field not in (*REQUEST, *known) and value is not None}
    key = os.environ.get(settings.judge_api_key_env) or "none"
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, OPENAI_API_KEY=key),  # not in a file, which a kill would leave there
    ):
        clients, config = Path(folder, "clients.yaml"), Path(folder, "annotator", "configs.yaml")
        client = {
            "timeout": settings.judge_timeout,
            "max_retries": settings.judge_max_retries,
        }
        clients.write_text(yaml.safe_dump({"default": [client | {"base_url": url} for url in urls]}))
        completions = {
            **REQUEST,
            **known,
            "model_name": name,
            "price_per_token": (settings.judge_prompt_price or 0) / 1e6,
            "requires_chatml": True,  # a name with "instruct" in it would be taken for a completion model
            "client_config_path": str(clients),
            "num_procs": settings.judge_concurrency * len(urls),
        }
        if extra:
            completions["extra_body"] = extra
        config.parent.mkdir()
        # The cache knows the annotator by this name, so another judge's annotations are not taken for this one's.
        config.write_text(
            yaml.safe_dump(
                {
                    f"weighted_alpaca_eval_{file_name(name)}": {
                        "prompt_template": str(template),
                        "fn_completions": "openai_completions",
                        "completions_kwargs": completions,
                        "fn_completion_parser": "logprob_parser",
                        "completion_parser_kwargs": {
                            "numerator_token": "m",
                            "denominator_tokens": ["m", "M"],
                            "is_binarize": False,
                        },
                        "completion_key": "completions_all",
                        "batch_size": 1,
                    }
                }
            )
        )
        with quiet():
            made = library.annotators.PairwiseAnnotator(annotators_config=config, caching_path=cache)
        for single in made.annotators.values():
            single.fn_completion_parser = partial(parse, parser=single.fn_completion_parser)
        if made.df_annotations is not None:  # whole numbers were read as integers, which the library then chokes on
            made.df_annotations["preference"] = made.df_annotations["preference"].astype(float)
        yield made


def parse(completion: Mapping[str, Any], parser: Callable[[Mapping[str, Any]], list]) -> list:
    """What the library's parser makes of an answer; [`FAILED`] where there is none, which it would take for NaN."""
    return parser(completion) if "logprobs" in completion else [FAILED]


def in_vain(annotation: Mapping[str, Any]) -> bool:
    """Whether all requests about a row failed. The library then makes up an answer, in which `logprobs` is missing."""
    answer = annotation.get(RAW)
    return isinstance(answer, Mapping) and "logprobs" not in answer


def forget_failures(cache: Path) -> None:
    """Take rows that were asked about in vain out of the library's cache, so that they are asked about again."""
    rows = read_json(cache)
    kept = [row for row in rows if not in_vain(row)]
    if not kept:
        cache.unlink()
    elif len(kept) < len(rows):
        write_json(cache, kept)


def annotate(
    reference: Sequence[dict],
    outputs: Sequence[dict],
    settings: JudgeConfig,
    template: Path,
    cache: Path | None = None,
) -> list[dict[str, Any]]:
    """Annotations of `outputs` against `reference`: `preference` is 1 where the reference is better, 2 the output.

    Rows whose requests failed are NaN, and not in the cache.

    Raises:
        [`JudgeError`]: if the library gives up on a request, or more fail than `judge_max_failures` allows.
    """
    with failing(settings), annotator(settings, template, cache) as library:
        rows = library.annotate_head2head(outputs_1=list(reference), outputs_2=list(outputs))
    if cache is not None:
        forget_failures(cache)
    failed = [row["instruction"][:80] for row in rows if in_vain(row)]
    if len(failed) > settings.judge_max_failures * len(rows):
        raise JudgeError(
            f"AlpacaEval: {len(failed)} of {len(rows)} judgments failed, more than judge_max_failures="
            f"{settings.judge_max_failures:g} allows: the judge's rate limit, as a rule. Ask less at once with"
            " judge_concurrency. The others are kept; run the same command again to ask only what is missing."
            f" Failed: {shortened(failed)}"
        )
    return [row | {"preference": math.nan, RAW: None} if in_vain(row) else row for row in rows]


def choices(
    reference: Sequence[dict], outputs: Sequence[dict], settings: JudgeConfig, template: Path
) -> list[dict[str, Any]]:
    """The judge's raw answers about a few pairs, of which annotations keep only what could be read.

    Raises:
        [`JudgeError`]: if the library gives up on a request.
    """
    import pandas

    pairs = [
        {"instruction": a["instruction"], "output_1": a["output"], "output_2": b["output"]}
        for a, b in zip(reference, outputs, strict=True)
    ]
    with failing(settings), annotator(settings, template, None) as library:
        (single,) = library.annotators.values()
        prompts, _ = load_library().utils.make_prompts(pandas.DataFrame(pairs), single.prompt_template)
        return single.fn_completions(prompts=prompts, **single.completions_kwargs)["completions_all"]


def length_controlled(annotations, gamed: Path) -> dict[str, float]:
    """Official metrics of annotations, raw and length-controlled.

    Args:
        annotations (`pandas.DataFrame`):
            All rows in official order; gets a column `glm_preference`, in 0..1 per row.
        gamed (`Path`):
            The official `df_gamed.csv`, which the library would fetch unpinned.
    """
    import sklearn

    metrics = load_library().metrics
    with (
        quiet(),
        sklearn.config_context(),  # the fit changes the global configuration
        patch("alpaca_eval.metrics.glm_winrate.hf_hub_download", lambda **kwargs: str(gamed)),
    ):
        return metrics.get_length_controlled_winrate(
            annotations, save_weights_dir=None, is_add_glm_preference_inplace=True
        )
