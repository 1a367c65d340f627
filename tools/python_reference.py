"""The reference of the Python client, made from the code: signatures, fields and their docstrings.

Used by `gen_docs.py`, which puts it between the marks of docs/reference/python.md and python-aio.md.

Invariants: every name of `millstream.__all__` and `millstream.aio.__all__` is on a page or, for exceptions and modules, left to another
one; a public method or field without a docstring is listed all the same; nothing but the code decides what stands here.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import millstream
from millstream import aio, errors

LINE_COLUMNS = 88


def python_api() -> str:
    return page(millstream)


def python_aio() -> str:
    return page(aio)


def page(module: ModuleType) -> str:
    found = [(name, getattr(module, name)) for name in module.__all__]
    functions = [call(name, value) for name, value in found if inspect.isfunction(value)]
    classes = [
        class_part(name, value)
        for name, value in found
        if inspect.isclass(value) and not issubclass(value, errors.MillstreamError)
    ]
    return "\n\n".join([*functions, *classes])


def class_part(name: str, kind: type) -> str:
    parts = [f"## {name}", inspect.getdoc(kind) or ""]
    if dataclasses.is_dataclass(kind):
        parts.append(field_list(dataclass_fields(kind)))
    else:
        parts.append(field_list(instance_fields(kind)))
    for member, value in members(kind):
        parts.append(
            property_part(member, value)
            if isinstance(value, property)
            else call(member, value, "###")
        )
    return "\n\n".join(part for part in parts if part)


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties, in the order of the source."""
    for name, value in vars(kind).items():
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            yield name, value


def property_part(name: str, value: property) -> str:
    assert value.fget is not None
    kind = inspect.signature(value.fget).return_annotation
    waits = "await " if inspect.iscoroutinefunction(value.fget) else ""
    text = inspect.getdoc(value) or ""
    return f"### {name}\n\n```python\n{waits}{name}: {kind}\n```" + (f"\n\n{text}" if text else "")


def call(name: str, function: Callable[..., Any], level: str = "##") -> str:
    text = inspect.getdoc(function) or ""
    return f"{level} {name}\n\n```python\n{signature(name, function)}\n```" + (
        f"\n\n{text}" if text else ""
    )


def signature(name: str, function: Callable[..., Any]) -> str:
    found = inspect.signature(function)
    prefix = "await " if inspect.iscoroutinefunction(function) else ""
    rows: list[str] = []
    for one in found.parameters.values():
        if one.kind is one.KEYWORD_ONLY and "*" not in rows:
            rows.append("*")
        if one.name != "self":
            rows.append(parameter(one))
    head, tail = f"{prefix}{name}(", f") -> {spelled(found.return_annotation)}"
    line = head + ", ".join(rows) + tail
    if len(line) <= LINE_COLUMNS:
        return line
    return "\n".join([head, *(f"    {row}," for row in rows), tail])


def parameter(one: inspect.Parameter) -> str:
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    default = "" if one.default is one.empty else f" = {one.default!r}"
    return f"{stars}{one.name}: {spelled(one.annotation)}{default}"


def spelled(annotation: object) -> str:
    """A type as it is written in the source, without the modules of the client."""
    return str(annotation).replace("arrow.Column", "Column")


# ---------------------------------------------------------------------------- fields


@dataclasses.dataclass(frozen=True)
class Field:
    name: str
    type: str
    text: str


def field_list(fields: list[Field]) -> str:
    return "\n".join(
        f"- `{one.name}: {one.type}`" + (f": {one.text}" if one.text else "") for one in fields
    )


def dataclass_fields(kind: type) -> list[Field]:
    notes = notes_of(class_body(kind))
    made = []
    for one in dataclasses.fields(kind):
        default = "" if one.default is dataclasses.MISSING else f" = {one.default!r}"
        made.append(Field(one.name, f"{one.type}{default}", notes.get(one.name, ("", ""))[1]))
    return made


def instance_fields(kind: type) -> list[Field]:
    """What `__init__` sets under a public name."""
    for node in class_body(kind):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            types = {
                one.arg: ast.unparse(one.annotation) for one in node.args.args if one.annotation
            }
            return [
                Field(name, kind_text or types.get(name, ""), text)
                for name, (kind_text, text) in notes_of(node.body).items()
            ]
    return []


def class_body(kind: type) -> list[ast.stmt]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    (definition,) = tree.body
    assert isinstance(definition, ast.ClassDef)
    return definition.body


def notes_of(body: list[ast.stmt]) -> dict[str, tuple[str, str]]:
    """Public fields that are assigned here, each with its type and the docstring behind it."""
    found: dict[str, tuple[str, str]] = {}
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            target, kind = node.target, ast.unparse(node.annotation)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, kind = node.targets[0], ""
        else:
            continue
        name = (
            target.id
            if isinstance(target, ast.Name)
            else target.attr
            if isinstance(target, ast.Attribute)
            else "_"
        )
        if name.startswith("_"):
            continue
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = " ".join(str(following.value.value).split())
        found[name] = (kind, text)
    return found
