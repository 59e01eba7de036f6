"""Audit a judge before a run: about a thousand questions show whether it reads the responses, and how it errs.

    rankbuffer-audit --dataset_name data/mine.jsonl --samples data/mine_samples.jsonl \
        --judge_url http://127.0.0.1:8001/v1 --judge_model judge

The samples are eight responses of the policy for each query. The judge sees them in several presentations. Verdicts
that change with the presentation are errors, whatever the truth is. The audit compares the verdicts with chance. It
prints tables and a verdict that names a recipe, and writes `audit.json` and `audit.png`.
"""
