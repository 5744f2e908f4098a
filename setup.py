"""The packages of the wheel: those of study/, and folders at the top of a checkout that pyproject.toml puts into it."""

from setuptools import find_packages, setup

BESIDE = ["accelerate_configs", "reports.outside", "reproductions"]

setup(packages=find_packages(include=["study", "study.*"]) + [f"study.{name}" for name in BESIDE])
