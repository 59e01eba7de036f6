"""What a whole policy takes of each GPU if nothing shares it among the GPUs, and a warning if that is too much.

`accelerate launch` without `--config_file` copies the policy to each GPU. So does one process that sees several.
"""

import os

import torch
from accelerate.logging import get_logger
from transformers import AutoConfig, AutoModelForCausalLM
from trl import ModelConfig

from .config import RankBufferConfig
from .informing import informing

logger = get_logger(__name__)

ZERO3 = 16  # bytes of a parameter: weight and gradient in 2 each, a float32 copy and Adam's two moments in 4 each
ALONE = {True: 8, False: 16}  # the same without a copy, for 16-bit and for float32 weights
SINGLE = ". On a single GPU train LoRA, as recipes/launch/single_gpu_lora.sh does"
LEAST_STEP = 1e-4  # of bfloat16 weights of about 0.02: most smaller steps round to nothing


@informing("the estimate of memory")
def warn_of_memory(args: RankBufferConfig, model_args: ModelConfig) -> None:
    """Warn in one line if each GPU gets the whole policy, and it fills half of the GPU or cannot learn there.

    Activations and logits need the other half. No weights are loaded for this.

    Args:
        args (`RankBufferConfig`):
            The settings of the run.
        model_args (`ModelConfig`):
            The policy.
    """
    shared = args.deepspeed_plugin or args.fsdp or os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if shared or model_args.use_peft or args.use_cpu or not torch.cuda.is_available():
        return
    config = AutoConfig.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(config).num_parameters() / 1e9
    half = str(config.dtype if model_args.dtype == "auto" else model_args.dtype).endswith("16")
    need, room = ALONE[half] * size, torch.cuda.get_device_properties(0).total_memory / 1e9
    lost = half and args.learning_rate < LEAST_STEP
    if need < room / 2 and not lost:
        return
    gpus = args.world_size * args.n_gpu
    share = f"zero3_8gpu.yaml --num_processes {gpus}, which takes {ZERO3 * size / gpus:.0f} GB of each"
    logger.warning(
        f"each GPU gets the whole policy: weights, gradients and Adam of {size:.2g} billion parameters take"
        f" {need:.0f} of its {room:.0f} GB, before activations"
        + (f". 16-bit weights without a float32 copy also lose steps of {args.learning_rate:g}" if lost else "")
        + (f". Launch with --config_file accelerate_configs/{share}" if gpus > 1 else SINGLE)
    )
