"""The recipe: what a run depends on, as validated data. Imports no torch and no other room but `errors`."""

from inspan.config.load import dump_toml, from_dict, load, parse_override
from inspan.config.objects import load_object
from inspan.config.recipe import Recipe
from inspan.config.sections import (
    KL,
    Agent,
    Arm,
    EngineSection,
    Eval,
    Limits,
    Lora,
    Reward,
    RolloutSection,
    Sampling,
    Stage,
    Tasks,
    Train,
    Weight,
)

__all__ = [
    "KL",
    "Agent",
    "Arm",
    "EngineSection",
    "Eval",
    "Limits",
    "Lora",
    "Recipe",
    "Reward",
    "RolloutSection",
    "Sampling",
    "Stage",
    "Tasks",
    "Train",
    "Weight",
    "dump_toml",
    "from_dict",
    "load",
    "load_object",
    "parse_override",
]
