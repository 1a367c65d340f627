"""What `pipeline run` tells before it starts Spark, and how jobs reach their server; without a JVM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millstream.errors import ConnectionFailed, StreamNotFound
from millstream.spark import jobs
from millstream.spark.jobs import find
from millstream.spark.jobs.job import Request, Target
from millstream.spark.jobs.run import driver
from support.commands import Run
from support.http import Api
from support.server import Server

pytestmark = pytest.mark.one_server(emptied=True)


def test_a_missing_stream_or_server_is_told_before_spark_starts(
    server: Server, api: Api, tmp_path: Path
) -> None:
    assert api.put("there", b"", "application/json").status == 201
    land = ("pipeline", "run", "land", "--to", "lake")
    gone = "http://127.0.0.1:1"
    cases = [
        (server.url, ("--from", "nope", "--from", "there"), 3, "stream `nope` does not exist"),
        (gone, ("--from", "there", "--option", "connectTimeout=1s"), 5, "cannot reach"),
    ]
    runs = [(Run(tmp_path, url, *land, *rest), code, said) for url, rest, code, said in cases]
    for run, code, said in runs:
        try:
            assert run.end(60.0) == code, run.err
        finally:
            run.kill()
        assert said in run.err[0], run.err
        assert not any("Spark" in line for line in run.err), run.err
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_reached(server: Server, api: Api) -> None:
    assert api.put("there", b"", "application/json").status == 201
    for streams in (("there",), ("nobody/*",)):
        driver.reach(find("land"), Request(server.url, streams, Target.parse("lake")))


def test_a_sink_is_reached_like_its_source() -> None:
    given = {"TOKENENV": "T", "readTimeout": "9s", "failOnDataLoss": "false", "keyPath": "a"}
    request = Request("http://h:1", ("s",), Target.parse("stream:t"), source_options=given)
    assert request.connection() == {"url": "http://h:1", "tokenEnv": "T", "readTimeout": "9s"}


def test_queries_of_one_session_have_names_of_their_own() -> None:
    land, copy = find("land"), find("copy")
    one = Request("u", ("s",), Target.parse("lake"))
    asked = [
        (land, one),
        (copy, one),
        (land, Request("u", ("s",), Target.parse("other"))),
        (land, Request("u", ("s",), Target.parse("lake"), {"shared": "yes"}, checkpoint="c")),
    ]
    names = [driver.query_name(job, request) for job, request in asked]
    assert len(set(names)) == len(names), names
    assert names[0] == "millstream-land lake"


def test_a_program_is_told_as_well_before_anything_is_written(
    server: Server, api: Api, tmp_path: Path
) -> None:
    assert api.put("there", b"", "application/json").status == 201
    no_session: Any = None  # nothing here comes as far as one
    lake, checkpoint = tmp_path / "lake", tmp_path / "cp"
    with pytest.raises(StreamNotFound, match="stream `nope` does not exist"):
        jobs.land(no_session, "nope", lake, url=server.url)
    with pytest.raises(StreamNotFound, match="stream `out` does not exist") as caught:
        jobs.deduplicate(
            no_session, "there", "stream:out", url=server.url, key="id", within="1h", checkpoint=checkpoint
        )  # fmt: skip
    assert "--create" in str(caught.value.hint)
    with pytest.raises(ConnectionFailed, match="cannot reach"):
        jobs.land(no_session, "there", lake, url="http://127.0.0.1:1", connectTimeout="1s")
    assert list(tmp_path.iterdir()) == []
