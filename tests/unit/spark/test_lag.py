"""`lag(progress)` from every form in which Spark reports, without Spark."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from millstream.errors import InvalidArgument
from millstream.spark import lag
from millstream.spark.observe.lag import Lag, StreamLag


def place(number: int, byte: int, incarnation: str = "1") -> dict[str, Any]:
    return {"at": f"{1763000000000:016d}_{byte:016d}", "id": incarnation, "n": number}


def report(
    end: dict[str, Any] | None, latest: dict[str, Any], *, as_text: bool = False, **more: Any
) -> dict[str, Any]:
    def offset(streams: dict[str, Any] | None) -> Any:
        if streams is None:
            return None
        document = {"streams": streams, "v": 1}
        return json.dumps(document) if as_text else document

    source = {"description": "x", "endOffset": offset(end), "latestOffset": offset(latest)}
    return {
        "id": "q",
        "batchId": 3,
        "numInputRows": 500,
        "durationMs": {"triggerExecution": 2000, "addBatch": 1500},
        "sources": [source],
        "sink": {"numOutputRows": 400},
        **more,
    }


END = {"a": place(100, 1000), "b": place(50, 500), "gone": place(7, 70)}
LATEST = {"a": place(160, 1600), "b": place(50, 500), "new": place(10, 90)}


@pytest.mark.parametrize("as_text", [False, True], ids=["classic", "connect"])
@pytest.mark.parametrize("form", ["mapping", "text", "object"])
def test_records_bytes_and_seconds(as_text: bool, form: str) -> None:
    document = report(END, LATEST, as_text=as_text)
    forms = {
        "mapping": document,
        "text": json.dumps(document),
        "object": SimpleNamespace(json=json.dumps(document)),
    }
    assert lag(forms[form]) == Lag(
        records=70,
        bytes=690,
        seconds=pytest.approx(70 * 2 / 500),
        exact=False,
        streams={"a": StreamLag(60, 600), "new": StreamLag(10, 90)},
    )


def test_connect_has_no_input_rows() -> None:
    document = report(END, LATEST, as_text=True, numInputRows=None)
    assert lag(document).seconds == pytest.approx(70 * 2 / 400)


def test_nothing_was_read_so_nobody_can_tell_how_long() -> None:
    assert lag(report(END, LATEST, numInputRows=0, sink={"numOutputRows": -1})).seconds is None
    assert lag(report(END, LATEST, durationMs=None)).seconds is None


def test_at_the_tail() -> None:
    assert lag(report(LATEST, LATEST)) == Lag(0, 0, 0.0, exact=True)
    assert lag(report({"a": place(170, 1700)}, {"a": place(160, 1600)})).records == 0


def test_before_the_first_batch_and_after_a_re_creation() -> None:
    assert lag(report(None, LATEST)).records == 220
    again = {"a": place(5, 40, incarnation="2")}
    assert lag(report(END, again)).streams == {"a": StreamLag(5, 40)}


def test_two_sources_are_added_and_others_left_out() -> None:
    document = report(END, LATEST)
    other = {"description": "rate", "endOffset": "17", "latestOffset": {"x": 1}}
    document["sources"] = [
        *document["sources"],
        other,
        report(END, {"z": place(3, 30)})["sources"][0],
    ]
    assert lag(document).records == 73


@pytest.mark.parametrize(
    "progress",
    [
        None,
        "not json",
        "[]",
        7,
        {"sources": []},
        {},
        report({"a": "x"}, {"a": "x"}),
        {"sources": [{"endOffset": "5", "latestOffset": "9"}]},
        {"sources": [{"endOffset": None, "latestOffset": None}]},
    ],
)
def test_something_else_is_refused_with_a_hint(progress: Any) -> None:
    with pytest.raises(InvalidArgument) as raised:
        lag(progress)
    assert "lastProgress" in (raised.value.hint or "")
