"""Keep the base weights of an adapter exact while TRL sends the merged weights to vLLM.

TRL merges the adapter into the base, sends all weights, and takes the adapter out again. Both round, so the base
drifts. A resumed run would begin with the base as it was loaded.
"""

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer


def keep_base_exact(policy: PeftModel) -> None:
    """Let `unmerge_adapter` put back the weights that `merge_adapter` found."""
    merge, unmerge = policy.merge_adapter, policy.unmerge_adapter
    merged: list[tuple[torch.nn.Module, str, torch.nn.Parameter, torch.Tensor]] = []

    def merge_adapter(*args, **kwargs) -> None:
        if merged:  # the last transfer failed halfway, so the adapter is still in the base
            unmerge_adapter()
        bases = {layer.get_base_layer() for layer in policy.modules() if isinstance(layer, BaseTunerLayer)}
        weights = [(base, *named) for base in bases for named in base.named_parameters(recurse=False)]
        merged[:] = [(base, name, weight, part(weight).to("cpu", copy=True)) for base, name, weight in weights]
        merge(*args, **kwargs)

    def unmerge_adapter() -> None:
        unmerge()
        for base, name, weight, exact in merged:
            setattr(base, name, weight)  # a merge into quantised weights makes another parameter
            part(weight).copy_(exact)
        merged.clear()

    policy.merge_adapter, policy.unmerge_adapter = merge_adapter, unmerge_adapter


def part(weight: torch.nn.Parameter) -> torch.Tensor:
    """Return what this process keeps of a weight."""
    return getattr(weight, "ds_tensor", weight).data  # of ZeRO-3: `weight` itself is gathered for TRL
