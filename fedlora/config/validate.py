"""Turn strict pydantic validation into a full list of problems with keys, places and hints."""

from __future__ import annotations

import difflib
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from fedlora.config.layers import OPEN, Origins, leaves
from fedlora.config.problems import Path, Problem, dotted, place_of, shown

Model = TypeVar("Model", bound=BaseModel)
DISCRIMINATORS = ("kind", "unit")


def open_problems(config: DictConfig, origins: Origins) -> tuple[dict[str, Any], list[Problem]]:
    """Resolve every interpolation; each open (`???`) value or failing interpolation is one problem.

    Args:
        config: merged configuration, unresolved.
        origins: places of the values.

    Returns:
        (plain container; open values are left out, problems).
    """
    raw = OmegaConf.to_container(config, resolve=False)
    problems: list[Problem] = []
    result = _resolve(config, raw, (), origins, problems)
    return (result if isinstance(result, dict) else {}), problems


class _Open:
    """Marks a value that is not there."""


def _resolve(node: Any, raw: Any, path: Path, origins: Origins, problems: list[Problem]) -> Any:
    if isinstance(raw, dict):
        found = {str(k): _child(node, k, v, (*path, str(k)), origins, problems) for k, v in raw.items()}
        return {key: value for key, value in found.items() if not isinstance(value, _Open)}
    if isinstance(raw, list):
        items = [_child(node, i, v, (*path, i), origins, problems) for i, v in enumerate(raw)]
        return [item for item in items if not isinstance(item, _Open)]
    return raw


def _child(node: Any, key: Any, raw: Any, path: Path, origins: Origins, problems: list[Problem]) -> Any:
    where = place_of(path, origins)
    if isinstance(raw, str) and raw.strip() == OPEN:
        problems.append(Problem(dotted(path), "is still open (???); give it a value", where))
        return _Open()
    if isinstance(raw, str) and "${" in raw:
        try:
            value = node[key]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except (OmegaConfBaseException, ValueError, RecursionError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            problems.append(Problem(dotted(path), f"{raw} cannot be resolved: {reason}", where))
            return _Open()
        if isinstance(value, str) and value.strip() == OPEN:
            problems.append(Problem(dotted(path), f"{raw} leads to an open value (???)", where))
            return _Open()
        return value
    child = node[key] if isinstance(raw, dict | list) else raw
    return _resolve(child, raw, path, origins, problems)


def number_problems(container: Mapping[str, Any], origins: Origins) -> Iterator[Problem]:
    """Yield a problem for every number that is not finite (they cannot travel as JSON)."""
    for path, value in leaves(container):
        if isinstance(value, float) and not math.isfinite(value):
            yield Problem(dotted(path), f"got {value}; a finite number is needed", place_of(path, origins))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(child) for child in value]
    return 1.0 if isinstance(value, float) and not math.isfinite(value) else value


def validate(
    model: type[Model], container: Mapping[str, Any], origins: Origins
) -> tuple[Model | None, list[Problem]]:
    """Validate a plain container strictly, as JSON.

    Returns:
        (the model, or None if anything is wrong; the problems, one per key).
    """
    problems = list(number_problems(container, origins))
    bad = {problem.key for problem in problems}
    try:
        checked = model.model_validate_json(json.dumps(_finite(container)))
    except ValidationError as error:
        found = _from_pydantic(model, error, container, origins)
        return None, problems + [problem for problem in found if problem.key not in bad]
    return (None if problems else checked), problems


def _from_pydantic(
    model: type[BaseModel], error: ValidationError, container: Mapping[str, Any], origins: Origins
) -> list[Problem]:
    messages: dict[Path, list[str]] = {}
    for item in error.errors(include_url=False):
        path = _real_path(
            item["loc"], item["type"], container, str(item.get("ctx", {}).get("discriminator", ""))
        )
        text = _message(model, item["type"], item, path, container)
        if text not in messages.setdefault(path, []):
            messages[path].append(text)
    inner = {path[:end] for path in messages for end in range(len(path))}
    return [
        Problem(dotted(path), _joined(path, texts, container), place_of(path, origins))
        for path, texts in messages.items()
        if path not in inner
    ]


def _joined(path: Path, texts: list[str], container: Mapping[str, Any]) -> str:
    if any(text.startswith(("missing", "unknown key")) for text in texts):
        return texts[0]
    found, value = _get(container, path)
    if found and value is None:
        unit = "; for a run without privacy write privacy: {unit: none}" if path == ("privacy",) else ""
        return f"null is not allowed{unit}"
    got = f"got {shown(path, value)}; " if found else ""
    hint = ""
    if isinstance(value, str) and any("number" in text or "integer" in text for text in texts):
        hint = "; write the number without quotes" if _is_number(value) else ""
    return got + " or ".join([texts[0], *(text.removeprefix("should be ") for text in texts[1:])]) + hint


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _get(container: Any, path: Path) -> tuple[bool, Any]:
    value = container
    for part in path:
        if isinstance(value, Mapping) and str(part) in value:
            value = value[str(part)]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return False, None
    return True, value


def _real_path(loc: tuple[int | str, ...], kind: str, container: Any, discriminator: str) -> Path:
    """Drop the parts of pydantic's location that are names of union members, not keys."""
    path: list[str | int] = []
    value = container
    for index, part in enumerate(loc):
        last = index == len(loc) - 1
        if isinstance(value, Mapping) and str(part) in value:
            value = value[str(part)]
            path.append(str(part))
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
            path.append(part)
        elif last and kind == "missing":
            path.append(part)
    if kind in {"union_tag_invalid", "union_tag_not_found"}:
        path.append(discriminator.strip("'"))
    return tuple(path)


def _message(
    model: type[BaseModel], kind: str, item: Mapping[str, Any], path: Path, container: Mapping[str, Any]
) -> str:
    context = item.get("ctx", {})
    if kind == "missing":
        return "missing; give it a value"
    if kind == "union_tag_not_found":
        return "missing; it chooses the kind of this section"
    if kind == "union_tag_invalid":
        return f"allowed is one of {context.get('expected_tags')}"
    if kind == "extra_forbidden":
        return _unknown_key(model, path, container)
    if kind in {"model_type", "model_attributes_type", "dict_type"}:
        return "a section of keys is needed"
    if kind == "string_type":
        return "a text is needed (put it in quotes)"
    text = str(item.get("msg", "is not valid"))
    return text.removeprefix("Input ").replace("an object", "a section of keys")


def _unknown_key(model: type[BaseModel], path: Path, container: Mapping[str, Any]) -> str:
    fields = section_fields(model, path[:-1], container)
    near = difflib.get_close_matches(str(path[-1]), list(fields), n=1, cutoff=0.6)
    if near:
        return f"unknown key; did you mean {dotted((*path[:-1], near[0]))}?"
    elsewhere = [key for key in all_keys(model) if key[-1] == path[-1]]
    allowed = f"allowed here: {', '.join(sorted(fields))}"
    if path in elsewhere:
        return f"another kind of this section has this key, the chosen one has not; {allowed}; remove it"
    if elsewhere:
        return f"unknown key here; did you mean {dotted(elsewhere[0])}?"
    return f"unknown key; {allowed}" if fields else "unknown key"


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield every model class inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) in {typing.Union, types.UnionType, typing.Annotated, tuple, list}:
        for part in typing.get_args(annotation):
            yield from _models(part)


def _aliased(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def variants(field: FieldInfo) -> list[type[BaseModel]]:
    """Return the section classes that a field may hold."""
    return list(_models(field.annotation))


def chosen(field: FieldInfo, value: Any) -> type[BaseModel] | None:
    """Return the section class that `value` selects by its discriminator, if there is exactly one."""
    options = variants(field)
    if len(options) <= 1:
        return options[0] if options else None
    if not isinstance(value, Mapping):
        return None
    for option in options:
        for name in DISCRIMINATORS:
            tags = option.model_fields.get(name)
            if tags is not None and name in value and value[name] in typing.get_args(tags.annotation):
                return option
    return None


def section_fields(model: type[BaseModel], path: Path, container: Mapping[str, Any]) -> dict[str, FieldInfo]:
    """Return the fields allowed in the section at `path`; empty where none can be told."""
    current: type[BaseModel] | None = model
    value: Any = container
    for part in path:
        if current is None or not isinstance(value, Mapping):
            return {}
        field = _aliased(current).get(str(part))
        if field is None:
            return {}
        value = value.get(str(part))
        current = chosen(field, value)
    return _aliased(current) if current is not None else {}


def all_keys(model: type[BaseModel], prefix: Path = (), depth: int = 0) -> list[Path]:
    """Return every key of the schema as a path."""
    keys: list[Path] = []
    for name, field in _aliased(model).items():
        keys.append((*prefix, name))
        if depth < 5:
            for option in variants(field):
                keys.extend(all_keys(option, (*prefix, name), depth + 1))
    return keys
