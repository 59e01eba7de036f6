"""The arithmetic of a run, against TRL's own sampler and trainer; and the dry run that prints it."""

import math
import re

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from transformers import TrainerCallback
from trl.trainer.utils import RepeatSampler

from rankbuffer_tools.batch.recipes import read_recipe
from rankbuffer_tools.paper import RECIPE_FOLDER
from rankbuffer_trl.training._batches import BatchError, Batches
from rankbuffer_trl.training._config import RankBufferConfig


def plan(processes: int = 1, queries: int = 100, **overrides) -> Batches:
    args = RankBufferConfig("out", dry_run=True, num_processes=processes, report_to="none", **overrides)
    return Batches(args, queries)


@settings(max_examples=60)
@given(
    **{name: st.integers(1, 6) for name in ("per_device", "accumulation", "generation")},
    **{name: st.integers(1, most) for name, most in dict(processes=8, iterations=2, queries=60, epochs=3).items()},
    G=st.sampled_from([2, 4, 8]),
    stop=st.integers(0, 1000),
)
@example(  # 21 steps are 15 generations of 7/5 steps, which no float is
    processes=1, per_device=4, accumulation=5, generation=7, iterations=1, G=2, queries=420, epochs=1, stop=20
)
def test_batches_counts_as_the_real_sampler_does(
    processes, per_device, accumulation, generation, iterations, G, queries, epochs, stop
):
    rollouts = processes * per_device * generation
    assume(rollouts % G == 0 and queries >= rollouts // G)
    settings = dict(
        num_generations=G,
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=generation,
        num_iterations=iterations,
        num_train_epochs=epochs,
        save_strategy="no",
    )
    layout = plan(processes, queries, **settings)
    sampler = RepeatSampler(range(queries), G, rollouts // G, iterations * generation)
    rows = list(sampler)
    batches = len(rows) // rollouts
    updates = max(math.ceil(batches / accumulation), 1)  # as transformers counts them
    assert (layout.steps_per_epoch, layout.steps) == (updates, updates * epochs)
    assert layout.generations_per_epoch * iterations * generation == batches

    # TRL generates where its count of micro steps is a multiple of this; a resumed run generates at once.
    every, micro_steps, generations, exact, made = iterations * generation, 0, 0, [True], [0]
    for _ in range(epochs):
        for batch in range(1, batches + 1):
            generations += micro_steps % every == 0
            micro_steps += 1
            if batch % accumulation == 0 or batch == batches:
                exact.append(micro_steps % every == 0)
                made.append(generations)
    assert [layout.ends_generation(step) for step in range(layout.steps + 1)] == exact
    assert layout.generations == generations
    stop = 1 + stop % layout.steps
    assert plan(processes, queries, **settings, max_steps=stop).generations == made[stop]


def test_batches_refuses_a_run_that_saves_and_ends_inside_a_generation():
    best = {"save_strategy": "best", "eval_strategy": "epoch", "metric_for_best_model": "own", "max_steps": 3}
    for changes in (
        {"steps_per_generation": 2, "save_steps": 2, "max_steps": 3},
        {"num_iterations": 2, "save_strategy": "epoch", "num_train_epochs": 1.3},
        {"num_iterations": 2, "save_strategy": "epoch", "max_steps": 3},
        {"num_iterations": 2} | best,
    ):
        changes = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8} | changes
        message = r"the run ends at step \d+, inside a generation .*exactly: set max_steps to"
        with pytest.raises(BatchError, match=message) as error:
            plan(2, 10, **changes)
        ends = int(re.search(r"set max_steps to (\d+)", str(error.value))[1])
        assert plan(2, 10, **changes | {"max_steps": ends}).steps == ends
        assert plan(2, 10, **changes | {"save_strategy": "no"}).steps == ends - 1


class StopAtOnce(TrainerCallback):
    """Ends training before its first step."""

    def on_train_begin(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


def test_steps_are_those_of_the_trainer(training, rows):
    accumulation, generation = {"gradient_accumulation_steps": 5, "steps_per_generation": 1}, {"num_iterations": 2}
    for changes in (accumulation, generation | {"steps_per_generation": 2}):
        trainer = training(per_device_train_batch_size=8, callbacks=[StopAtOnce()], **changes)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert trainer.state.max_steps == Batches(trainer.args, len(rows)).steps, changes


def test_lines_say_when_checkpoints_are_written():
    best = {"save_strategy": "best", "eval_strategy": "epoch", "metric_for_best_model": "own", "num_iterations": 1}
    for save, said in [
        ({"save_steps": 10}, "save_steps 10, and the last step"),
        ({"save_steps": 0.5}, "save_steps 0.5, and the last step"),
        ({"save_strategy": "epoch"}, "after each epoch"),
        (best | {"per_device_eval_batch_size": 8}, "at the best evaluations"),
        ({"save_strategy": "no"}, "none"),
    ]:
        assert f"checkpoints: {said}" in plan(2, 96, per_device_train_batch_size=32, **save).lines(), save


def test_lines_say_which_queries_an_epoch_leaves_out():
    for shuffle, said in ((True, "leaves out 4 queries"), (False, "leaves out 4 queries, the same ones")):
        lines = plan(queries=12, per_device_train_batch_size=64, shuffle_dataset=shuffle, save_strategy="no").lines()
        assert [line for line in lines if line.endswith(said)]


EIGHT = " If the recipe's 8 processes are meant, add --num_processes 8."


def test_lines_say_that_a_step_has_not_the_queries_of_the_recipe():
    for processes, accumulation, G, said in [
        (8, 10, 8, None),
        (16, 5, 8, None),
        (8, 5, 8, "a step has 10 queries, and the recipe is for 20: set gradient_accumulation_steps to 10"),
        (8, 10, 16, "a step has 10 queries, and the recipe is for 20: set gradient_accumulation_steps to 20"),
        (24, 4, 8, "a step has 24 queries, and the recipe is for 20: change processes or per_device_train_batch_size"),
        (4, 10, 8, f"a step has 10 queries, and the recipe is for 20: set gradient_accumulation_steps to 20.{EIGHT}"),
    ]:
        batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation, "num_generations": G}
        lines = plan(processes, 1000, recipe_queries_per_step=20, save_strategy="no", **batch).lines()
        found = [each for each in lines if "recipe" in each]
        assert [each.startswith(f"not the recipe's batch: {said}") for each in found] == [True] * (said is not None)
        assert not any("recipe" in each for each in plan(processes, 1000, save_strategy="no", **batch).lines())


@pytest.mark.parametrize("warmup", [9, 10, 1000])
def test_lines_say_that_the_warmup_is_longer_than_the_run(training, caplog, warmup):
    how = dict(warmup_steps=warmup, max_steps=10, learning_rate=1e-6, save_strategy="no")
    found = [each for each in plan(**how).lines() if "warmup" in each]
    assert len(found) == (warmup > 9) and ("at a learning rate of 9.0e-07 in" in "".join(found)) == (warmup == 10)
    assert not [each for each in plan(**how, lr_scheduler_type="constant").lines() if "warmup" in each]
    training(**how)
    assert [each for each in caplog.messages if "warmup" in each] == [f"[RANK 0] {each}" for each in found]


def test_batches_refuses_what_cannot_work_and_says_what_would():
    evaluating = {"eval_strategy": "epoch", "per_device_eval_batch_size": 3, "processes": 4}
    small = {"processes": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 10}
    for changes, message in [
        ({"processes": 3, "per_device_train_batch_size": 2}, r"must be a multiple of 4, got 1\."),
        ({"queries": 1, "processes": 2}, r"has 1 queries, fewer than the 2 of one generation batch \(16 rollouts"),
        (small | {"recipe_queries_per_step": 20}, rf"must be a multiple of 4, got 10\.{EIGHT}"),
        (evaluating, r"With 4 processes, per_device_eval_batch_size must be a multiple of 2, got 3\."),
    ]:
        with pytest.raises(ValueError, match=message):
            plan(**changes)


PAPER = (
    "num_generations per_device_train_batch_size num_train_epochs max_prompt_length max_completion_length save_steps"
).split()


def test_lines_tell_the_papers_batch_on_8_and_on_4_processes():
    recipe = read_recipe(RECIPE_FOLDER / "paper" / "rankbuffer.yaml")
    paper = {key: recipe[key] for key in PAPER}
    eight, four = (
        "\n".join(plan(processes, 1000, gradient_accumulation_steps=80 // processes, **paper).lines())
        for processes in (8, 4)
    )
    assert recipe["gradient_accumulation_steps"] == 80 // 8
    assert "8 processes x 2 per device x 10 micro steps = 160 rollouts = 20 queries x 8" in eight
    assert "4 x 2 x 20, 5 x 2 x 16, 8 x 2 x 10" in eight and ", 3 x" not in eight and ", 6 x" not in eight
    assert "the context must hold 8,192 with the prompt" in eight
    assert "the run: 200 steps, 4 epochs, 32,000 rollouts" in eight and "checkpoints: save_steps 10," in eight
    assert "4 processes x 2 per device x 20 micro steps = 160 rollouts" in four
