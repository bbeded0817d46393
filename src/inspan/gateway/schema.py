"""Does a tool call fit its tool? Contract: pure; says what is wrong, changes nothing.

An invalid call goes to the harness as the model wrote it and is *marked*: repairing it, or forbidding it by constrained
decoding, would train another behaviour than the one that ships. Checked are the tool's name, that the arguments are a
JSON object, and the object's required, known and top-level typed properties. A property is unknown when the schema
lists properties and does not set `additionalProperties`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from inspan.gateway.render import ParsedCall

_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def call_error(call: ParsedCall, functions: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Why a call cannot be executed with the tools on offer, or None."""
    if call.error is not None:
        return call.error
    function = functions.get(call.name)
    if function is None:
        known = ", ".join(sorted(functions)) or "none were offered"
        return f"there is no tool {call.name!r}; tools: {known}"
    schema = function.get("parameters")
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError) as error:
        return f"the arguments are not JSON: {error}"
    if not isinstance(arguments, dict):
        return "the arguments are not an object"
    return None if schema is None else _misfit(arguments, schema)


def _misfit(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in arguments:
            return f"the argument {name!r} is missing"
    for name, value in arguments.items():
        if name not in properties:
            if not schema.get("additionalProperties", not properties):
                return f"there is no argument {name!r}"
            continue
        wanted = properties[name].get("type") if isinstance(properties[name], dict) else None
        if wanted is not None and not _fits(value, wanted):
            return f"the argument {name!r} must be of type {wanted}, not {type(value).__name__}"
    return None


def _fits(value: Any, wanted: Any) -> bool:
    for one in wanted if isinstance(wanted, list) else [wanted]:
        kinds = _TYPES.get(one) if isinstance(one, str) else None
        if kinds is None:
            return True  # a type this check does not know: not ours to refuse
        if isinstance(value, bool) and one != "boolean":
            continue
        if isinstance(value, kinds) or (one == "integer" and isinstance(value, float) and value.is_integer()):
            return True
    return False
