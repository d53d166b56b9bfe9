"""`module:attribute` on a command line: the user's own consumer or function, out of a module that is imported here."""

from __future__ import annotations

import importlib
import operator
import os
import sys
from typing import Any

import dedup


def find(target: str, what: str, example: str) -> Any:
    """What `module:attribute` names; modules are also looked for in the working directory.

    Args:
        what: names it in errors, as in "consumer".
        example: a target as it should be.

    Raises:
        ConfigError: it is not there, or its module imports something that is not.
    """
    module, _, attribute = target.partition(":")
    if not module or not attribute or module.startswith("."):
        raise dedup.ConfigError(f"{target!r} does not say where the {what} is. Give module:attribute, as in `{example}`.")
    sys.path.insert(0, os.getcwd())
    try:
        return operator.attrgetter(attribute)(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise dedup.ConfigError(f"Module {module!r} imports {error.name!r}, which is not there: install it here.") from error
        raise dedup.ConfigError(f"There is no module {module!r}. Start the command in the folder that it is in.") from error
    except AttributeError as error:
        raise dedup.ConfigError(f"Module {module!r} has no {attribute!r}: {error}.") from error
