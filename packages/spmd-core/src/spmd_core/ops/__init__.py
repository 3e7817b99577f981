"""Lowerings by family: each file turns some ATen overloads into jax; no family imports another."""

import importlib
import pkgutil


def load_all() -> None:
    """Imports every family, so that each registers its lowerings."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
