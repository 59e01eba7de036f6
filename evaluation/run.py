"""Evaluate models on the benchmarks with one judge.

    python -m evaluation.run --config evaluation/paper.yaml

Every key of the YAML can also be given on the command line, where it wins. A run that was killed goes on where it was.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from trl import TrlParser

from rankbuffer_trl.judge import JudgeError
from rankbuffer_trl.judge.reach import check_judge

from .alpaca_eval import AlpacaEval
from .arena_hard import ArenaHard
from .asking import need_judge
from .assets import AssetError, Assets
from .benchmark import Benchmark
from .config import EvaluationConfig
from .files import write_json, write_text
from .generate import generate
from .results import Report, Result, paper_results
from .serving import EngineError
from .wildbench import WildBench
from .writingbench import WritingBench


def load_benchmarks(config: EvaluationConfig, assets: Assets) -> dict[str, Benchmark]:
    """The benchmarks of a run with their official files, all of which are checked.

    Raises:
        [`AssetError`]: naming all files that are missing or not the official ones.
    """
    makers: dict[str, Callable[[], Benchmark]] = {
        "alpaca_eval": lambda: AlpacaEval(assets, config.limit),
        "arena_hard": lambda: ArenaHard(assets, config.limit),
        "wildbench": lambda: WildBench(assets, config.limit, reward=config.wildbench_reward),
        "writingbench": lambda: WritingBench(assets, config.limit),
    }
    loaded: dict[str, Benchmark] = {}
    faults = []
    for name in config.benchmarks:
        try:
            loaded[name] = makers[name]()
        except AssetError as fault:
            faults.append(str(fault))
    if faults:
        raise AssetError("\n".join(faults))
    return loaded


def evaluate(config: EvaluationConfig) -> Report:
    """Generate, judge, score and compare; writes `results.json` and `results.md` into `output_dir`.

    Raises:
        `ValueError`: if settings, official files, outputs or results are not as they must be.
        [`JudgeError`]: if the judge cannot do it.
        [`EngineError`]: if a model cannot be loaded or served.
    """
    need_judge(config)
    if unknown := set(config.paper_rows) - set(paper_results()):
        raise ValueError(f"paper_rows must be among {', '.join(paper_results())}; not {', '.join(sorted(unknown))}")
    assets = config.assets()
    benchmarks = load_benchmarks(config, assets)
    check_judge(config.judge())
    config.claim_folder()  # last, so that a typo leaves the folder free
    generate(config, benchmarks)
    results: dict[str, dict[str, Result]] = {}
    for label in config.labelled_models():
        for name, benchmark in benchmarks.items():
            folder = config.folder(label, name)
            cost = benchmark.judge(folder, label, config)
            scores = benchmark.scores(folder, label)
            results.setdefault(label, {})[name] = Result(scores, cost, config.price(cost))
    titles = {name: benchmark.title for name, benchmark in benchmarks.items()}
    report = Report(results, titles, str(config.judge_model), config.limit, config.paper_rows, config.compare_with)
    out = Path(config.output_dir)
    hashes = {name: assets.hashes(name) for name in benchmarks}
    write_json(out / "results.json", {"settings": asdict(config), "assets": hashes, **report.as_dict()})
    write_text(out / "results.md", report.markdown())
    return report


def main() -> None:
    """The command."""
    try:
        (config,) = TrlParser((EvaluationConfig,)).parse_args_and_config()
        report = evaluate(config)
    except (ValueError, EngineError, JudgeError, OSError) as error:
        sys.exit(f"evaluation: {error}")
    except KeyboardInterrupt:
        sys.exit("evaluation: interrupted. The same command goes on where it was")
    print(report.markdown())
    print(f"Numbers: {Path(config.output_dir) / 'results.json'}. Tables: {Path(config.output_dir) / 'results.md'}.")


if __name__ == "__main__":
    main()
