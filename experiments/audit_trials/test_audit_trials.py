"""The trials of the audit: errors and coverage of its estimates, and what its advice loses."""

import json
import sys

import numpy as np
import pytest

from experiments.audit_trials import advice, estimates
from rankbuffer_tools.audit.advice import POINTWISE
from rankbuffer_tools.audit.expected import METHODS
from rankbuffer_tools.audit.model import JudgeModel

JUDGE = JudgeModel(0.5, 0.4, 0.3, 0.3, -0.3, kappa=0.8, spread=0.4, bias_spread=0.3)


def last_line(module, words: str, monkeypatch, capsys) -> dict:
    """Run a script and return its JSON line."""
    monkeypatch.setattr(sys, "argv", [module.__name__, *words.split()])
    module.main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_estimates_count_errors_and_coverage(monkeypatch, capsys):
    line = last_line(estimates, "--trials 2 --queries 6 --spreads 0.4", monkeypatch, capsys)
    [table] = line["estimator"]
    assert table["queries"] == 6 and set(table["measures"]) == set(estimates.MEASURES)
    assert all(0 <= row["covered"] <= 1 and row["rmse"] >= abs(row["bias"]) for row in table["measures"].values())


def test_tau_once_is_that_of_one_prompt():
    rng = np.random.default_rng(9)
    settled = estimates.opinions(JUDGE, 3000, rng)[0]
    for n in (2, 8):
        seen = settled[:, :n] + [JUDGE.gain(slot, n) for slot in range(n)]
        seen += JUDGE.noise(n) * rng.standard_normal(seen.shape)
        signs = [np.sign(x[:, :, None] - x[:, None]) for x in (settled[:, :n], seen)]
        mean = (signs[0] * signs[1]).sum() / (3000 * n * (n - 1))
        assert estimates.tau_once(JUDGE, n) == pytest.approx(mean, abs=0.03)


@pytest.mark.slow
def test_estimator_trials_cover_unequal_groups_as_often_as_they_promise():
    rows = estimates.estimator_trials(40, 20, spread=0.4, seed=1)
    assert all(row["covered"] >= 0.8 for row in rows.values()), rows
    assert np.mean([row["covered"] for row in rows.values()]) >= 0.9
    assert rows["tau list"]["rmse"] < 0.06


@pytest.mark.slow
def test_advice_trials_measure_every_method_and_policy(monkeypatch, capsys):
    found = last_line(advice, "--judges 1 --draws 3 --groups 50 --processes 1", monkeypatch, capsys)
    assert set(found["predicted"]) == {*METHODS, POINTWISE}
    for policies in found["regret"].values():
        for budgets in policies.values():
            assert all(one is None or 0 <= one["mean"] <= one["worst"] <= 100 for one in budgets)
