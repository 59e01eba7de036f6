"""The official `alpaca_eval` library, used as it is: it formats, asks, reads and fits.

It is loaded on first use, since it is an extra of its own: its pins (setuptools below 81, scikit-learn below 1.10)
need not suit an environment that only trains.
"""

import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import yaml

from rankbuffer_trl.judge import JudgeError
from rankbuffer_trl.judge.config import JudgeConfig

from .asking import need_judge, set_fields
from .files import file_name

REQUEST = {"max_tokens": 1, "temperature": 1, "logprobs": True, "top_logprobs": 5}
"""As in the official `weighted_alpaca_eval_gpt4_turbo`. The logprobs of the one token are the verdict."""

RAW = "preference_raw_completion"


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps the root logger as it is, which the library sets to INFO, and silent but for errors meanwhile."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)


@contextmanager
def failing() -> Iterator[None]:
    """Says what it means when the library gives up."""
    from openai import OpenAIError

    try:
        with quiet():
            yield
    except OpenAIError as error:
        raise JudgeError(
            f"AlpacaEval's library stops at the first request that fails ({type(error).__name__}:"
            f" {str(error)[:300]}). What was judged before is kept, 128 rows at a time; run the same command again"
            " to go on"
        ) from error


def load() -> ModuleType:
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
    library = load()
    name, urls, mine = need_judge(settings), settings.judge_url or [], set_fields(settings)
    known = {field: value for field, value in mine.items() if field in ("temperature", "top_p")}
    extra = {field: value for field, value in mine.items() if field not in (*REQUEST, *known) and value is not None}
    with tempfile.TemporaryDirectory() as folder:  # its files hold the key; the folder is the user's alone
        clients, config = Path(folder, "clients.yaml"), Path(folder, "annotator", "configs.yaml")
        client = {
            "api_key": os.environ.get(settings.judge_api_key_env) or "none",
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
        yield made


def annotate(
    reference: Sequence[dict],
    outputs: Sequence[dict],
    settings: JudgeConfig,
    template: Path,
    cache: Path | None = None,
) -> list[dict[str, Any]]:
    """Annotations of `outputs` against `reference`: `preference` is 1 where the reference is better, 2 the output.

    Raises:
        [`JudgeError`]: if the library gives up on a request.
    """
    with annotator(settings, template, cache) as library, failing():
        return library.annotate_head2head(outputs_1=list(reference), outputs_2=list(outputs))


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
    with annotator(settings, template, None) as library, failing():
        (single,) = library.annotators.values()
        prompts, _ = load().utils.make_prompts(pandas.DataFrame(pairs), single.prompt_template)
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

    metrics = load().metrics
    with (
        quiet(),
        sklearn.config_context(),  # the fit changes the global configuration
        patch("alpaca_eval.metrics.glm_winrate.hf_hub_download", lambda **kwargs: str(gamed)),
    ):
        return metrics.get_length_controlled_winrate(
            annotations, save_weights_dir=None, is_add_glm_preference_inplace=True
        )
