"""What a checkpoint remembers of the run that began it, and what is refused because of it; without Spark."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from millstream.errors import InvalidArgument, OptionInvalid, PipelineError
from millstream.spark.jobs import find
from millstream.spark.jobs.job import Request, Target
from millstream.spark.jobs.run import driver
from millstream.spark.jobs.run.checkpoint_note import NAME

URL = "http://127.0.0.1:1"


@pytest.fixture
def land(tmp_path: Path) -> Request:
    return Request(URL, ("s",), Target.parse(str(tmp_path / "lake")))


def began(name: str, request: Request) -> Path:
    """What a run leaves that has planned a batch: Spark's log of offsets is all that counts here."""
    with driver.hold(find(name), request):
        checkpoint = driver.local_checkpoint(request)
        assert checkpoint is not None
        (checkpoint / "offsets").mkdir(exist_ok=True)
        (checkpoint / "offsets" / "0").write_text("v1\n")
        return checkpoint


def refused(name: str, request: Request, said: str) -> None:
    for way in (lambda: driver.check(find(name), request), lambda: began(name, request)):
        with pytest.raises(InvalidArgument, match=said) as caught:
            way()
        assert caught.value.hint


CHANGES: dict[str, tuple[str, Callable[[Request], Request]]] = {
    "partition-by": ("option `partition-by` `date`, not `stream`",
                     lambda r: replace(r, options={"partition-by": "stream"})),
    "table": ("option `table` `parquet`, not `delta`", lambda r: replace(r, options={"table": "delta"})),
    "value format": ("option `valueFormat` `raw`, not `json`", lambda r: replace(
        r, source_options={"VALUEformat": "JSON", "valueSchema": "id BIGINT"})),
    "columns": ("option `columns` `stream,offset,timestamp,value`, not `value`",
                lambda r: replace(r, source_options={"columns": "value"})),
    "Kafka's": ("option `kafkaColumns` `false`, not `true`",
                lambda r: replace(r, source_options={"kafkaColumns": "True"})),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_needs_a_new_checkpoint_is_refused(land: Request, change: str) -> None:
    began("land", land)
    said, changed = CHANGES[change]
    refused("land", changed(land), said)
    began("land", land)


def test_another_job_or_target_is_refused_both_ways(land: Request, tmp_path: Path) -> None:
    checkpoint = began("land", land)
    copy = replace(land, target=Target.parse("stream:all"), checkpoint=str(checkpoint))
    refused("copy", copy, "belongs to a run with job `land`, not `copy`")
    elsewhere = replace(
        land, target=Target.parse(str(tmp_path / "other")), checkpoint=str(checkpoint)
    )
    refused("land", elsewhere, f"with target `{tmp_path}/lake`, not `{tmp_path}/other`")
    assert not (tmp_path / "other").exists()

    copy = replace(copy, checkpoint=str(tmp_path / "copied"))
    began("copy", copy)
    refused("copy", replace(copy, target=Target.parse("stream:b")), "target `stream:all`, not")
    refused("land", replace(land, checkpoint=str(tmp_path / "copied")), "job `copy`, not `land`")


def test_what_may_change_is_not_in_the_note(land: Request, tmp_path: Path) -> None:
    checkpoint = began("land", land)
    text = (checkpoint / NAME).read_text()
    other = replace(
        land,
        url="http://127.0.0.1:2",
        streams=("t", "u/*"),
        options={"shared": "yes", "table": "parquet"},
        source_options={"columns": " stream,offset,timestamp,value", "failOnDataLoss": "false"},
        rows_per_batch=5,
    )
    driver.check(find("land"), other)
    began("land", other)
    assert (checkpoint / NAME).read_text() == text
    # A lake that is moved takes its checkpoint along.
    (tmp_path / "lake").rename(tmp_path / "moved")
    driver.check(find("land"), replace(land, target=Target.parse(str(tmp_path / "moved"))))


def test_a_run_that_planned_nothing_may_be_put_right(land: Request) -> None:
    wrong = replace(land, source_options={"valueFormat": "json", "valueSchema": "id BIGNT"})
    with driver.hold(find("land"), wrong):
        pass
    checkpoint = began("land", land)
    assert json.loads((checkpoint / NAME).read_text())["fixed"]["valueFormat"] == "raw"


def test_a_checkpoint_from_before_is_taken_and_gets_its_note(land: Request) -> None:
    checkpoint = began("land", land)
    (checkpoint / NAME).unlink()
    typed = replace(land, options={"partition-by": "none"})
    driver.check(find("land"), typed)
    began("land", typed)
    refused("land", land, "`partition-by` `none`, not `date`")
    document = json.loads((checkpoint / NAME).read_text())
    del document["fixed"]["valueFormat"]
    (checkpoint / NAME).write_text(json.dumps(document))
    driver.check(find("land"), typed)
    json_now = {"valueFormat": "json", "valueSchema": "id BIGINT"}
    with pytest.raises(InvalidArgument, match="`valueFormat` `raw`, not `json`"):
        driver.check(find("land"), replace(typed, source_options=json_now))


def test_a_note_of_a_newer_version_is_not_guessed_at(land: Request) -> None:
    checkpoint = began("land", land)
    (checkpoint / NAME).write_text('{"v": 2}')
    with pytest.raises(PipelineError, match="not a note that this version can read: version 2"):
        driver.check(find("land"), land)


def test_a_wrong_option_of_the_source_is_told_before_spark_starts(land: Request) -> None:
    for options in ({"valueFromat": "json"}, {"stream": "x"}):
        with pytest.raises(OptionInvalid, match="option `"):
            driver.check(find("land"), replace(land, source_options=options))
