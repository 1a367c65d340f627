"""Streams that a run chooses, leaves out and chooses again over one checkpoint; without a JVM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import millstream
from millstream.client.sync.client import Client
from millstream.spark.errors import ConnectorError
from millstream.spark.read.selection import Selection
from support.reading import HandQuery
from support.server import Server

pytestmark = pytest.mark.one_server(emptied=True)

JSON = "application/json"
WAYS = {
    "list": {"a": {"subscribe": "a"}, "b": {"subscribe": "b"}, "ab": {"subscribe": "a,b"}},
    "pattern": {
        "a": {"subscribePattern": "a"},
        "b": {"subscribePattern": "b"},
        "ab": {"subscribePattern": "[ab]"},
    },
}


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with millstream.connect(server.url) as connected:
        yield connected


def fill(client: Client, name: str, count: int, *, first: int = 0) -> None:
    client.create(name, content_type=JSON).append_many(range(first, first + count))


class Runs:
    """Runs of one query over one checkpoint, each with a selection of its own."""

    def __init__(self, server: Server, way: str) -> None:
        self.url = server.url
        self.choices = WAYS[way]
        self.start: dict[str, Any] | None = None

    def run(self, chosen: str, **options: Any) -> list[tuple[str, int]]:
        given = {"startingOffsets": "earliest", **self.choices[chosen], **options}
        with HandQuery(self.url, start=self.start, **given) as query:
            query.reader.prepareForTriggerAvailableNow()
            seen: list[tuple[str, int]] = []
            while rows := query.batch():
                seen += [(name, number) for name, number, _ in rows]
            self.start = query.start
            return sorted(seen)

    @property
    def numbers(self) -> dict[str, int]:
        assert self.start is not None
        return {name: entry["n"] for name, entry in self.start["streams"].items()}


def records(name: str, first: int, behind: int) -> list[tuple[str, int]]:
    return [(name, number) for number in range(first, behind)]


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_that_is_chosen_again_goes_on_at_its_place(
    server: Server, client: Client, way: str
) -> None:
    fill(client, "a", 3)
    fill(client, "b", 3)
    runs = Runs(server, way)
    assert runs.run("a") == records("a", 0, 3)
    fill(client, "a", 2, first=3)
    # Chosen for the first time over an old checkpoint: from the first record, whatever `startingOffsets` says.
    assert runs.run("b", startingOffsets="latest") == records("b", 0, 3)
    assert runs.numbers == {"a": 3, "b": 3}
    assert runs.run("b") == []
    assert runs.run("a") == records("a", 3, 5)
    fill(client, "b", 1, first=3)
    assert runs.run("ab", maxOffsetsPerTrigger=1) == records("b", 3, 4)
    assert runs.numbers == {"a": 5, "b": 4}


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_that_goes_while_it_is_not_chosen(
    server: Server, client: Client, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, "a", 3)
    fill(client, "b", 1)
    runs = Runs(server, way)
    runs.run("ab")
    fill(client, "a", 2, first=3)
    client.stream("a").delete()
    fill(client, "b", 1, first=1)
    assert runs.run("b") == records("b", 1, 2), "it is nobody's loss until it is chosen"
    assert runs.numbers == {"a": 3, "b": 2}, "its place stays: something of it was not read"
    fill(client, "a", 4)
    fill(client, "b", 1, first=2)
    assert runs.run("b") == records("b", 2, 3)
    assert runs.numbers["a"] == 3, "the place of the old one: whoever chooses it is told"
    with pytest.raises(ConnectorError, match="data_loss: stream `a`: records 3 to 4 of the stream"):
        runs.run("ab")
    assert runs.run("ab", failOnDataLoss="false") == records("a", 0, 4)
    assert not [r for r in caplog.records if "`a`" in r.getMessage()][1:], "told once"
    client.stream("a").delete()
    fill(client, "b", 1, first=3)
    assert runs.run("b") == records("b", 3, 4)
    assert runs.numbers == {"b": 4}, "read to its end and gone: its place goes, too"


def test_one_that_goes_unread_is_loss_for_a_pattern_that_would_choose_it(
    server: Server, client: Client
) -> None:
    fill(client, "a", 3)
    fill(client, "b", 1)
    runs = Runs(server, "pattern")
    runs.run("ab")
    fill(client, "a", 1, first=3)
    client.stream("a").delete()
    with pytest.raises(ConnectorError, match="data_loss: stream `a`: records 3 to 3 cannot"):
        runs.run("ab")


@pytest.mark.parametrize(("start", "first"), [("latest", 3), ("2", 2), ("earliest", 0)])
def test_a_first_batch_that_is_repeated_under_another_selection_is_the_same(
    server: Server, client: Client, start: str, first: int
) -> None:
    fill(client, "a", 3)
    fill(client, "b", 3)
    with HandQuery(server.url, subscribe="a", startingOffsets=start) as query:
        end = query.latest()
    fill(client, "a", 2, first=3)
    with HandQuery(server.url, subscribe="b", startingOffsets=start) as again:
        repeated = [(name, number) for name, number, _ in again.between(again.start, end)]
        assert repeated == records("a", first, 3)
        again.start = end
        assert [number for _, number, _ in again.batch()] == [0, 1, 2]
        assert again.start["streams"]["a"] == end["streams"]["a"]


def test_nothing_is_in_the_first_batch_that_came_behind_its_start(
    server: Server, client: Client
) -> None:
    """Repeated after a crash, the batch would begin such a stream at `latest`."""
    fill(client, "a", 1)
    with HandQuery(server.url, subscribePattern="[ab]", startingOffsets="latest") as query:
        query.reader.prepareForTriggerAvailableNow()
        fill(client, "b", 2)
        query.reader.prepareForTriggerAvailableNow()
        assert sorted(query.latest()["streams"]) == ["a"]
        assert [(name, number) for name, number, _ in query.batch()] == records("b", 0, 2)


def test_who_would_choose_a_stream_that_is_gone() -> None:
    by_name = Selection(names=("a", "b")).chooser()
    assert (by_name("a"), by_name("c")) == (True, False)
    by_pattern = Selection(pattern="chat/[^/]+").chooser()
    assert (by_pattern("chat/1"), by_pattern("chat/1/x"), by_pattern("x")) == (True, False, False)
    for other in (r"\p{Greek}+", "[[:alpha:]]+", "[a-z&&[^b]]"):  # the server's, not Python's
        assert Selection(pattern=other).chooser()("1"), f"{other}: in doubt its loss is told"
