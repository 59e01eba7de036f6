"""Build the package that pyproject.toml describes."""

from setuptools import setup

setup()
