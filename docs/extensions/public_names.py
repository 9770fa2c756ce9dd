"""Every public class and function has its place in the reference: one that is missing is a warning."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

PACKAGES = ("ops", "search", "qa", "rollout", "diagnostics", "evaluation", "sandbox", "recipe", "trainers")
logger = logging.getLogger(__name__)


def warn_of_missing(app: Sphinx, env: BuildEnvironment) -> None:
    documented = env.get_domain("py").objects  # type: ignore[attr-defined]
    for package in ("sorl_trl", *(f"sorl_trl.{name}" for name in PACKAGES)):
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            is_documented = any(f"{at}.{name}" in documented for at in (package, "sorl_trl", value_home(value)))
            if (inspect.isclass(value) or inspect.isfunction(value)) and not is_documented:
                logger.warning("%s.%s is public, but no page of the reference shows it", package, name)


def value_home(value: Any) -> str:
    return str(getattr(value, "__module__", ""))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("env-check-consistency", warn_of_missing)
    return {"parallel_read_safe": True}
