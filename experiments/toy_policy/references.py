"""The references of the toy policy: the written answers, or weak ones that the policy leaves behind.

With `written`, the references of a query are the seven answers of the data set. The best one meets every rubric. So no
response can be better than the best reference.

With `weak`, the three best answers of each query are withheld from the methods. The references are the four others
and the first quarter of each withheld answer, as if its author had stopped there. Every reference is worse than every
withheld answer. The policy is the same as with `written`: it can write the withheld answers, and training makes them
frequent.
"""

from datasets import Dataset

from rankbuffer_trl.judge import rubric_score

REFERENCES = ("written", "weak")
WITHHELD = 3  # answers of each query
PART = 0.25  # of a withheld answer's words


def weak_references(row: dict) -> list[str]:
    """Return the weak references of a query, from worst to best by their rubric scores."""
    rubrics = [(rubric["weight"], rubric["text"]) for rubric in row["rubrics"]]
    words = [answer.split() for answer in row["responses"][-WITHHELD:]]
    parts = [" ".join(each[: max(1, round(len(each) * PART))]) for each in words]
    return sorted([*row["responses"][:-WITHHELD], *parts], key=lambda text: rubric_score(text, rubrics))


def with_references(queries: Dataset, references: str) -> Dataset:
    """Return the queries with the references that the methods see."""
    if references == "written":
        return queries
    return Dataset.from_list([row | {"responses": weak_references(row)} for row in queries])
