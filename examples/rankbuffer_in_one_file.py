# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate", "datasets", "openai", "torch", "trl"]
# ///
"""RankBuffer in one file: GRPO in which the reward of a rollout is its rank among the rollouts of its group.

Each query keeps a buffer of anchors, earlier responses in order from worst to best. A judge places every rollout among
the anchors, orders the rollouts that share a place, and the ranks become rewards. Some of the rollouts become anchors
in turn. This is the whole method of the paper with its four variants, for any number of processes and with an exact
resume. Run it with a judge that any OpenAI-compatible server serves, on rows with `query_id`, `prompt` (messages),
`rubrics` (`text` and `weight`) and `responses` (worst to best):

    accelerate launch examples/rankbuffer_in_one_file.py --dataset_name my_queries.jsonl --output_dir runs/mine \
        --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --judge_url http://127.0.0.1:8001/v1 --judge_model my-judge

On a CPU, add `--use_cpu true --bf16 false`.

The package `rankbuffer_trl` gives the same rewards, buffers and weights. It adds what a long run needs and this file
leaves out: the other methods of the paper, several judge servers, constrained decoding, prompts that a response cannot
break out of, judging during generation, evaluation, a store with every judgment and its cost, checkpoints that are
proved whole, and errors before money is spent. `docs/guards.md` says of each part which failure it prevents.
"""

import asyncio
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list, gather_object
from datasets import load_dataset
from openai import AsyncOpenAI, OpenAIError
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser


@dataclass
class Settings:
    """The settings of the method beside those of TRL. The defaults are the paper's."""

    judge_url: str
    judge_model: str
    K0: int = 4  # the first number of anchors
    H: int = 3  # an inner anchor leaves the buffer after so many inactive epochs
    bootstrap: bool = False  # take the first anchors from a query's first group, not from its `responses`
    static: bool = False  # freeze the buffers after the first epoch
    coarse_only: bool = False  # leave the rollouts of an interval tied
    order_only: bool = False  # hide the text of the anchors from the judge
    max_failures: float = 0.25  # the share of a step's rollouts without a reward above which the run stops


# Buffer initialization


@dataclass
class Buffer:
    """The anchors `a_1 < ... < a_K` of one query, their inactivity counters `h`, and the epochs of its changes."""

    a: list[str]
    h: list[int]
    left: int | None = None
    right: int | None = None
    observed: int | None = None


def first_buffer(ordered: list[str], K0: int) -> Buffer:
    """Select `K0` evenly spread responses of a worst-to-best order, with both ends: the paper's `Select_K0`."""
    n = len(ordered)
    a = ordered if n <= K0 else [ordered[round(i * (n - 1) / (K0 - 1))] for i in range(K0)]
    return Buffer(list(a), [0] * len(a))


# Coarse-to-fine ranking: Algorithm 1


async def rank_group(J: "Judge", x: dict, y: list[str], A: Buffer | None, e: int, settings: Settings) -> tuple:
    """Return the rank rewards of the rollouts `y` of query `x` in epoch `e`, and the query's next buffer.

    A rollout without an answer is an empty text: it is never judged and below all others. A rollout that the judge
    failed to place has the reward `None` and changes no buffer.
    """
    answered = [i for i, text in enumerate(y) if text]
    if A is None and not settings.bootstrap:
        A = first_buffer(x["responses"], settings.K0)
    if A is None:  # one ranking of the whole group gives both the rewards and the first anchors
        sigma = await J.rank(x, y, answered)
        if sigma is None:
            return rank_rewards([], y), None
        if len(sigma) > 1:
            A = first_buffer([y[i] for i in sigma], settings.K0)
        return rank_rewards([[i] for i in sigma], y), A

    K = len(A.a)
    placed = await asyncio.gather(*(J.insert(x, A.a, y[i], settings.order_only) for i in answered))
    p = dict(zip(answered, placed, strict=True))
    C = [[i for i in answered if p[i] == k] for k in range(K + 1)]
    if settings.coarse_only:
        orders = [bucket if len(bucket) < 2 else None for bucket in C]
    else:
        orders = await asyncio.gather(*(J.rank(x, y, bucket) for bucket in C))
    tied = {k for k in range(K + 1) if orders[k] is None}
    sigma = [C[k] if k in tied else orders[k] for k in range(K + 1)]

    tiers = []
    for k in range(K + 1):
        tiers += [sigma[k]] if k in tied else [[i] for i in sigma[k]]
    if any(C) and not (settings.static and e > 0):
        unknown = set() if settings.coarse_only else tied  # an order that the judge failed to give makes no anchor
        A = update_buffer(A, [[y[i] for i in order] for order in sigma], unknown, e, settings.H)
    return rank_rewards(tiers, y), A


# Rank-based reward


def rank_rewards(tiers: list[list[int]], y: list[str]) -> list[float | None]:
    """Return `r = -1 + 2 q / (n - 1)`, where `q` counts the rollouts below. Those of one tier share their mean `q`."""
    below = y.count("")
    n = below + sum(map(len, tiers))
    r = [None if text else -1.0 for text in y]
    for tier in tiers:
        q = below + (len(tier) - 1) / 2
        for i in tier:
            r[i] = -1.0 + 2.0 * q / (n - 1) if n > 1 else 0.0
        below += len(tier)
    return r


# Rule-based buffer update: Algorithm 2


def update_buffer(A: Buffer, sigma: list[list[str]], unknown: set[int], e: int, H: int) -> Buffer:
    """Expand the boundaries, refine crowded intervals and prune inactive anchors, all at once.

    Anchor `k` has the coordinate `k`, and a new anchor of interval `p` has `p + 1/2`. The intervals in `unknown` count
    as active, but their order is not known, so they add no anchor.
    """
    K = len(A.a)
    a, h = ["", *A.a], [0, *A.h]  # the paper counts anchors from 1
    left, right = A.left, A.right
    P = set()
    if A.observed != e:
        for k in range(2, K):  # the two boundary anchors are never pruned
            h[k] = 0 if sigma[k - 1] or sigma[k] else h[k] + 1
            if h[k] >= H:
                P.add(k)
    M = [(float(k), a[k], h[k]) for k in range(1, K + 1) if k not in P]
    if sigma[0] and left != e and 0 not in unknown:
        M.append((0.5, sigma[0][0], 0))
        left = e
    if sigma[K] and right != e and K not in unknown:
        M.append((K + 0.5, sigma[K][-1], 0))
        right = e
    for p in range(1, K):
        if len(sigma[p]) >= 3 and p not in unknown:
            j = math.ceil(len(sigma[p]) / 2)  # the lower median
            M.append((p + 0.5, sigma[p][j - 1], 0))
    M.sort()  # by coordinate, and no two are equal
    return Buffer([text for _, text, _ in M], [count for _, _, count in M], left, right, observed=e)


# The judge: a question goes in, a checked verdict comes out, or `None`. A failure is never a score.

# The prompts are word for word those of the paper.

COARSE = """\
You are a strict response-quality judge. The anchors below are
already ordered from WORST to BEST.
Place the candidate response into exactly one insertion position
using the query and weighted rubrics.

Position semantics for {K} anchors:
- 0: candidate is worse than A0
- i (1 <= i < {K}): candidate belongs between A(i-1) and Ai
- {K}: candidate is better than A{K-1}

QUERY
{QUERY}

RUBRICS
{WEIGHTED_RUBRICS}

ORDERED ANCHORS (worst to best)
{ORDERED_ANCHOR_BLOCKS}

CANDIDATE
{CANDIDATE_RESPONSE}

Return JSON only: {"position": <integer from 0 through {K}>}"""

ORDER_ONLY = """\
You are a strict response-quality judge. The anchors below are
already ordered from WORST to BEST. Place the candidate response
into exactly one insertion position using the query and weighted
rubrics.

Position semantics for K anchors:
- 0: candidate is worse than A0
- i (1 <= i < K): candidate belongs between A(i-1) and Ai
- K: candidate is better than A(K-1)

QUERY
{QUERY}

RUBRICS
{WEIGHTED_RUBRICS}

ORDERED ANCHORS (worst to best)
[A0]
...
[A(K-1)]

CANDIDATE
{CANDIDATE_RESPONSE}

Return JSON only: {"position": <integer from 0 through K>}"""

FINE = """\
You are a strict response-quality judge. Rank only the candidate
responses below from WORST to BEST.
Use the query and weighted rubrics. Every candidate ID must
occur exactly once.

QUERY
{QUERY}

RUBRICS
{WEIGHTED_RUBRICS}

CANDIDATES
{CANDIDATE_BLOCKS}

Return JSON only. `order` must be a permutation of
{CANDIDATE_IDS}, from worst to best:
{"order": {CANDIDATE_IDS}}"""

REPEAT = "That is not a valid answer: {}. Answer the same question again with the JSON object alone."


class Judge:
    """The judge `J`: a language model behind an OpenAI-compatible server. `OPENAI_API_KEY` may hold its key."""

    def __init__(self, url: str, model: str, attempts: int = 3, concurrency: int = 64):
        key = os.environ.get("OPENAI_API_KEY", "none")
        self.client = AsyncOpenAI(base_url=url, api_key=key, timeout=120, max_retries=4)
        self.model = model
        self.attempts = attempts
        self.slots = asyncio.Semaphore(concurrency)

    async def insert(self, x: dict, a: list[str], candidate: str, order_only: bool) -> int | None:
        """Coarse ranking: return the insertion position of `candidate` among the anchors, 0 to `K`."""
        K = len(a)
        blocks = "\n\n".join(f"[A{k}]\n{text}" for k, text in enumerate(a))
        names = "\n".join(f"[A{k}]" for k in range(K))
        values = {"{K}": K, "{K-1}": K - 1, "{ORDERED_ANCHOR_BLOCKS}": blocks, "{CANDIDATE_RESPONSE}": candidate}
        if order_only:  # the paper prints this prompt without braces
            values |= {"[A0]\n...\n[A(K-1)]": names, "A(K-1)": f"A{K - 1}", "K": K}
        prompt = fill(ORDER_ONLY if order_only else COARSE, shown(x) | values)
        return await self.ask(prompt, "position", lambda p: type(p) is int and 0 <= p <= K)

    async def rank(self, x: dict, y: list[str], ids: list[int]) -> list[int] | None:
        """Fine ranking: return `ids` from worst to best. Fewer than two need no question."""
        if len(ids) < 2:
            return ids
        blocks = "\n\n".join(f"[R{i}]\n{y[i]}" for i in ids)
        prompt = fill(FINE, shown(x) | {"{CANDIDATE_IDS}": json.dumps(ids), "{CANDIDATE_BLOCKS}": blocks})
        return await self.ask(prompt, "order", lambda order: is_permutation(order, ids))

    async def ask(self, prompt: str, key: str, valid: Callable) -> object | None:
        """Ask until `key` of the answer is valid. A repeat names the fault, so a deterministic judge can mend it."""
        question = {"role": "user", "content": prompt}
        messages = [question]
        for _ in range(self.attempts):
            try:
                answer = await self.complete(messages)
            except OpenAIError:  # after the client's own retries
                return None
            try:
                return read(answer, key, valid)
            except (ValueError, RecursionError) as fault:
                given = {"role": "assistant", "content": answer[:500] or "(no answer)"}
                messages = [question, given, {"role": "user", "content": REPEAT.format(fault)}]
        return None

    async def complete(self, messages: list[dict]) -> str:
        async with self.slots:
            answer = await self.client.chat.completions.create(model=self.model, messages=messages, temperature=0)
        return answer.choices[0].message.content or ""


def shown(x: dict) -> dict[str, str]:
    """Return what every prompt shows of a query: its only message, or all turns with their roles, and its rubrics."""
    turns = [f"{turn['role'].capitalize()}: {turn['content']}" for turn in x["prompt"]]
    rubrics = [f"{i}.[weight={rubric['weight']}] {rubric['text']}" for i, rubric in enumerate(x["rubrics"], start=1)]
    query = x["prompt"][0]["content"] if len(turns) == 1 else "\n\n".join(turns)
    return {"{QUERY}": query, "{WEIGHTED_RUBRICS}": "\n".join(rubrics)}


def fill(template: str, values: dict) -> str:
    """Replace all placeholders in one pass, so that a placeholder inside a response stays text."""
    return re.sub("|".join(map(re.escape, values)), lambda match: str(values[match.group()]), template)


def read(answer: str, key: str, valid: Callable) -> object:
    """Return the valid value of `key` in the one JSON object of an answer, or raise `ValueError`."""
    said = after_thinking(answer)
    objects = re.findall(r"\{[^{}]*\}", said)
    alone = len(objects) == 1 and said.index("{") == said.index(objects[0])  # and not inside another object
    pairs = json.loads(objects[0], object_pairs_hook=list) if alone else []
    values = [value for name, value in pairs if name == key]
    if len(values) != 1 or not valid(values[0]):
        raise ValueError(f"it needs exactly one JSON object, with a `{key}` as the question asks for it")
    return values[0]


def is_permutation(order: object, ids: list[int]) -> bool:
    return isinstance(order, list) and all(type(i) is int for i in order) and sorted(order) == sorted(ids)


def after_thinking(text: str) -> str:
    """Return a text without its thinking block. If the block is not closed, nothing was said."""
    said = text.rpartition("</think>")[2]
    return "" if "<think>" in said else said.strip()


# Training: TRL's trainer with rewards of whole groups, a data order that a resumed run keeps, and saved buffers


class RankBufferTrainer(GRPOTrainer):
    """GRPO with rank rewards and the paper's format reward. `reward_weights` of `args` are their two weights."""

    def __init__(self, model: str, args: GRPOConfig, settings: Settings, train_dataset, judge: Judge, **kwargs):
        self.settings = settings
        self.judge = judge
        self.queries = {row["query_id"]: row for row in train_dataset}
        self.buffers: dict[str, Buffer] = {}
        self.first_epoch = 0
        self.runner = asyncio.Runner()
        prompts = train_dataset.select_columns(["query_id", "prompt"])
        super().__init__(model, [self.rank_reward, format_reward], args, train_dataset=prompts, **kwargs)

    def rank_reward(self, completions: list, query_id: list[str], **columns) -> list[float | None]:
        """Return the rewards of this process. A group may lie on several: the main process gathers and judges all."""
        answers = [answer_of(completion) for completion in completions]
        rollouts = gather_object(list(zip(query_id, answers, strict=True)))
        rewards, failure = [None], None
        if self.accelerator.is_main_process:
            try:
                rewards = [self.runner.run(self.rank_groups(rollouts))]
            except Exception as error:  # the other processes must hear of it, or they wait for ever
                failure = error
        broadcast_object_list(rewards)
        if failure is not None:
            raise failure
        if rewards[0] is None:
            raise RuntimeError("the main process failed; its error is the cause")
        first = self.accelerator.process_index * len(answers)
        return rewards[0][first : first + len(answers)]

    async def rank_groups(self, rollouts: list[tuple[str, str]]) -> list[float | None]:
        """Rank the groups of all processes at once. TRL's sampler yields each query `G` times in a row."""
        G, e = self.num_generations, int(self.state.epoch)
        ids = [id for id, _ in rollouts[::G]]
        texts = [text for _, text in rollouts]
        groups = zip(ids, [texts[i : i + G] for i in range(0, len(texts), G)], strict=True)
        tasks = [
            rank_group(self.judge, self.queries[id], y, self.buffers.get(id), e, self.settings) for id, y in groups
        ]
        ranked = await asyncio.gather(*tasks)
        rewards = [r for group, _ in ranked for r in group]
        if rewards.count(None) > self.settings.max_failures * len(rewards):
            raise RuntimeError(f"the judge failed for {rewards.count(None)} of {len(rewards)} rollouts")
        self.buffers |= {id: A for id, (_, A) in zip(ids, ranked, strict=True) if A is not None}
        return rewards

    def _calculate_rewards(self, *args) -> torch.Tensor:
        rewards = super()._calculate_rewards(*args)
        rewards[rewards[:, 0].isnan()] = torch.nan  # else TRL takes a missing rank for 0, that of an average one
        return rewards

    def _get_train_sampler(self, dataset=None):
        sampler = super()._get_train_sampler(dataset)
        for _ in range(self.first_epoch):  # else a resumed run begins with the order of the first epoch again
            next(iter(sampler))  # draws the order of one epoch
        return sampler

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy, and the buffers before it, so that a push to the Hub takes both."""
        if self.accelerator.is_main_process:
            folder = Path(output_dir or self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "buffers.json").write_text(json.dumps({id: vars(A) for id, A in self.buffers.items()}))
        super().save_model(output_dir, _internal_call)

    def train(self, resume_from_checkpoint: str | None = None, **kwargs):
        """Train from the beginning, or go on from the folder of a checkpoint as if nothing had happened."""
        if resume_from_checkpoint:
            saved = json.loads(Path(resume_from_checkpoint, "buffers.json").read_text())
            self.buffers = {id: Buffer(**fields) for id, fields in saved.items()}
            state = json.loads(Path(resume_from_checkpoint, "trainer_state.json").read_text())
            self.first_epoch = int(state["epoch"])
        return super().train(resume_from_checkpoint, **kwargs)


def answer_of(completion: list[dict]) -> str:
    """Return the answer of a rollout, empty if there is none. Judge and buffer never see the thinking."""
    return after_thinking(completion[-1]["content"] or "")


def format_reward(completions: list, **columns) -> list[float]:
    """Return 1 for each rollout with an answer, else 0."""
    return [float(bool(answer_of(completion))) for completion in completions]


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, Settings, ModelConfig))
    parser.set_defaults(reward_weights=[1.0, 0.2])  # of the rank and the format
    script, args, settings, model = parser.parse_args_and_config()
    rows = load_dataset("json", data_files=script.dataset_name, split="train")
    judge = Judge(settings.judge_url, settings.judge_model)
    trainer = RankBufferTrainer(model.model_name_or_path, args, settings, rows, judge)
    trainer.train(args.resume_from_checkpoint)
    trainer.save_model()
