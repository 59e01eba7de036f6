# The tested versions in one image: training, judge and rollout server. It was built nowhere yet; tests check its paths.
#
#   docker build --tag rankbuffer .
#   alias rankbuffer='docker run --rm --init --gpus all --network host --ipc host --env OPENAI_API_KEY \
#       --volume "$HOME/.cache/huggingface:/root/.cache/huggingface" \
#       --volume "$PWD/data:/rankbuffer/data" --volume "$PWD/runs:/rankbuffer/runs" rankbuffer'
#
#   rankbuffer recipes/launch/one_node.sh judge                       # the judge alone, on GPUs 6 and 7
#   rankbuffer vllm serve Qwen/Qwen3-8B --host 127.0.0.1 --port 8000 [options of recipes/README.md]   # the rollout server
#   rankbuffer recipes/launch/one_node.sh --output_dir runs/first     # judge, rollout server and training
#
# With the network of the machine, servers stay on its loopback address.
FROM python:3.12-slim

# Triton compiles with gcc. The launch scripts need curl and ps (procps).
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential curl procps \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /rankbuffer
COPY requirements.txt pyproject.toml setup.py README.md LICENSE ./
COPY rankbuffer_trl rankbuffer_trl
COPY rankbuffer_tools rankbuffer_tools
COPY evaluation evaluation
COPY accelerate_configs accelerate_configs
COPY recipes recipes
RUN pip install --no-cache-dir --requirement requirements.txt --editable '.[vllm,tools,trackio]'

# Else vLLM compiles a kernel with nvcc, which this image has not.
ENV VLLM_USE_FLASHINFER_SAMPLER=0

CMD ["recipes/launch/one_node.sh"]
