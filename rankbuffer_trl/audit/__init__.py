"""Audit a judge before a run: a few hundred questions show whether it can be trusted with this data.

    rankbuffer-audit --dataset_name recipes/quickstart/howto.jsonl \
        --judge_url http://127.0.0.1:8001/v1 --judge_model judge

Every response of the data set has a known place among the responses of its query. The audit asks for these places with
the questions of training. It compares the answers with chance: the result of a judge that does not read the responses
but guesses, or always gives the same answer. It prints a table and a verdict, and writes `audit.json` and `audit.png`.
"""
