"""The answers of two policies to the same prompts, sampled alike. Their n-th answers meet."""

import random
from collections.abc import Mapping
from statistics import fmean

from rankbuffer_trl.data import QueryTable
from rankbuffer_trl.judge import Judge
from rankbuffer_trl.judge.config import OpenAIClient

from ..batch.answers import opens_thinking, read_answers
from ..batch.engines import base_of, check_model, engine, is_address, load_policy_tokenizer
from ..batch.output import beside
from ..batch.sampling import Prompt
from ..batch.server_check import CHARACTERS_PER_TOKEN, check_judge
from .config import CompareConfig
from .duel import Duels, duels_by_query


def prompts_of(config: CompareConfig, queries: QueryTable) -> dict[str, str]:
    """Return the id of the query of each duel, by the duel's name."""
    counts = duels_by_query(queries.ids, config.duels, random.Random(config.seed))
    # The n-th answers of both policies meet.
    return {f"{id} {n}": id for id, count in counts.items() for n in range(count)}


def longest(config: CompareConfig, query_ids: Mapping[str, str]) -> Duels:
    """Return the duels with answers as long as they may be, for a price before they are sampled."""
    text = "x" * (config.max_new_tokens * CHARACTERS_PER_TOKEN)
    return Duels([*config.labelled_models()], {name: (id, text, text) for name, id in query_ids.items()})


def check_policies(config: CompareConfig) -> None:
    """Refuse a policy that is not there, or that its server does not serve, before the judge is paid."""
    for label, model in config.labelled_models().items():
        if is_address(model):
            check_judge(Judge(OpenAIClient(model, label, role="policy")))
        else:
            check_model(model)


def sample_answers(config: CompareConfig, queries: QueryTable, query_ids: Mapping[str, str]) -> Duels:
    """Let both policies answer, and read the answers as the format check finds them."""
    models = config.labelled_models()
    adapters = {model: base_of(model) for model in models.values()}  # which finds a typo before the first one samples
    prompts = [Prompt(name, queries[id].prompt) for name, id in query_ids.items()]
    texts, measures = [], []
    for label, model in models.items():
        tokenizer = None if is_address(model) else load_policy_tokenizer(model, adapters[model])
        opened = tokenizer is not None and opens_thinking(tokenizer, config.template_kwargs())
        log = beside(config.result, f"{label}.vllm.log")
        with engine(config, label, model, adapters[model], log) as responder:
            # Answers that were sampled before are kept there.
            answers = responder.respond(prompts, config.result.with_name("samples.jsonl"), f"sampling {label}")
        tokens = [answers.asked[name].usage.completion for name in query_ids]
        ended = {*query_ids} - answers.cut_at(config.max_new_tokens)
        measures.append({"tokens": fmean(tokens), "ended": len(ended) / len(query_ids)})
        responses = {name: answers.values[name] for name in query_ids}
        texts.append(read_answers(responses, opened, f"answers of {label}", config.format_check))
    return Duels([*models], {name: (id, texts[0][name], texts[1][name]) for name, id in query_ids.items()}, measures)
