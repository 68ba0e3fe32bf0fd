"""Recipes: the settings that models of a kind are trained with (knowledge/recipes.toml). The row of a model in MODELS
names its recipe.

Settings that a recipe does not set are derived or have a default. A setting of the user overrides the recipe;
`training/defaults/derive.py` records the name of the recipe as the reason of each value.
"""

import functools

from stoker.config.settings import Config, from_fields
from stoker.knowledge import read_toml


@functools.cache
def read_recipes() -> dict[str, Config]:
    """Name → a partial config."""
    return {name: from_fields(fields) for name, fields in read_toml("recipes.toml").items()}
