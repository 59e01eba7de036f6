"""Evaluate models on the benchmarks with one judge.

    python -m evaluation.run --config evaluation/paper.yaml

Every key of the YAML file is also an option of the command line, which takes precedence. A run that was killed
continues with the same command. With `--generate_only` the command stops after the responses and needs no judge, for
machines that cannot hold model and judge at once.
"""

import sys
from collections.abc import Collection
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rankbuffer_tools.batch.script import read_settings
from rankbuffer_tools.batch.server_check import check_judge
from rankbuffer_tools.paper import paper_rows
from rankbuffer_trl.errors import RankBufferError, SettingsError
from rankbuffer_trl.files import write_whole
from rankbuffer_trl.judge import JudgeError
from rankbuffer_trl.store import FOLDER, STORE_FILE, StoreError, history, read_store

from .asking import need_judge
from .assets import AssetError, Assets
from .benchmark import Benchmark, OutputError
from .config import REHEARSAL, EvaluationConfig
from .files import write_json
from .generate import generate, missing_outputs
from .registry import find_benchmark
from .results import EvaluationReport, ModelResult

MADE_UP = "I am not sure."


def load_benchmarks(config: EvaluationConfig, assets: Assets) -> dict[str, Benchmark]:
    """Load the benchmarks of a run. Raise one [`AssetError`] for all official files that are missing or wrong."""
    # The one setting of a single benchmark.
    options: dict[str, dict[str, Any]] = {"wildbench": {"reward": config.wildbench_reward}}
    loaded: dict[str, Benchmark] = {}
    faults = []
    for name in config.benchmarks:
        try:
            benchmark = find_benchmark(name)
            loaded[benchmark.name] = benchmark(assets, config.limit, **options.get(name, {}))
        except AssetError as fault:
            faults.append(str(fault))
    if faults:
        raise AssetError("\n".join(faults))
    return loaded


def generate_outputs(config: EvaluationConfig) -> None:
    """Generate the outputs of all models, without a judge. For errors see [`generate`]."""
    benchmarks = load_benchmarks(config, config.assets())
    config.claim_folder()
    generate(config, missing_outputs(config, benchmarks))


def rehearse(config: EvaluationConfig, names: Collection[str], assets: Assets) -> None:
    """Let the judge judge made-up outputs of two prompts, so that one that cannot do it costs no sampling.

    Raises:
        [`JudgeError`]: if more than half of the judgments of a benchmark fail, or more than the settings allow.
    """
    paths = [path for path in config.benchmarks if find_benchmark(path).name in names]
    limit = max(0.5, config.judge_max_failures)  # of few judgments one may fail
    few = replace(config, benchmarks=paths, limit=2, judge_max_failures=limit)
    label = next(iter(config.labelled_models()))
    for name, benchmark in load_benchmarks(few, assets).items():
        folder = Path(config.output_dir, REHEARSAL, name)
        try:
            benchmark.write_outputs(folder, label, {prompt.id: MADE_UP for prompt in benchmark.prompts()})
            benchmark.judge(folder, label, few)
        except OutputError:  # a benchmark of one's own may want outputs of another form
            continue
        except JudgeError as error:
            raise JudgeError(
                f"{error} (made-up outputs were judged, before anything is sampled)", error.passing
            ) from None


def policy_of(model: str) -> dict[str, Any]:
    """Return the name of a model, the id of the run that trained it, and that run's last step; `None` if unknown."""
    try:
        with closing(read_store(Path(model, FOLDER, STORE_FILE))) as store:
            return {"model": model, "run": history.run_id(store), "step": store.last_step()}
    except StoreError:  # a model from elsewhere has no store
        return {"model": model, "run": None, "step": None}


def evaluate(config: EvaluationConfig) -> EvaluationReport:
    """Generate, judge, score and compare. Write `results.json` and `results.md` into `output_dir`.

    Example:

    ```python
    config = EvaluationConfig(
        models=["base=Qwen/Qwen3-8B"], judge_url="http://127.0.0.1:8001/v1", judge_model="judge"
    )
    print(evaluate(config).markdown())
    ```

    Raises:
        [`SettingsError`]: if settings are missing or wrong, or `output_dir` has results of other settings.
        [`AssetError`]: if official files are missing or wrong.
        [`OutputError`]: if outputs or results are incomplete.
        [`JudgeError`]: if the judge cannot do it.
        [`EngineError`]: if a model cannot be loaded or served.
    """
    need_judge(config)
    if unknown := set(config.paper_rows) - set(paper_rows()):
        raise SettingsError(f"paper_rows must be among {', '.join(paper_rows())}; not {', '.join(sorted(unknown))}")
    assets = config.assets()
    benchmarks = load_benchmarks(config, assets)
    check_judge(config.judge())  # before models are loaded
    config.claim_folder()  # last, so that a typo does not take the folder
    policies = {label: policy_of(path) for label, path in config.labelled_models().items()}
    if missing := missing_outputs(config, benchmarks):
        rehearse(config, {b.name for each in missing for b in each.benchmarks}, assets)
        generate(config, missing)
    results: dict[str, dict[str, ModelResult]] = {}
    for label in config.labelled_models():
        for name, benchmark in benchmarks.items():
            folder = config.folder(label, name)
            cost = benchmark.judge(folder, label, config)
            config.claim_folder(judged=True)
            scores = benchmark.scores(folder, label)
            results.setdefault(label, {})[name] = ModelResult(scores, cost, config.endpoint.price(cost))
    titles = {name: benchmark.title for name, benchmark in benchmarks.items()}
    report = EvaluationReport(
        results,
        titles,
        str(config.judge_model),
        config.limit,
        config.paper_rows,
        config.compare_with,
        config.assets_manifest if assets.replaced & benchmarks.keys() else None,
    )
    out = Path(config.output_dir)
    hashes = {name: assets.hashes(name) for name in benchmarks}
    settings = {"settings": asdict(config), "assets": hashes, "policies": policies}
    write_json(out / "results.json", settings | report.as_dict())
    write_whole(out / "results.md", report.markdown())
    return report


def main() -> None:
    try:
        config = read_settings(EvaluationConfig)
        if config.generate_only:
            generate_outputs(config)
            return
        report = evaluate(config)
    except (RankBufferError, OSError) as error:  # what a user can mend is one line
        sys.exit(f"evaluation: {error}")
    except KeyboardInterrupt:
        sys.exit("evaluation: interrupted. The same command continues from here")
    print(report.markdown())
    print(f"Numbers: {Path(config.output_dir) / 'results.json'}. Tables: {Path(config.output_dir) / 'results.md'}.")


if __name__ == "__main__":
    main()
