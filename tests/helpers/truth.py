"""A judge that knows the truth and needs no model.

A text is a number, or `number.name` such as `7.r2`: the judge reads the number as the quality of the text, and a test
tells responses apart by the name.
"""

import json
import re

RUBRICS = {"Is high.": lambda q: min(q, 10), "Is low.": lambda q: max(10 - q, 0), "Is even.": lambda q: 10 - q % 2}
SHOWN = re.compile(r"^\d+(?:\.\w+)?$", re.MULTILINE)


def quality(text: str) -> int:
    return int(text.partition(".")[0])


def unguarded(prompt: str) -> str:
    """Return a prompt without the marks that the guard puts before each line of a response."""
    return re.sub("^> ", "", prompt, flags=re.MULTILINE)


def first_rubric(prompt: str) -> str:
    return re.search(r"^1\.\[weight=-?\d\] (.*)$", prompt, re.MULTILINE)[1]


def truth(prompt: str) -> str:
    """Return the right answer to any question. Where no tie is allowed, the first of two equals is the better one."""
    body, _, instruction = unguarded(prompt).rpartition("\n\nReturn ")
    kind = re.search(r'"(\w+)":', instruction)[1]
    blocks = {name: quality(text) for name, text in re.findall(r"^\[(\w+)\]\n(\d+(?:\.\w+)?)$", body, re.MULTILINE)}
    if kind == "position":
        candidate = quality(SHOWN.findall(body)[-1])
        return json.dumps({kind: sum(anchor < candidate for anchor in blocks.values())})
    if '"positions"' in instruction:
        order = sorted((name for name in blocks if name[0] == "R"), key=blocks.get)
        anchors = [blocks[name] for name in blocks if name[0] == "A"]
        positions = [sum(anchor < blocks[name] for anchor in anchors) for name in order]
        return json.dumps({"order": [int(name[1:]) for name in order], "positions": positions})
    if kind == "order":
        return json.dumps({kind: [int(name[1:]) for name in sorted(blocks, key=blocks.get)]})
    if kind == "score":
        most = int(re.search(r"through (\d+)", instruction)[1])
        return json.dumps({kind: min(most, RUBRICS[first_rubric(prompt)](quality(SHOWN.findall(body)[-1])))})
    if kind == "scores":
        return json.dumps({kind: [min(quality, 10) for quality in blocks.values()]})
    if kind == "winner":
        level = "tie" if '"tie"' in instruction else "A"
        first, second = (blocks.get(name, -1) for name in "AB")  # an empty response is worse than any other
        return json.dumps({kind: "AB"[first < second] if first != second else level})
    return json.dumps({"keep_anchor_ids": ["A0", "A1", "A2", "A3"], "add_rollout_ids": []})
