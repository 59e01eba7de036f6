"""Tests against the benchmarks' official files and scripts. `make test-assets` runs them; `make test` does not.

The folder `ASSETS` must hold the official checkouts; each message says how to get a file that is missing.
"""

from pathlib import Path

import pytest

from evaluation.assets import Assets


def pytest_addoption(parser):
    parser.addoption("--assets-dir", type=Path, help="folder with the official checkouts")


@pytest.fixture
def official(request) -> Assets:
    folder = request.config.getoption("assets_dir")
    if folder is None:
        pytest.skip("NOT RUN: make test-assets ASSETS=<folder with the official checkouts>")
    return Assets(folder)
