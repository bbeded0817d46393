"""Finding the user's own functions. Contract: `module:function` names an object, or a RecipeError says what is missing.

The recipe's folder and the working directory are searched, as `python file.py` would; nothing is left on `sys.path`
twice.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inspan.config.recipe import nearest
from inspan.errors import RecipeError


def load_object(spec: str, python_path: Sequence[str] = (), *, what: str = "object") -> Any:
    """The object that `module:name` names; `what` ("harness", "reward") is used in errors.

    Raises RecipeError when the module or name is missing, or when importing it fails.
    """
    module_name, colon, name = spec.partition(":")
    if not colon or not module_name or not name:
        raise RecipeError(f'{what} "{spec}" is not of the form module:name', hint='e.g. "my_agent:run"')
    for folder in [*python_path, str(Path.cwd())]:
        if folder not in sys.path:
            sys.path.append(folder)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            places = ", ".join(dict.fromkeys([*python_path, str(Path.cwd())]))
            raise RecipeError(f"no module {error.name!r} for {what} {spec!r}", hint=f"searched {places}") from None
        raise RecipeError(
            f"{what} {spec!r} imports {error.name!r}, which is not installed", hint="install it"
        ) from error
    except (Exception, SystemExit) as error:  # a script without a main guard exits when it is imported
        raise RecipeError(
            f"importing {what} {spec!r} failed: {type(error).__name__}: {error}", hint="mend it"
        ) from error
    if not hasattr(module, name):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        close = nearest(name, names)
        hint = f'did you mean "{module_name}:{close}"?' if close else f"it has {', '.join(names) or 'no functions'}"
        raise RecipeError(f"module {module_name!r} has no {name!r} for {what}", where=module.__file__, hint=hint)
    return getattr(module, name)
