"""The schema of JSON values as people write it: DDL, or the JSON of a schema of Spark, as fields.

Where it sits: below `read/columns.py` and the jobs, which ask before a session is there; Spark's own parser has the last word.
Invariant I-DDL-1: what is refused here Spark would refuse, too, or could not decode.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from millstream.errors import OptionInvalid
from millstream.spark.json.blocks import DECIMAL_DIGITS


def _as_ddl(text: str) -> str:
    """DDL as given, with the `struct<...>` around it taken off; JSON of a schema is turned to DDL."""
    if text.startswith("{"):
        import json

        from pyspark.sql.types import StructType

        try:
            struct = StructType.fromJson(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            raise _BadSchema(f"not the JSON of a schema: {error}") from None
        return ", ".join(
            f"`{field.name.replace('`', '``')}` {field.dataType.simpleString()}"
            for field in struct.fields
        )
    if re.match(r"struct\s*<", text, re.IGNORECASE) and text.endswith(">"):
        return text[text.index("<") + 1 : -1].strip()
    return text


_PAIRS: Final = {"<": ">", "(": ")"}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a schema."""

    name: str
    kind: str
    required: bool = False
    """`NOT NULL`: a record without it does not fit."""

    @property
    def text(self) -> str:
        return f"`{self.name.replace('`', '``')}` {self.kind}"

    @property
    def inner(self) -> list[Field]:
        """The fields of a struct; none of everything else."""
        nested = _NESTED.fullmatch(self.kind)
        return split_fields(nested[2]) if nested and nested[1].lower() == "struct" else []


def parse_schema(text: str, option: str = "valueSchema") -> list[Field]:
    """The fields of a schema: DDL, or the JSON of a schema. `option` is what the caller knows it by."""
    try:
        return split_fields(_as_ddl(text.strip()))
    except _BadSchema as error:
        raise OptionInvalid(
            f"option `{option}` is `{text}`: {error.message}",
            hint="write DDL such as `id BIGINT, tags ARRAY<STRING>`",
        ) from None


def split_fields(ddl: str) -> list[Field]:
    """The fields of a DDL list. A type that Spark's parser would refuse is refused here, by name."""
    return [_field(part) for part in _parts(ddl)]


def _parts(ddl: str) -> list[str]:
    """What stands between the commas that are outside of brackets and quotes."""
    parts: list[str] = []
    closing: list[str] = []
    quote = ""
    begin = 0
    for index, character in enumerate(ddl):
        if quote:
            quote = "" if character == quote and ddl[index - 1] != "\\" else quote
        elif character in "`'\"":
            quote = character
        elif character in _PAIRS:
            closing.append(_PAIRS[character])
        elif character in ">)":
            if not closing or closing.pop() != character:
                raise _BadSchema(f"`{character}` without its opening bracket")
        elif character == "," and not closing:
            parts.append(ddl[begin:index])
            begin = index + 1
    if quote or closing:
        raise _BadSchema(f"it ends inside `{quote or closing[-1]}`")
    return [part.strip() for part in [*parts, ddl[begin:]]]


_FIELD: Final = re.compile(r"(?:`((?:[^`]|``)+)`|([^\s:`]+)(?=[\s:]))\s*:?\s*(\S.*)", re.DOTALL)
_BEHIND_TYPE: Final = re.compile(
    r"(\s+NOT\s+NULL)?(?:\s+COMMENT\s+(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"))?$",
    re.IGNORECASE | re.DOTALL,
)
_NESTED: Final = re.compile(r"(array|map|struct)\s*<(.*)>", re.IGNORECASE | re.DOTALL)
_PLAIN: Final = re.compile(
    r"boolean|tinyint|byte|smallint|short|int|integer|bigint|long|float|real|double|date|binary|string"
    r"|timestamp|timestamp_ltz|timestamp_ntz|(?:decimal|dec|numeric)(?:\s*\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\))?",
    re.IGNORECASE,
)


def _field(part: str) -> Field:
    found = _FIELD.fullmatch(part)
    if found is None:
        raise _BadSchema(f"`{part}` is not a name and a type")
    quoted, name, kind = found.groups()
    if name is not None and not re.fullmatch(r"\w+", name):
        raise _BadSchema(f"`{name}` is not a name, unless it stands in backquotes")
    behind = _BEHIND_TYPE.search(kind)
    assert behind is not None, "it matches nothing, too"
    kind = kind[: behind.start()]
    _check_type(kind)
    name = quoted.replace("``", "`") if quoted else name
    return Field(name, kind, required=behind[1] is not None)


def _check_type(text: str) -> None:
    nested = _NESTED.fullmatch(text)
    if nested is not None and nested[1].lower() == "struct":
        split_fields(nested[2])
        return
    if nested is not None:
        parts = _parts(nested[2])
        if len(parts) != {"array": 1, "map": 2}[nested[1].lower()]:
            raise _BadSchema(f"`{text}` has {len(parts)} types inside")
        for part in parts:
            _check_type(part)
        return
    plain = _PLAIN.fullmatch(text)
    if plain is None or not int(plain[2] or 0) <= int(plain[1] or 10) <= DECIMAL_DIGITS:
        raise _BadSchema(f"`{text}` is not a type that can be decoded")


class _BadSchema(OptionInvalid):
    """A part of a schema is wrong; told with the whole of it."""
