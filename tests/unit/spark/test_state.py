"""How many parts a job keeps its state in, and what it says of that and of what stays open; without a JVM."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millstream.spark import jobs
from millstream.spark.jobs.run import driver
from millstream.spark.jobs.shared import state

CORES = os.cpu_count() or 1


class Conf(dict[str, str]):
    """Settings of a session: what is not set has Spark's default only where no other is named."""

    def get(self, name: str, *default: Any) -> Any:
        return super().get(name, *(default or ("200",)))

    set = dict.__setitem__
    unset = dict.__delitem__


def session(cores: int | None, **conf: str) -> Any:
    """`None`: one of Connect, which does not say its cores."""
    found = SimpleNamespace(conf=Conf(conf))
    if cores is not None:
        found._sc = SimpleNamespace(defaultParallelism=cores)
    return found


@pytest.mark.parametrize(
    ("master", "parts"),
    [
        ("local", 2),
        ("local[3]", 6),
        ("local[3,2]", 6),
        ("local[*]", 2 * CORES),
        ("local-cluster[2,3,1024]", 12),
        ("spark://host:7077", None),
        ("yarn", None),
        ("sc://host:15002", None),
    ],
)
def test_a_new_session_has_parts_by_the_cores_of_its_master(master: str, parts: int | None) -> None:
    wanted = {} if parts is None else {state.PARTITIONS: str(parts)}
    assert state.session_settings(jobs.deduplicate, master, {}) == wanted
    assert state.session_settings(jobs.deduplicate, master, {state.PARTITIONS: "7"}) == {}
    assert state.session_settings(jobs.land, master, {}) == {}


def test_what_the_caller_has_set_stays_also_if_it_is_the_default_of_spark() -> None:
    for given, wanted in (({}, "16"), ({state.PARTITIONS: "200"}, "200"), ({state.PARTITIONS: "3"}, "3")):  # fmt: skip
        found = session(8, **given)
        with state.settings(found, jobs.deduplicate):
            assert found.conf.get(state.PARTITIONS) == wanted
            assert found.conf.get(state.PROVIDER) == state.ROCKSDB
        assert found.conf == given
    with state.settings(connect := session(None), jobs.deduplicate):
        assert state.PARTITIONS not in connect.conf


def log_batch(checkpoint: Path, number: int, parts: str) -> None:
    (checkpoint / "offsets").mkdir(parents=True, exist_ok=True)
    said = json.dumps({"batchWatermarkMs": 0, "conf": {state.PARTITIONS: parts}})
    (checkpoint / "offsets" / str(number)).write_text(f"v1\n{said}\n{{}}")


def test_the_parts_that_are_told_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    found = session(8, **{state.PARTITIONS: "7"})
    checkpoint = tmp_path / "cp"
    keeps = "the checkpoint keeps their number"
    told = state.described(found, jobs.deduplicate, checkpoint)
    assert told == f"state in RocksDB, 7 shuffle partitions; {keeps}"
    for number in (9, 10):
        log_batch(checkpoint, number, "4")
    (checkpoint / "offsets" / ".10.crc").write_text("")
    told = state.described(found, jobs.deduplicate, checkpoint)
    begun = "state in RocksDB, 4 shuffle partitions, as the checkpoint was begun with"
    assert told == begun
    told = state.described(found, jobs.deduplicate, checkpoint, asked="4")
    assert told == begun
    told = state.described(found, jobs.deduplicate, checkpoint, asked="7")
    assert told == f"{begun}: 7 would need a new one"
    told = state.described(found, jobs.deduplicate, None)
    assert (
        told
        == "state in RocksDB, 7 shuffle partitions, unless the checkpoint was begun with others"
    )
    (checkpoint / "offsets" / "11").write_text("not Spark's")
    assert keeps in state.described(found, jobs.deduplicate, checkpoint)


class Query:
    """A query that ends at once, with these reports."""

    id = "q"

    def __init__(self, *reports: Mapping[str, Any]) -> None:
        self.recentProgress = list(reports)

    @property
    def lastProgress(self) -> Any:  # noqa: N802 - as pyspark has it
        return self.recentProgress[-1]

    def awaitTermination(self, _: float) -> bool:  # noqa: N802
        return True


def report(batch: int, rows: int | None, *, late: int = 0) -> dict[str, Any]:
    """`None`: a trigger that found nothing, which knows nothing of the state."""
    operator = {"numRowsTotal": rows, "numRowsDroppedByWatermark": late}
    durations = {"triggerExecution": 5, **({} if rows is None else {"addBatch": 3})}
    return {
        "batchId": batch,
        "numInputRows": 1,
        "durationMs": durations,
        "stateOperators": [] if rows is None else [operator],
        "sink": {"numOutputRows": 1},
    }


def watched(checkpoint: Path | None, *reports: Mapping[str, Any]) -> driver.State | None:
    found = driver.watch(
        Query(*reports), lambda _: None, remembers="sessions", checkpoint=checkpoint
    )
    return found.state


def test_a_run_that_finds_nothing_says_what_the_last_one_left_open(tmp_path: Path) -> None:
    (tmp_path / "commits").mkdir()
    for number in (0, 1):
        (tmp_path / "commits" / str(number)).write_text("v1\n{}")
    assert watched(tmp_path, report(0, 3, late=1), report(1, 5, late=1)) == driver.State(5, 2, "sessions")  # fmt: skip
    nothing = report(2, None)
    assert watched(tmp_path, nothing) == driver.State(5, 0, "sessions")
    assert watched(None, nothing) is None
    (tmp_path / "commits" / "2").write_text("v1\n{}")  # by a run that nobody watched
    assert watched(tmp_path, report(3, None)) is None
    assert watched(tmp_path / "elsewhere", report(4, 6)) == driver.State(6, 0, "sessions")
    assert not (tmp_path / "elsewhere").exists()
