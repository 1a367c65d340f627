"""`read_arrow` of the client: what `read` gives, as Arrow, with numbers and times; blocking and async."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

import millstream
from millstream import errors
from millstream.client.sync import ranges
from millstream.types import Gap
from support.server import Server

JSON = "application/json"
NAMES = ["stream", "number", "time", "value"]


@pytest.fixture
def client(shared_server: Server) -> Iterator[millstream.Client]:
    with millstream.connect(shared_server.url) as client:
        yield client


def numbered(client: millstream.Client, path: str, count: int) -> millstream.Stream:
    stream = client.create(path, content_type=JSON)
    stream.append_many([{"n": number} for number in range(count)])
    return stream


def test_batches_have_number_time_and_value(client: millstream.Client, path: str) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    stream = numbered(client, path, 5)
    (batch,) = stream.read_arrow()
    assert batch.schema.names == NAMES
    assert batch.schema.field("time").type == pa.timestamp("us", tz="UTC")
    assert batch.column("stream").to_pylist() == [path] * 5
    assert batch.column("number").to_pylist() == list(range(5))
    assert [json.loads(value) for value in batch.column("value").to_pylist()] == [
        record.value for record in stream.read()
    ]
    for moment in batch.column("time").to_pylist():
        assert before < moment < datetime.now(UTC) + timedelta(seconds=1)


def test_many_windows_are_the_same_as_one(
    client: millstream.Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = numbered(client, path, 500)
    whole = stream.read_arrow().read_all()
    monkeypatch.setattr(ranges.RangeReader.__init__, "__defaults__", (None, 100))
    batches = list(stream.read_arrow())
    assert len(batches) > 10
    assert pa.Table.from_batches(batches).to_pylist() == whole.to_pylist()


def test_where_it_begins_and_where_it_ends(client: millstream.Client, path: str) -> None:
    stream = client.create(path, content_type=JSON)
    middle = stream.append_many([0, 1, 2])
    end = stream.append_many([3, 4])

    def found(offset: str | None = None, **start: object) -> list[int]:
        table = stream.read_arrow(offset, **start).read_all()  # type: ignore[arg-type]
        return table.column("number").to_pylist()  # type: ignore[no-any-return]

    assert found() == found("-1") == [0, 1, 2, 3, 4]
    assert found(middle) == [3, 4]
    assert found(end) == found("now") == []
    assert found(tail=1) == [4]
    assert found(tail=4) == [1, 2, 3, 4]
    assert found(tail=99) == [0, 1, 2, 3, 4]
    assert found(since=datetime.now(UTC) + timedelta(hours=1)) == []
    assert found(since="2020-01-01T00:00:00Z") == found(since=0) == [0, 1, 2, 3, 4]
    with stream.read_arrow() as batches:
        assert sum(batch.num_rows for batch in batches) == 5
        assert batches.ends == {path: end}
    stream.append(5)
    assert found(batches.ends[path]) == [5]


def test_an_empty_stream_has_the_schema(client: millstream.Client, path: str) -> None:
    table = client.create(path, content_type=JSON).read_arrow().read_all()
    assert (table.num_rows, table.schema.names) == (0, NAMES)


def test_columns_are_chosen(client: millstream.Client, path: str) -> None:
    stream = numbered(client, path, 2)
    table = stream.read_arrow(columns=["value", "position", "epoch"]).read_all()
    assert table.schema.names == ["value", "position", "epoch"]
    position = table.column("position")[0].as_py()
    assert [record.value for record in stream.read(position)] == [{"n": 0}, {"n": 1}]
    for wrong in (["offset"], [], ["value", "value"]):
        with pytest.raises(errors.InvalidArgument, match="columns"):
            stream.read_arrow(columns=wrong)  # type: ignore[arg-type]


def test_many_streams_by_pattern(client: millstream.Client, path: str) -> None:
    for name in ("b", "a", "other"):
        numbered(client, f"{path}/{name}", 3)
    batches = client.read_arrow(pattern=f"{path}/[ab]", tail=2)
    table = batches.read_all()
    rows = list(
        zip(table.column("stream").to_pylist(), table.column("number").to_pylist(), strict=True)
    )
    assert rows == [(f"{path}/a", 1), (f"{path}/a", 2), (f"{path}/b", 1), (f"{path}/b", 2)]
    assert set(batches.ends) == {f"{path}/a", f"{path}/b"}
    assert client.read_arrow(pattern=f"{path}/none").read_all().num_rows == 0
    with pytest.raises(errors.BadRequest):
        client.read_arrow(pattern="(").read_all()


def test_the_async_client_reads_the_same(shared_server: Server, path: str) -> None:
    async def scenario() -> None:
        async with millstream.aio.connect(shared_server.url) as client:
            stream = await client.create(path, content_type=JSON)
            await stream.append_many(list(range(100)))
            table = await stream.read_arrow().read_all()
            assert table.column("number").to_pylist() == list(range(100))
            frame = await client.read_arrow(pattern=path).to_pandas()
            assert list(frame.columns) == NAMES
            assert [batch.num_rows async for batch in stream.read_arrow(tail=7)] == [7]
            records = [record async for record in stream.read(tail=2, numbered=True)]
            assert [(record.value, record.number) for record in records] == [(98, 98), (99, 99)]
            with pytest.raises(errors.StreamNotFound):
                await client.stream(f"{path}/none").read_arrow().read_all()

    asyncio.run(scenario())


def test_other_libraries_take_it_as_it_is(client: millstream.Client, path: str) -> None:
    """Through the Arrow interface that polars and DuckDB use, too."""
    stream = numbered(client, path, 4)
    table = pa.table(stream.read_arrow())
    assert table.column("number").to_pylist() == [0, 1, 2, 3]
    frame = stream.read_arrow().to_pandas()
    assert str(frame["time"].dtype) == "datetime64[us, UTC]"
    assert list(frame["value"]) == [b'{"n":0}', b'{"n":1}', b'{"n":2}', b'{"n":3}']


def test_records_with_number_and_time(client: millstream.Client, path: str) -> None:
    stream = client.create(path, content_type=JSON)
    first = stream.append_many([1, 2])
    second = stream.append(3)
    records = list(stream.read(numbered=True))
    assert [(r.value, r.number, r.offset, r.final) for r in records] == [
        (1, 0, first, False),
        (2, 1, first, True),
        (3, 2, second, True),
    ]
    for record in records:
        assert record.time is not None
        assert abs(datetime.now(UTC) - record.time) < timedelta(minutes=5)
    assert [r.value for r in stream.read(records[1].offset)] == [3]
    assert [(r.number, r.time) for r in stream.read()] == [(None, None)] * 3


def test_appends_to_a_byte_stream_are_records_of_their_own(
    client: millstream.Client, path: str
) -> None:
    stream = client.create(path, content_type="application/octet-stream")
    stream.append_many([b"a", b"\xff\n", b"c"])
    assert len(list(stream.read())) == 1
    assert [(r.data, r.value) for r in stream.read(numbered=True)] == [
        (b"a", b"a"),
        (b"\xff\n", b"\xff\n"),
        (b"c", b"c"),
    ]


def test_info_counts_records_and_bytes(client: millstream.Client, path: str) -> None:
    stream = numbered(client, path, 3)
    info = stream.info()
    assert info.records == 3
    (listed,) = client.list(path)
    assert (info.records, info.bytes) == (listed.records, listed.bytes)
    assert client.create(f"{path}/empty").info().records == 0


def test_a_missing_stream_and_a_bad_offset_are_told(client: millstream.Client, path: str) -> None:
    with pytest.raises(errors.StreamNotFound):
        client.stream(path).read_arrow().read_all()
    stream = numbered(client, path, 1)
    with pytest.raises(errors.OffsetInvalid):
        stream.read_arrow(stream.info().tail[:16] + "_9999999999999999").read_all()
    with pytest.raises(errors.InvalidArgument, match="record"):
        stream.read_arrow(gaps="record")


def test_stopping_early_lets_go(client: millstream.Client, path: str) -> None:
    stream = numbered(client, path, 10)
    with stream.read_arrow() as batches:
        next(iter(batches))
    with pytest.raises(errors.ClientClosed):
        stopped = stream.read_arrow()
        stopped.close()
        stopped.read_all()


def test_a_gap_is_raised_or_told(server: Server, path: str) -> None:
    server.flags = ("--port", str(server.port))
    with millstream.connect(server.url) as client:
        stream = client.create(path, content_type=JSON, durability="ephemeral", data=1)
        tail = stream.append(2)
        server.crash_and_restart()
        stream.append(3)
        with pytest.raises(errors.GapError) as caught:
            stream.read_arrow(tail).read_all()
        assert caught.value.gap.reason == "crash"
        assert caught.value.gap.stream == path
        told: list[Gap] = []
        table = stream.read_arrow(tail, gaps=told.append).read_all()
        assert table.column("value").to_pylist() == [b"3"]
        assert [gap.reason for gap in told] == ["crash"]
        expected: list[Gap] = []
        assert [record.value for record in stream.read(tail, gaps=expected.append)] == [3]
        assert told == expected


def test_without_pyarrow_the_client_works_and_says_what_is_missing(
    shared_server: Server, path: str
) -> None:
    code = f"""
import sys
sys.modules["pyarrow"] = None
import millstream
with millstream.connect({shared_server.url!r}) as client:
    stream = client.create({path!r}, content_type="application/json", data=1)
    assert [record.value for record in stream.read()] == [1]
    assert stream.info().records == 1
    try:
        stream.read_arrow()
    except millstream.errors.SetupError as error:
        print(error, error.hint)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "pyarrow" in done.stdout
    assert "millstream[arrow]" in done.stdout
