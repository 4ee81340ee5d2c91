"""Load a configuration: files, overlays and overrides in; one checked, frozen object or every problem out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Generic, TypeVar

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel

from fedlora.config import layers as _layers
from fedlora.config.migrate import migrate
from fedlora.config.problems import Origin, Path, Problem, dotted, place_of, raise_problems, shown
from fedlora.config.rules import config_problems, config_warnings
from fedlora.config.schema import FedLoraConfig
from fedlora.config.validate import DISCRIMINATORS, open_problems, section_fields, validate

Model = TypeVar("Model", bound=BaseModel)
VARIABLES = "vars"
"""A top-level section for the file's own variables; interpolations read it, the schema does not."""


@dataclass(frozen=True)
class Loaded(Generic[Model]):
    """A checked configuration and how it came about.

    Attributes:
        config: the frozen configuration.
        origins: for each path the layers that wrote it, lowest precedence first; the last one holds.
        notes: what a reader should know: migrations, keys dropped by a changed `kind`, warnings.
    """

    config: Model
    origins: Mapping[Path, tuple[Origin, ...]]
    notes: tuple[str, ...]

    def overridden(self) -> list[str]:
        """Return one line per value that a higher layer replaced: key, value, place, what it replaced."""
        lines = []
        for path, history in self.origins.items():
            last = history[-1]
            if len(history) > 1 and not isinstance(last.value, Mapping):
                older = ", ".join(f"{shown(path, o.value)} from {o.place()}" for o in reversed(history[:-1]))
                lines.append(f"{dotted(path)} = {shown(path, last.value)} from {last.place()}, over {older}")
        return lines


def load_model(
    model: type[Model],
    path: str | FilePath,
    overrides: Sequence[str] = (),
    overlays: Sequence[str | FilePath] = (),
    *,
    rules: Callable[[Mapping[str, Any]], list[Problem]],
) -> Loaded[Model]:
    """Load any strict model from a file, its overlays and dotted overrides.

    Args:
        model: pydantic model of the whole file.
        path: the file.
        overrides: `dotted.key=value`, later ones win.
        overlays: further files, later ones win over earlier ones and over `path`.
        rules: problems of combinations, from the plain container.

    Raises:
        ConfigError: with every problem found, each with key and place.
    """
    stack, problems = _layers.read_layers(path, overrides, overlays)
    written = {dotted(found) for layer in stack for found, _ in _layers.leaves(layer.values)}
    if any(problem.key not in written for problem in problems):
        raise_problems(problems, str(path))
    origins: _layers.Origins = {}
    merged = OmegaConf.create({})
    notes: list[str] = []
    for layer in stack:
        try:
            merged = _merge_layer(model, merged, layer, origins, notes)
        except (TypeError, ValueError) as error:
            where = dotted(next((p for p, v in _layers.leaves(layer.values) if not isinstance(v, dict)), ()))
            text = f"does not fit what it would replace: {str(error).splitlines()[0]}"
            problems.append(Problem(where or layer.name, text, layer.name))
    container, more = open_problems(merged, origins)
    problems += more
    container.pop(VARIABLES, None)
    container, migrated, more = migrate(container)
    problems += _with_places(more, origins)
    notes += migrated
    config, more = validate(model, container, origins)
    open_keys = {problem.key for problem in problems}
    problems += [problem for problem in more if problem.key not in open_keys]
    problems += _with_places(rules(container), origins)
    raise_problems(problems, str(path))
    if config is None:
        raise TypeError("a configuration without problems is valid")
    return Loaded(config, origins, tuple(notes))


def _with_places(problems: Sequence[Problem], origins: _layers.Origins) -> list[Problem]:
    found = []
    for problem in problems:
        path: Path = tuple(problem.key.split(" ")[0].rstrip(",").split("."))
        found.append(Problem(problem.key, problem.message, problem.place or place_of(path, origins)))
    return found


def _merge_layer(
    model: type[BaseModel],
    base: DictConfig,
    layer: _layers.Layer,
    origins: _layers.Origins,
    notes: list[str],
) -> DictConfig:
    """Merge one layer; where it changes a section's `kind` (or `unit`), drop keys the new kind lacks."""
    below = _layers.plain(base)
    merged = _layers.merge(base, layer)
    container = _layers.plain(merged)
    for path, value in list(_layers.leaves(layer.values)):
        if path[-1] not in DISCRIMINATORS or isinstance(value, dict | list):
            continue
        before = _at(below, path)
        allowed = section_fields(model, path[:-1], container)
        if before is None or before == value or not allowed:
            continue
        section = _at(below, path[:-1])
        given = _at(layer.values, path[:-1])
        for key in [k for k in section if k not in allowed and k not in given]:
            where = place_of((*path[:-1], key), origins)
            notes.append(f"{dotted((*path[:-1], key))} ({where}) is dropped: {dotted(path)} is now {value}")
            _remove(merged, (*path[:-1], key))
            for old in [o for o in origins if o[: len(path)] == (*path[:-1], key)]:
                del origins[old]
    _layers.note_origins(origins, layer)
    return merged


def _at(container: Any, path: Path) -> Any:
    for part in path:
        if not isinstance(container, Mapping) or part not in container:
            return None
        container = container[part]
    return container


def _remove(config: DictConfig, path: Path) -> None:
    node: Any = config
    for part in path[:-1]:
        node = node[part]
    del node[path[-1]]


def load(
    path: str | FilePath,
    overrides: Sequence[str] = (),
    overlays: Sequence[str | FilePath] = (),
    *,
    deployment: bool = False,
) -> Loaded[FedLoraConfig]:
    """Load a run's configuration with its origins and notes; see `load_config`."""
    loaded = load_model(
        FedLoraConfig, path, overrides, overlays, rules=lambda c: config_problems(c, deployment=deployment)
    )
    return Loaded(loaded.config, loaded.origins, (*loaded.notes, *config_warnings(loaded.config)))


def load_config(
    path: str | FilePath,
    overrides: Sequence[str] = (),
    overlays: Sequence[str | FilePath] = (),
    *,
    deployment: bool = False,
) -> FedLoraConfig:
    """Load and check a run's configuration; nothing else is touched.

    Args:
        path: YAML file.
        overrides: `dotted.key=value`, highest precedence, later ones win.
        overlays: further YAML files between the file and the overrides.
        deployment: also apply the rules of real deployments (no seeded noise).

    Returns:
        The frozen configuration.

    Raises:
        ConfigError: listing every problem with its full key and file line.
    """
    return load(path, overrides, overlays, deployment=deployment).config


def config_from_container(
    container: Mapping[str, Any], *, deployment: bool = False, what: str = "configuration"
) -> FedLoraConfig:
    """Check plain JSON values (for example a resolved configuration that came over the wire).

    Raises:
        ConfigError: listing every problem.
    """
    plain, _, problems = migrate(container)
    config, more = validate(FedLoraConfig, plain, {})
    problems = [*problems, *more, *config_problems(plain, deployment=deployment)]
    raise_problems(problems, what)
    if config is None:
        raise TypeError("a configuration without problems is valid")
    return config


def config_container(config: BaseModel) -> dict[str, Any]:
    """Return a configuration as plain JSON values, aliases used, defaults filled in."""
    container: dict[str, Any] = json.loads(config.model_dump_json(by_alias=True))
    return container
