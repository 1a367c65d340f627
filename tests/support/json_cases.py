"""Tricky JSON values, by schema: what `valueFormat=json` and Spark's `from_json` must agree on.

Used by test_json.py through Spark, and by tests/unit/spark/test_decode.py without it.
"""

from __future__ import annotations

NUMBERS = "b tinyint, s smallint, i int, l bigint, f float, d double"
NUMBER_TEXTS = [
    "1", "-1", "0", "-0", "127", "128", "255", "256", "-128", "-129", "32767", "32768", "-32769",
    "2147483647", "2147483648", "-2147483649", "9223372036854775807", "9223372036854775808",
    "1.0", "1.5", "-2.25", "1e2", "1E2", "1e-2", "1e400", "-1e400", "1e-400", "0.1",
    "3.4028236e38", "1e39", "123456789012345678901234567890", "0.1234567890123456789",
    '"1"', '"1.5"', '""', '" "', '"abc"', "true", "false", "null", "[]", "[1]", "{}", '{"a":1}',
    "NaN", '"NaN"', "Infinity", '"Infinity"', "-Infinity", '"-Infinity"', '"+INF"', '"-INF"', '"INF"',
    "-INF", "+Infinity", "-INFx", "1" * 400, "+1", "01", "1.", ".5", "1e", "--1", "0x10", "1_000", "1,000", "tru", "nul", "TRUE", "None",
]  # fmt: skip
STRINGS = "t string, o boolean, n binary"
STRING_TEXTS = [
    '"a"', '""', '" "', '"\\u0041\\n\\t\\"\\\\\\/"', '"\\u00e9"', '"é"', '"\\ud83d\\ude00"', '"😀"', '"\\ud83d"',
    '"\\ude00x"', '"\\u0000"', '"a\\qb"', '"\\u12"', '"tab\tinside"', '"unended', "'single'", "'it\\'s'",
    "true", "false", "null", "1", "1.0", "1.10", "1e2", "1e10", "1e-5", "0.001", "0.00012", "-0.0", "1234567.0",
    "12345678.5", "-12", "123456789012345678901234567890", "[]", "[1,2]", '[ 1 , "a" , null ]', "{}",
    '{"a" : 1 , "b":[true,{"c":null}]}', '{"x":1.50,"y":"q\\u0001\\n"}', '"YWJj"', '"YWI="', '"YW"', '"Y"', '"YW="', '"YQ==YQ=="', '" YWJj YWJj"', '"Y W"', '"!!"',
    "NaN", "Infinity", '["😀"]', "['it\\'s \"']",
]  # fmt: skip
TIMES = "a date, z timestamp, w timestamp_ntz"
TIME_TEXTS = [
    '"2026-11-16"', '"2026-11-16T02:03:04Z"', '"2026-11-16T02:03:04.123456Z"', '"2026-11-16T02:03:04.1Z"',
    '"2026-11-16T02:03:04.1234567Z"', '"2026-11-16 02:03:04"', '"2026-11-16T02:03:04"', '"2026-11-16T02:03"',
    '"2026-11-16T02:03:04+01:00"', '"2026-11-16T02:03:04+001:00"', '"2026-11-16T02:03:04+1:00:00"', '"2026-11-16T02:03:04+01:5:00"',
    '"2026-11-16T02:03:04-0130"', '"2026-11-16T02:03:04 Europe/Rome"',
    '"2026-11-16T02:03:04+5"', '"2026-11-16T02:03:04UTC"', '"2026-11-16T02:03:04GMT+01:00"', '"2026-3-4"', '"2026-3-4 5:6:7"',
    '"2026"', '"2026-11"', '"2026-02-29"', '"2024-02-29"', '"2026-13-01"', '"2026-11-31"', '"2026-11-16T24:00:00Z"',
    '"2026-11-16T23:60:00Z"', '"2026-11-16T23:59:60Z"', '" 2026-11-16 "', '"16.11.2026"', '"11/16/2026"', '""', '"x"',
    '"12345-01-01"', '"0001-01-01"', '"1500-06-15"', '"-0001-01-01"', '"+2026-01-01"', '"1970-01-01T00:00:00Z"',
    '"1969-12-31T23:59:59.999999Z"', '"2026-11-16X"', '"2026-11-16Tfoo"', '"2026-11-16 foo"', '"180"', '"-5"', "1763000000", "1763000000.5",
    "0", "-1", "9223372036854775807", "null", "true", "[]", "{}", '"2026-11-16T02:03:04+25:00"', '"2026-11-16T02:03:04.Z"',
    '"2026-11-16T2:3:4Z"', '"2026-11-16T02:03:04z"', '"2026-11-16T02"',
]  # fmt: skip
DECIMALS = "p decimal(10,2), q decimal(38,18), r decimal(5,0)"
DECIMAL_TEXTS = [
    "1", "1.005", "1.015", "-1.005", "12345678.90", "123456789.12", "99999999.994", "99999999.995", "1e5", "1e-5", "1e30", "0",
    '"1.5"', '"1,234.5"', '" 1"', '""', '"abc"', '"1e2"', '"+1.5"', "null", "true", "12345", "99999.4", "99999.5", "100000",
    "0.000000000000000001", "0.0000000000000000004", "NaN",
    "0e0000000000000000004", "1e0000000000000000001", "1e00000000000000000030", "1e99999999999",
]  # fmt: skip
NESTED = "k int, st struct<x:int,y:string,z:struct<q:double>>, ar array<int>, aa array<struct<x:int>>, m map<string,int>, e int"
NESTED_RECORDS = [
    '{"k":1,"st":{"x":1,"y":"a","z":{"q":1.5}},"ar":[1,2],"aa":[{"x":1},{"x":2}],"m":{"a":1,"b":2},"e":9}',
    '{"k":1,"st":null,"ar":null,"aa":null,"m":null,"e":9}',
    '{"k":1,"st":{},"ar":[],"aa":[],"m":{},"e":9}',
    '{"k":1,"st":{"x":"bad","y":"kept"},"e":9}',
    '{"k":1,"st":{"y":"kept","z":{"q":"bad"}},"e":9}',
    '{"k":1,"st":[1],"e":9}',
    '{"k":1,"st":"text","e":9}',
    '{"k":1,"ar":[1,"bad",3],"e":9}',
    '{"k":1,"ar":[1,null,3],"e":9}',
    '{"k":1,"ar":{"a":1},"e":9}',
    '{"k":1,"aa":[{"x":1},{"x":"bad"},{"x":3}],"e":9}',
    '{"k":1,"aa":[{"x":1},5,{"x":3}],"e":9}',
    '{"k":1,"aa":[null,{}],"e":9}',
    '{"k":1,"m":{"a":"bad","b":2},"e":9}',
    '{"k":1,"m":{"a":null,"b":2},"e":9}',
    '{"k":1,"m":{"a":1,"a":2},"e":9}',
    '{"k":1,"m":[1],"e":9}',
    '{"k":1,"k":2}', '{"k":1,"k":null}', '{"k":1,"k":"bad"}', '{"k":"bad","k":1}', '{"K":1}', '{"k":1,"unknown":{"deep":[1,{"x":2}]},"e":9}',
    '{"k":1,"ar":[[1],[2]],"e":9}',
    '{"k":1,"st":{"x":1,"x":2},"e":9}',
]  # fmt: skip
WHOLE = "k int, v string"
WHOLE_RECORDS = [
    "{}", '{"k":1}', ' {"k" : 1 } ', '{"k":1,"v":"x"} trailing', '{"k":1}{"k":2}', "[]", '[{"k":1}]', "1", '"text"', "null", "true", "",
    "   ", "{", '{"k"', '{"k":', '{"k":1', '{"k":1,', '{"k":1,}', '{k:1}', "{'k':1,'v':'q'}", '{"k":1 "v":2}', '{"k" 1}', '{"k":1,"v":"un', "}",
    "]", '{"k":1]', '{"k":[}', '{"k":tru}', '{"k":1, // comment\n"v":"x"}', '{"k":1,\n"v":"x"}', '{"":1,"k":2}', '{"k":1,"v":{"a":[1,}}',
    '{"k":1,"v":"a\nb"}', "\ufeff{\"k\":1}", '{"v":[1,2', '{"v":"x","k":nope}', '{"v":"x","k":{"a":nope}}', '{"v":nope,"k":5}',
    '{"k":"bad","v":"kept"}', '{"v":"first","k":"bad"}', "{\"k\":1}\n{\"k\":2}",
]  # fmt: skip


def by_field(schema: str, texts: list[str]) -> list[str]:
    """One record per text and field, with a neighbour that must not suffer."""
    names = [part.strip().split(" ")[0] for part in schema.replace(", ", "\0").split("\0")]
    return [f'{{"{name}":{text},"other":1}}' for name in names for text in texts]


CASES: dict[str, tuple[str, list[str]]] = {
    "numbers": (NUMBERS + ", other int", by_field(NUMBERS, NUMBER_TEXTS)),
    "strings": (STRINGS + ", other int", by_field(STRINGS, STRING_TEXTS)),
    "times": (TIMES + ", other int", by_field(TIMES, TIME_TEXTS)),
    "decimals": (DECIMALS + ", other int", by_field(DECIMALS, DECIMAL_TEXTS)),
    "nested": (NESTED, NESTED_RECORDS),
    "whole": (WHOLE, WHOLE_RECORDS),
}
