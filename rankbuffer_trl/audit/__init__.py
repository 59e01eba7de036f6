"""Can this judge be trusted with this data? Told by a few hundred questions, before a GPU hour is spent.

    rankbuffer-audit --dataset_name recipes/quickstart/howto.jsonl \
        --judge_url http://127.0.0.1:8001/v1 --judge_model judge

Every response of the data set has a known place among the responses of its query. The audit asks for these places in
the ways in which training asks, and puts what comes back beside chance: what a judge gets that does not read the
responses, be it by guessing or by always giving the same answer. It prints a table and a verdict, and writes
`audit.json` and `audit.png`.
"""
