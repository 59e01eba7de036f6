"""All four benchmarks end to end on small assets of the official schema, with a judge and a model on loopback."""

import json

import pytest
from evaluation_assets import Loopback, build, goodness
from http_server import served

from evaluation.config import EvaluationConfig
from evaluation.run import evaluate


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    return dict(assets_dir=str(folder), assets_manifest=str(build(folder)))


@pytest.fixture
def settings(assets, tmp_path, tiny_policy):
    """Makes settings of a run whose model and judge are behind `url`."""

    def make(url: str, **changes) -> EvaluationConfig:
        values = dict(
            models=[f"mine={tiny_policy}"],
            output_dir=str(tmp_path / "out"),
            engine_url=f"{url}/v1",
            engine_model="model",
            judge_url=f"{url}/v1",
            judge_model="judge",
            judge_max_retries=0,
            judge_prompt_price=1.0,
            judge_completion_price=2.0,
        )
        return EvaluationConfig(**(values | assets | changes))

    return make


def test_all_benchmarks_end_to_end(settings, tmp_path):
    server = Loopback()
    with served(server.app) as url:
        report = evaluate(settings(url, wildbench_reward=True))
    print(report.markdown())
