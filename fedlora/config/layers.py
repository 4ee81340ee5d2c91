"""Read configuration files and dotted overrides, merge them, and remember where each value came from.

Precedence: file < overlays in their order < overrides in their order. OmegaConf parses and merges, so
`1e-5`, `1E-5` and `.5e-3` are the same floats in a file and on the command line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedlora.config.problems import Origin, Path, Problem, dotted, shown

_KEY = re.compile(r"^[A-Za-z_][\w-]*(\.[\w-]+)*$")
_OCTAL = re.compile(r"^[-+]?0[0-9_]+$")
_SEXAGESIMAL = re.compile(r"^[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?$")
_ODD_KEYS = frozenset({"tag:yaml.org,2002:null", "tag:yaml.org,2002:bool"})
_MERGE = "tag:yaml.org,2002:merge"
MAX_FILE_BYTES = 4_000_000
OPEN = "???"
"""A value that someone must still give."""

Origins = dict[Path, tuple[Origin, ...]]


@dataclass(frozen=True)
class Layer:
    """One source of values: its name, nested plain values, and the line of each path."""

    name: str
    values: Mapping[str, Any]
    lines: Mapping[Path, int]


def read_layer(path: str | FilePath) -> tuple[Layer, list[Problem]]:
    """Read one YAML file; faults of the file itself come back as problems with their line."""
    file = FilePath(path)
    name = file.name
    empty = Layer(name, {}, {})
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            return empty, [Problem(name, f"larger than {MAX_FILE_BYTES} bytes; is this a configuration?")]
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return empty, [Problem(name, "is not UTF-8 text; save it as UTF-8")]
    except OSError as error:
        return empty, [Problem(str(file), f"cannot be read: {error.strerror or error}")]
    return read_text(text, name)


def read_text(text: str, name: str) -> tuple[Layer, list[Problem]]:
    """Parse YAML text as one layer."""
    empty = Layer(name, {}, {})
    lines: dict[Path, int] = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        unreadable = [] if node is None else list(_unreadable(node, (), name, set()))
        if unreadable:
            return empty, unreadable
        loaded = OmegaConf.create(text) if node is not None else OmegaConf.create({})
    except yaml.YAMLError as error:
        return empty, [_yaml_problem(error, name, text)]
    except (OmegaConfBaseException, ValueError, RecursionError) as error:
        return empty, [Problem(name, f"cannot be parsed: {str(error).splitlines()[0]}")]
    if not isinstance(loaded, DictConfig) or not isinstance(node, yaml.MappingNode | None):
        return empty, [Problem(name, "must hold `key: value` pairs at the top", f"{name}:1")]
    problems = list(_walk_marks(node, (), lines, name)) if node is not None else []
    return Layer(name, plain(loaded), lines), problems


def plain(config: DictConfig) -> dict[str, Any]:
    """Return plain nested values, interpolations unresolved, keys as text."""
    container = OmegaConf.to_container(config, resolve=False)
    return {str(key): value for key, value in container.items()} if isinstance(container, dict) else {}


def _yaml_problem(error: yaml.YAMLError, name: str, text: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or "cannot be parsed"
    lines = text.splitlines()
    line = lines[mark.line] if mark is not None and mark.line < len(lines) else ""
    hint = "; quote ??? and ${...} inside braces" if "???" in line or "${" in line else ""
    return Problem(
        name, f"not valid YAML: {reason}{hint}", f"{name}:{mark.line + 1}" if mark is not None else ""
    )


def _unreadable(node: yaml.Node, path: Path, name: str, seen: set[int]) -> Iterator[Problem]:
    """Yield keys that YAML reads as null or a truth value, and interpolations that OmegaConf cannot parse."""
    if id(node) in seen:
        return  # an alias: looked at where its anchor is, however often and wherever it is used
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.tag in _ODD_KEYS and isinstance(key, yaml.ScalarNode):
                read = "null" if key.tag.endswith("null") else "true or false"
                text = f"YAML reads this key as {read}; put it in quotes, or correct it"
                yield Problem(dotted((*path, key.value)), text, f"{name}:{key.start_mark.line + 1}")
            yield from _unreadable(value, (*path, str(key.value)), name, seen)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _unreadable(value, (*path, index), name, seen)
    elif isinstance(node, yaml.ScalarNode) and "${" in node.value:
        try:
            OmegaConf.create({"value": node.value})
        except OmegaConfBaseException as error:
            reason = (str(error).splitlines() or ["not an interpolation"])[0]
            text = f"{shown(path, node.value)} is no interpolation that can be read: {reason}"
            yield Problem(dotted(path), text, f"{name}:{node.start_mark.line + 1}")


def _walk_marks(node: yaml.Node, path: Path, lines: dict[Path, int], name: str) -> Iterator[Problem]:
    """Record the line of every path; yield numbers that YAML 1.1 reads in base 8 or 60."""
    if isinstance(node, yaml.MappingNode):
        merged = [value for key, value in node.value if key.tag == _MERGE]
        for value in merged:  # `<<: *anchor`: its keys stand here, under the lines of the anchor
            for part in reversed(value.value) if isinstance(value, yaml.SequenceNode) else (value,):
                yield from _walk_marks(part, path, lines, name)
        for key, value in node.value:
            if key.tag == _MERGE:
                continue
            here = (*path, str(key.value))
            lines[here] = key.start_mark.line + 1
            yield from _walk_marks(value, here, lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[*path, index] = value.start_mark.line + 1
            yield from _walk_marks(value, (*path, index), lines, name)
    elif isinstance(node, yaml.ScalarNode) and node.style is None and _odd_base(node.value):
        text = f"{node.value} would be read in base 8 or 60; write a plain number, or quote a text"
        yield Problem(dotted(path), text, f"{name}:{node.start_mark.line + 1}")


def _odd_base(text: str) -> bool:
    return _OCTAL.match(text) is not None or _SEXAGESIMAL.match(text) is not None


def split_overrides(text: str) -> tuple[str, ...]:
    """Split one string of overrides at spaces, as a shell does.

    Example:
        >>> split_overrides("run.name=a privacy.target_epsilon=3")
        ('run.name=a', 'privacy.target_epsilon=3')
    """
    return tuple(shlex.split(text))


def read_override(text: str) -> tuple[Layer, list[Problem]]:
    """Parse one `dotted.key=value`; the value is YAML, as in a file."""
    empty = Layer("command line", {}, {})
    key, equals, raw = text.partition("=")
    key = key.strip()
    if equals == "" or _KEY.match(key) is None:
        return empty, [Problem(text, "is not an override; write section.key=value", "command line")]
    if raw.strip() == "":
        return empty, [Problem(key, f"has no value; write {key}=null to clear it", "command line")]
    layer, problems = read_text(f"value: {raw}", "command line")
    if problems or set(layer.values) != {"value"}:
        reason = problems[0].message if problems else "not valid YAML"
        text = f"the value {raw!r} cannot be read: {reason}; quote it if it is a text"
        return empty, [Problem(key, text, "command line")]
    path: Path = tuple(key.split("."))
    value: Any = layer.values["value"]
    for part in reversed(path):
        value = {str(part): value}
    return Layer("command line", value, {}), []


def read_layers(
    path: str | FilePath, overrides: Sequence[str], overlays: Sequence[str | FilePath]
) -> tuple[list[Layer], list[Problem]]:
    """Read the file, its overlays and the overrides, lowest precedence first."""
    layers, problems = [], []
    for source in (path, *overlays):
        layer, faults = read_layer(source)
        layers.append(layer)
        problems.extend(faults)
    for text in overrides:
        layer, faults = read_override(text)
        layers.append(layer)
        problems.extend(faults)
    return layers, problems


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (path, value) for every node below `value`, containers included, parents first."""
    if path:
        yield path, value
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from leaves(child, (*path, str(key)))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from leaves(child, (*path, index))


def note_origins(origins: Origins, layer: Layer) -> None:
    """Append this layer's places to the history of every path that it writes."""
    for path, value in leaves(layer.values):
        origin = Origin(layer.name, layer.lines.get(path), value)
        origins[path] = (*origins.get(path, ()), origin)


def merge(base: DictConfig, layer: Layer) -> DictConfig:
    """Return base with the layer on top (mappings merge, lists and values are replaced).

    OmegaConf keeps the lower value where the higher layer's is open (`???`). Here an open value replaces it
    as any other does: it is then refused, instead of being shown and not used.
    """
    merged = OmegaConf.merge(base, OmegaConf.create(dict(layer.values)))
    if not isinstance(merged, DictConfig):
        raise TypeError("a mapping merged with a mapping is a mapping")
    for path, value in leaves(layer.values):
        if value == OPEN and all(isinstance(part, str) for part in path):
            section: Any = merged
            for part in path[:-1]:
                section = section[part]
            section[path[-1]] = OPEN
    return merged
