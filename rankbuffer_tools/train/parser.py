"""The parser of `rankbuffer-train`: recipes, and a help that begins with our own keys."""

import argparse
import os
import sys
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import fields
from datetime import date

from datasets import config as datasets_config
from huggingface_hub import constants
from trl import GRPOConfig, ModelConfig, ScriptArguments, TrlParser

from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge.config import BudgetConfig
from rankbuffer_trl.training import RankBufferConfig

from ..batch.recipes import find_recipe, no_such_key, overlay, read_recipe, take_option

JUDGE_FIELDS = {field.name for field in fields(BudgetConfig)}
RANKBUFFER_FIELDS = (
    {field.name for field in fields(RankBufferConfig)} - {field.name for field in fields(GRPOConfig)} - JUDGE_FIELDS
)
COMMON = (  # of TRL and transformers
    "dataset_name model_name_or_path output_dir resume_from_checkpoint num_generations max_completion_length"
    " temperature per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps learning_rate"
    " loss_type use_vllm vllm_mode use_peft save_steps report_to push_to_hub hub_private_repo seed"
).split()
SECTIONS = {
    "reward, prompts and answers, start": RANKBUFFER_FIELDS,
    "judge": JUDGE_FIELDS,
    "data, policy and training (the most common keys of TRL)": COMMON,
}
NO_DATA = (
    "dataset_name is not set, and no recipe is named that sets it. The paper's main run: accelerate launch"
    " --config_file accelerate_configs/zero3_8gpu.yaml recipes/train_rankbuffer.py"
    " --config recipes/paper/rankbuffer.yaml"
)
SETTINGS_GROUPS = (ScriptArguments, RankBufferConfig, ModelConfig)
KEYS = [field.name for group in SETTINGS_GROUPS for field in fields(group)]


class RecipeParser(TrlParser):
    """TRL's parser for the settings of a training, with recipes, and errors of one line.

    Example:
        >>> RecipeParser().parse_args_and_config(["--config", "paper/rankbuffer.yaml", "--seed", "1"])
    """

    def __init__(self) -> None:
        usage = "rankbuffer-train [--config RECIPE.yaml] [--key value ...]"
        super().__init__(SETTINGS_GROUPS, prog="rankbuffer-train", usage=usage, allow_abbrev=False)
        what = "show the keys of TRL and transformers, too"
        self.add_argument("--help_all", action="store_true", default=argparse.SUPPRESS, help=what)

    def parse_args_and_config(self, args: Iterable[str] | None = None) -> tuple:
        """Read the command line and the recipe that `--config` names, one object per group. The command line wins.

        Raises:
            [`SettingsError`]: for a recipe or a key that does not exist, or a value that cannot work.
        """
        name, arguments = take_option(sys.argv[1:] if args is None else args, "config")
        unknown: list[str] = []
        if "--help_all" in arguments:
            print(super().format_help())
            self.exit()
        if name is None and not arguments:  # else the first message is about a GPU
            raise SettingsError(NO_DATA)
        if name is not None:
            # Another method must not get the arguments of the recipe's.
            typed = {key: take_option(arguments, key)[0] for key in ("method", "method_args")}
            recipe = read_recipe(find_recipe(name))
            if not isinstance(environment := recipe.pop("env", None) or {}, dict):
                raise SettingsError("env must be a mapping of variables to values, such as env: {WANDB_MODE: offline}")
            self._set_environment({str(key): str(value) for key, value in environment.items()})
            merged = overlay(recipe, {key: value for key, value in typed.items() if value is not None})
            # A folder `2026-11-26` is a date to YAML. On the command line it is a text.
            texts = {action.dest for action in self._actions if action.type is str}
            for key in texts & merged.keys():
                merged[key] = str(merged[key]) if type(merged[key]) in (int, float, date) else merged[key]
            unknown = self.set_defaults_with_config(**merged)[::2]
        unknown += self.parse_known_args(arguments)[1]
        if unknown:
            self.error(no_such_key(unknown[0].lstrip("-").partition("=")[0], KEYS))
        try:
            return self.parse_args_into_dataclasses(arguments)
        except ValueError as error:
            raise SettingsError(" ".join(str(error).split())) from error  # TRL's words may have several lines

    def _set_environment(self, variables: Mapping[str, str]) -> None:
        for key, value in variables.items():
            read = hasattr(constants, key) or hasattr(datasets_config, key)  # when they were imported
            if read and os.environ.get(key) != value:
                raise SettingsError(
                    f"env has {key}, which is read before a recipe: export it, and leave it out of env"
                )
        os.environ.update(variables)

    def error(self, message: str):
        """Raise a [`SettingsError`]."""
        # Not the usage, which has several hundred options.
        raise SettingsError(f"{message.rstrip('?.')}. `{self.prog} --help` shows the keys")

    def format_help(self) -> str:
        """Return the help on the keys of this project, and on the most common ones of TRL."""
        short = argparse.ArgumentParser(
            usage=self.usage,
            description="Train a policy with GRPO and RankBuffer rewards. Each key can stand in a recipe, too.",
            epilog="--help_all shows the keys of TRL and transformers, too. docs/configuration.md describes all keys.",
            formatter_class=self.formatter_class,
            add_help=False,
        )
        for title, keys in SECTIONS.items():
            section = short.add_argument_group(title)
            for action in self._actions:
                # `--no_` is the other spelling of a Boolean key.
                if action.dest in keys and not action.option_strings[0].startswith("--no_"):
                    once = copy(action)  # without its second spelling, `--output-dir`
                    once.option_strings = action.option_strings[:1]
                    section._add_action(once)
        return short.format_help()
