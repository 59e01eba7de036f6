# /// script
# requires-python = ">=3.11"
# dependencies = ["rankbuffer-trl"]
#
# [tool.uv.sources] # this repository, since the package is on no index
# rankbuffer-trl = { path = "..", editable = true }
# ///
"""Rank rewards in a loop of one's own, without a trainer: two queries, visited twice, against their buffers.

    python examples/own_loop.py

The embedded judge answers, which scores texts by their words. Settings such as
`{"judge_url": "http://127.0.0.1:8001/v1", "judge_model": "my-judge"}` in its place name a model.
"""

import asyncio
import json
from pathlib import Path

from rankbuffer_trl import GroupRanker
from rankbuffer_trl.judge import RubricJudge

DATA = Path(__file__).parent.parent / "recipes" / "quickstart" / "howto.jsonl"
ROWS = [json.loads(line) for line in DATA.read_text().splitlines()[:2]]


async def main() -> None:
    async with GroupRanker("rankbuffer", RubricJudge()) as ranker:
        for visit in range(2):
            groups = [[*row["responses"][visit : visit + 3], ""] for row in ROWS]  # a policy would sample them
            scores = await asyncio.gather(*map(ranker.rank, ROWS, groups))
            for row, score in zip(ROWS, scores, strict=True):
                print(f"visit {visit} of {row['query_id']}: {', '.join(f'{r:+.2f}' for r in score.rewards)}")


asyncio.run(main())
