"""Train a policy with GRPO and RankBuffer rewards. This is the command `rankbuffer-train`.

    accelerate launch --config_file accelerate_configs/zero3_8gpu.yaml \
        recipes/train_rankbuffer.py --config recipes/paper/rankbuffer.yaml

Alone, `accelerate launch recipes/train_rankbuffer.py` trains a tiny policy on the CPU and shows the result.

Every key of the YAML file can also be given on the command line, which wins. `--help` lists the keys.
"""

from rankbuffer_tools.train.command import main

if __name__ == "__main__":
    main()
