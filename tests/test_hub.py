"""Push, pull, resume: what goes to the Hub, and that a run goes on from there as if it had never moved."""

import re
import zipfile
from concurrent.futures import Future
from unittest.mock import Mock

import pytest
import transformers.trainer
from accelerate import PartialState
from datasets import load_dataset
from helpers.checkpoints import why_torn
from helpers.fake_hub import FolderHub
from helpers.sampled import interrupt_at, same, train
from helpers.scripted import config
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rankbuffer_trl.checkpointing._trainer import warn_of_push
from rankbuffer_trl.checkpointing.manifest import FOLDER, RUN, CheckpointError
from rankbuffer_trl.data._queries import load_queries
from rankbuffer_trl.monitoring._buffer_table import TABLE_FILE
from rankbuffer_trl.monitoring._card_template import on_hub, public
from rankbuffer_trl.monitoring._model_card import write_model_card
from rankbuffer_trl.store._places import read_store
from rankbuffer_trl.training._trainer import RankBufferTrainer

REPO = "somebody/ranked"
PUSH = dict(push_to_hub=True, hub_model_id=REPO, hub_token="hf_secret")
STORE = f"{FOLDER}/{RUN}"
ROOT_FILES = {"README.md", "config.json", "model.safetensors", STORE, TABLE_FILE}


@pytest.fixture
def hub(tmp_path, monkeypatch) -> FolderHub:
    hub = FolderHub(tmp_path / "hub")
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub)
    return hub


def steps(path) -> int:
    store = read_store(path)
    last = store.last_step()
    store.close()
    return last + 1


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.mark.slow
@pytest.mark.parametrize("peft", [None, LORA], ids=["policy", "lora"])
def test_push_of_a_run_lets_it_go_on_on_another_machine(tmp_path, tiny_policy, rows, hub, peft):
    """In its second epoch."""
    weights, library = ("adapter_model", "peft") if peft else ("model", "transformers")

    def run(folder, resume=None, callback=None, **settings):
        settings |= dict(weights=weights, peft=peft, max_steps=6, save_steps=5)
        return train(tmp_path / folder, tiny_policy, rows, resume, callback, **settings)

    whole = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("here", callback=interrupt_at(6), hub_strategy="checkpoint", **PUSH)
    files = {f"{weights}.safetensors", STORE}
    assert hub.files(REPO) >= files | {f"last-checkpoint/{name}" for name in files}
    assert len([name for name in hub.files(REPO) if name.endswith("model.safetensors")]) == 2, "an adapter is alone"
    assert ModelCard.load(hub.root / REPO / "README.md").data.library_name == library
    hub.snapshot_download(REPO, tmp_path / "there", "last-checkpoint/*")
    pulled = tmp_path / "there" / "last-checkpoint"
    assert list((tmp_path / "there").iterdir()) == [pulled] and steps(pulled) == 5

    card = (hub.root / REPO / "README.md").read_text()
    (checkpoint,) = re.findall(r"--resume_from_checkpoint runs/resumed/(\S+)", card)
    with pytest.raises(CheckpointError, match=r"every push would upload it again.*_from_hub"):
        run("there", resume=str(pulled), hub_strategy="checkpoint", **PUSH)
    assert steps(hub.root / REPO / "last-checkpoint") == 5 and checkpoint == "_from_hub/last-checkpoint"
    (tmp_path / "there" / "_from_hub").mkdir()
    pulled.rename(tmp_path / "there" / checkpoint)
    resumed = run("there", resume=str(tmp_path / "there" / checkpoint), hub_strategy="checkpoint", **PUSH)
    assert same(resumed, whole)
    assert steps(hub.root / REPO / "last-checkpoint") == 6, "the newest, and not the one it was resumed from"
    assert not any("_from_hub" in name for name in hub.files(REPO))
    if peft:
        assert any(weight.abs().max() > 0 for name, weight in resumed[1].items() if "lora_B" in name)
        policy = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_policy), hub.root / REPO)
        assert {name.replace(".default", "") for name in policy.state_dict() if "lora" in name} == set(resumed[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "also"), [("every_save", set()), ("all_checkpoints", {f"checkpoint-{n}/{STORE}" for n in (2, 4)})]
)
def test_push_holds_policy_buffers_and_card_of_one_step(tmp_path, training, hub, strategy, also):
    seen = []
    upload = hub.upload_folder

    def watch(**kwargs):
        done = upload(**kwargs)
        if not kwargs.get("path_in_repo"):
            card = (hub.root / REPO / "README.md").read_text()
            (step,) = re.findall(r"step (\d+) of 4, epoch", card)
            weights = load_file(hub.root / REPO / "model.safetensors")
            saved = load_file(tmp_path / "run" / f"checkpoint-{step}" / "model.safetensors")
            assert all((weights[name] == saved[name]).all() for name in weights)
            seen.append((int(step), steps(hub.root / REPO)))
        return done

    hub.upload_folder = watch
    training("run", max_steps=4, save_strategy="steps", save_steps=2, hub_strategy=strategy, **PUSH).train()
    assert seen == [(2, 2), (4, 4)]
    files = hub.files(REPO)
    assert files >= ROOT_FILES | also
    assert not any("_rankbuffer" in name for name in files)
    assert {name for name in files if name.startswith("checkpoint-") and name.endswith(STORE)} == also


def test_push_that_fails_is_named_as_one_and_its_checkpoint_is_whole(tmp_path, tiny_policy, rows, hub):
    hub.upload_folder = Mock(side_effect=OSError("the push failed"))
    with pytest.raises(OSError, match=r"^the push failed$"):
        train(tmp_path / "run", tiny_policy, rows, max_steps=2, save_steps=2, **PUSH)
    assert why_torn(tmp_path / "run" / "checkpoint-2") is None


def test_a_checkpoint_that_does_not_reach_the_hub_is_named(caplog):
    PartialState()  # which a training has
    failed, whole, cancelled = Future(), Future(), Future()
    failed.set_exception(OSError("403: no\nmore"))
    whole.set_result("url")
    cancelled.cancel()
    for job in (failed, whole, cancelled):
        job.add_done_callback(warn_of_push)
    (line,) = caplog.messages
    assert line.endswith("a checkpoint did not reach the Hub, and the run goes on: 403: no")


def test_no_file_of_a_run_holds_its_token(tmp_path, tiny_policy, rows, hub):
    settings = dict(max_steps=1, save_strategy="steps", save_steps=1, hub_strategy="all_checkpoints", **PUSH)
    trainer = RankBufferTrainer(tiny_policy, config(tmp_path / "run", **settings), rows)
    trainer.train()
    trainer.save_state()
    trainer.push_to_hub()
    trainer.close()
    assert trainer.args.hub_token == PUSH["hub_token"], "the pushes have it"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {path.relative_to(tmp_path).as_posix() for path in files if path.name == "training_args.bin"}
    assert names >= {f"{at}/training_args.bin" for at in ("run", "run/checkpoint-1", f"hub/{REPO}/checkpoint-1")}
    for path in files:
        contents = [path.read_bytes()]
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                contents += map(archive.read, archive.namelist())
        assert not any(PUSH["hub_token"].encode() in each for each in contents), path


def test_push_to_hub_pushes_everything_once(tmp_path, training, hub, monkeypatch):
    settings = dict(max_steps=2, save_strategy="steps", save_steps=1, hub_strategy="end", method="pointwise", **PUSH)
    settings["chat_template_kwargs"] = {"enable_thinking": False}
    trainer = training("run", RankBufferTrainer, dataset_name="somebody/queries", **settings)
    trainer.train()
    assert hub.uploads == []
    trainer.save_state()
    card = Mock(side_effect=write_model_card)
    monkeypatch.setattr("rankbuffer_trl.training._trainer.write_model_card", card)
    trainer.push_to_hub()
    assert card.call_count == 1 and (tmp_path / "run" / "trainer_state.json").is_file()
    assert [path for path, _ in hub.uploads] == [""]
    assert hub.files(REPO) & ROOT_FILES == ROOT_FILES - {TABLE_FILE}, "this method has no buffers"
    assert steps(hub.root / REPO) == 2
    card = (hub.root / REPO / "README.md").read_text()
    assert "datasets: somebody/queries" in card and "anchors" not in card
    assert "| chat template | `{'enable_thinking': False}` |" in card


@pytest.fixture(scope="module")
def published(tmp_path_factory, tiny_policy, data_file):
    """The repository of a run with secrets and local names."""
    folder = tmp_path_factory.mktemp("published")
    hub = FolderHub(folder / "hub")
    settings = dict(num_train_epochs=1, save_strategy="no", hub_strategy="checkpoint", method_args={"k0": 3}, **PUSH)
    args = config(folder / "run", per_device_train_batch_size=96, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.trainer, "hf_api", lambda: hub)
        data = load_queries(str(data_file))
        trainer = RankBufferTrainer(tiny_policy, args, data, dataset_name=str(folder / "mine.jsonl"))
        trainer.train()
        trainer.push_to_hub()
        trainer.close()
    return hub.root / REPO


def test_write_card_says_what_was_done_and_nothing_of_the_machine(published):
    card = ModelCard.load(published / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.base_model is None and card.data.datasets is None
    assert {"trl", "grpo", "rankbuffer"} <= set(card.data.tags)
    text = card.text
    for part in ("`rankbuffer` (k0: 3, ", "mine.jsonl, 12 queries", "the embedded rubric judge", "8 a query", "dapo"):
        assert part in text, part
    assert "@inproceedings{yang2027rankbuffer" in text
    assert "chat template" not in text
    assert "cannot be continued exactly" in text, "no checkpoint is pushed without save_strategy"
    store = read_store(published)
    ((calls, tokens),) = store.rows("SELECT count(*), sum(prompt_tokens + completion_tokens) FROM calls")
    store.close()
    assert f"| all | {calls:,} | {tokens:,} |" in text
    assert str(published.parent.parent.parent) not in text and "hf_secret" not in text


def test_write_card_shows_code_that_reads_the_buffers(published, monkeypatch):
    """As on a machine without this package."""
    card = ModelCard.load(published / "README.md")
    hub = f"hf://{REPO}/"

    def load(builder, data_files, split):
        assert data_files.startswith(hub)
        return load_dataset(builder, data_files=str(published / data_files.removeprefix(hub)), split=split)

    monkeypatch.setattr("datasets.load_dataset", load)
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", card.text, re.DOTALL) if "load_dataset" in code]
    names = {}
    exec(code, names)
    store = read_store(published)
    for query_id in store.query_ids():
        ranked = [row["text"] for row in names["anchors"] if row["query_id"] == query_id]
        assert ranked == [anchor.text for anchor in store.load(query_id).anchors] and len(ranked) >= 3
    assert len(store.query_ids()) == 12
    store.close()


def test_on_hub_and_public_tell_which_names_may_be_published(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "local").touch()
    assert on_hub("Qwen/Qwen3-8B") and not on_hub("data/local") and not on_hub("/models/judge") and not on_hub(None)
    names = {"Qwen/Qwen3-8B": "Qwen/Qwen3-8B", "/models/judge": "judge", "data/local": "local", "judge": "judge"}
    assert {name: public(name) for name in names} == names
