"""Tests of the judging parts of the durability benchmarks: `.venv/bin/pytest bench`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import pytest

import classes
import mixed
import recovery
from comparison import servers
from durability import session


def start(**changes: Any) -> dict[str, Any]:
    """A warm start that recovered everything in time."""
    found = {"acknowledged_present": 10, "checksum": "ab"}
    record = {
        "cell": "log",
        "title": "a log",
        "cache": "warm",
        "ready_seconds": 4.9,
        "progress": [(0.1, "recovered 10 frames from 1 log files")],
        "written": {"write": {"acknowledged": 10, "checksum": "ab"}, "log_bytes": 2 << 30},
        "verify": {"ok": True, "verify": found},
        "machine": {"foreign_cores": 0.0},
        "ok": True,
    }
    return record | changes


class TestRecovery:
    def test_the_median_decides_on_time_and_every_start_on_the_rest(self) -> None:
        assert recovery.judge([start(), start(), start(ready_seconds=9.0)])
        assert not recovery.judge([start(), start(ready_seconds=5.0), start(ready_seconds=5.0)])
        assert not recovery.judge([start(progress=[])])
        assert not recovery.judge([start(), start(cache="cold", ok=False)])
        assert not recovery.judge([start(cache="cold")])

    def test_a_slow_cold_start_is_shown_and_not_judged(self) -> None:
        assert recovery.judge([start(), start(cache="cold", ready_seconds=9.0)])

    def test_counts_and_checksums_must_be_those_of_before_the_kill(self) -> None:
        assert recovery.is_right(start())
        for found in (
            {"acknowledged_present": 9, "checksum": "ab"},
            {"acknowledged_present": 10, "checksum": "ac"},
        ):
            assert not recovery.is_right(start(verify={"ok": True, "verify": found}))

    def test_every_created_stream_must_be_there(self) -> None:
        streams = start(cell="streams", written={"write": {"created": 7}})
        assert recovery.is_right(streams | {"verify": {"ok": True, "right": 7}})
        assert not recovery.is_right(streams | {"verify": {"ok": True, "right": 6}})

    def test_a_log_that_is_too_small_proves_nothing(self) -> None:
        small = start(written={"write": {}, "log_bytes": 1 << 20})
        document = {"records": [small], "quick": False}
        assert recovery.describe(document)[1] is False
        assert recovery.describe(document | {"quick": True})[1] is True

    def test_only_the_words_about_recovery_are_progress(self) -> None:
        lines = [(0.1, "recovering: 5 frames"), (0.2, "listening on http://x data=/recovery")]
        assert recovery.progress(lines) == [(0.1, "recovering: 5 frames")]


def class_run(name: str, repetition: int, rate: float, **changes: Any) -> dict[str, Any]:
    result = {"per_second": rate, "busy": 0, "complaints": []}
    record = {"cell": "c", "title": "t", "durability": name, "repetition": repetition}
    return record | {"ok": True, "result": result} | changes


class TestClasses:
    def test_ratios_are_taken_within_a_repetition(self) -> None:
        records = [
            class_run("fsync", 0, 10.0),
            class_run("memory", 0, 30.0),
            class_run("fsync", 1, 20.0),
            class_run("memory", 1, 40.0),
            class_run("memory", 2, 99.0),
        ]
        assert classes.ratios(records, "c", "memory") == [3.0, 2.0]
        assert classes.ratios(records, "c", "disk") == []

    def test_a_failed_run_gives_no_ratio_and_fails(self) -> None:
        records = [class_run("fsync", 0, 10.0), class_run("memory", 0, 30.0, ok=False)]
        assert classes.ratios(records, "c", "memory") == []
        lines, fine = classes.describe({"records": records})
        assert not fine
        assert any(line.startswith("- FAILED: t, memory") for line in lines)

    def test_declined_appends_are_shown_apart(self) -> None:
        declined = {"per_second": 5000.0, "busy": 1234, "complaints": []}
        records = [class_run("fsync", 0, 10.0), class_run("memory", 0, 0.0, result=declined)]
        lines, fine = classes.describe({"records": records})
        assert fine
        assert "| t | 5.0, 1,234 x 503 | 0.0 |" in lines


def load(class_name: str, p50: float, p99: float, **changes: Any) -> dict[str, Any]:
    made = {
        "durability": class_name,
        "scheduled": 100,
        "counted": 100,
        "latency_us": {"p50": p50, "p99": p99},
    }
    return made | dict.fromkeys(("busy", "refused", "unanswered", "held_back"), 0) | changes


def mixed_run(weak: str, repetition: int, *loads: dict[str, Any]) -> dict[str, Any]:
    cell = {"weak": weak, "mixed": len(loads) > 1, "delay_ms": 0, "repetition": repetition}
    return cell | {"ok": True, "result": {"loads": list(loads)}}


class TestMixed:
    @pytest.mark.parametrize(("p99", "passed"), [(150.0, True), (151.0, False)])
    def test_memory_may_rise_by_half(self, p99: float, passed: bool) -> None:
        records = [
            mixed_run("memory", 0, load("memory", 1, 100.0)),
            mixed_run("memory", 0, load("memory", 1, p99), load("fsync", 1, 1)),
        ]
        assert mixed.judge(records, "memory", 0).passed is passed
        assert mixed.judge(records, "memory", 200).passed is None

    @pytest.mark.parametrize(("p99", "passed"), [(99.0, True), (100.0, False)])
    def test_disk_stays_below_the_median_of_fsync(self, p99: float, passed: bool) -> None:
        records = [mixed_run("disk", 0, load("disk", 1, p99), load("fsync", 100.0, 900.0))]
        assert mixed.judge(records, "disk", 0).passed is passed

    def test_the_median_of_the_repetitions_decides(self) -> None:
        records = []
        for repetition, p99 in enumerate((140.0, 900.0, 125.0)):
            records.append(mixed_run("memory", repetition, load("memory", 1, 100.0)))
            both = (load("memory", 1, p99), load("fsync", 1, 1))
            records.append(mixed_run("memory", repetition, *both))
        verdict = mixed.judge(records, "memory", 0)
        assert verdict.ratios == pytest.approx((1.4, 9.0, 1.25))
        assert verdict.passed is True

    @pytest.mark.parametrize(
        "fault", [{"busy": 1}, {"counted": 99}, {"unanswered": 1}, {"held_back": 1}]
    )
    def test_a_schedule_that_was_not_kept_fails(self, fault: dict[str, int]) -> None:
        alone = mixed_run("memory", 0, load("memory", 1, 100.0))
        both = mixed_run("memory", 0, load("memory", 1, 100.0), load("fsync", 1, 1, **fault))
        assert mixed.judge([alone, both], "memory", 0).passed is False

    def test_runs_that_could_not_be_measured_fail(self) -> None:
        broken = {"weak": "disk", "mixed": True, "delay_ms": 0, "repetition": 0, "error": "x"}
        assert mixed.judge([broken | {"ok": False}], "disk", 0).passed is False


class TestSession:
    def options(self, folder: Path | None) -> argparse.Namespace:
        return argparse.Namespace(output=folder, quick=True, repetitions=1, markdown=True)

    def test_every_record_is_on_disk_at_once(self, tmp_path: Path) -> None:
        run = session.Session("classes", self.options(tmp_path / "new"), [])
        for count in (1, 2):
            run.add({"figure": count})
            written = json.loads((tmp_path / "new" / "results.json").read_text())
            assert len(written["records"]) == count
            assert written["complete"] is False
        run.close()
        written = json.loads((tmp_path / "new" / "results.json").read_text())
        assert written["complete"] is True
        with pytest.raises(servers.BenchError, match="exists already"):
            session.Session("classes", self.options(tmp_path / "new"), [])

    def test_an_earlier_run_is_reported_again(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = session.Session("classes", self.options(tmp_path / "new"), ["--quick"])
        run.add(class_run("fsync", 0, 12_000.0))
        file = str(tmp_path / "new" / "results.json")
        assert classes.main(["--from", file]) == 0
        assert "| t | 12.0 |" in capsys.readouterr().out
        with pytest.raises(servers.BenchError, match=r"no result of recovery\.py"):
            recovery.main(["--from", file])

    def test_the_command_shown_names_no_place_of_this_machine(self) -> None:
        given = ["--quick", "--output", "/somewhere", "--markdown", "--seconds", "3"]
        assert session._shown(given) == ["--quick", "--seconds", "3"]
        assert session._shown(["--output=/somewhere"]) == []


class TestServerLines:
    def test_lines_keep_the_time_they_were_first_seen(self, tmp_path: Path) -> None:
        script = (
            "import os, socket, sys, time\n"
            "found = socket.create_server(('127.0.0.1', 0))\n"
            "print('recovering:', os.environ['TALKER'], flush=True)\n"
            "print(f'listening on http://127.0.0.1:{found.getsockname()[1]}', flush=True)\n"
            "found.accept(); time.sleep(60)\n"
        )
        kind = servers.Kind(
            name="talker",
            durability="",
            command=lambda _data, _port: [sys.executable, "-c", script],
            version=str,
            install=lambda: None,
            picks_port=True,
        )
        data = servers.fresh_directory(tmp_path, "data")
        with servers.Server(kind, data, environment={"TALKER": "7 frames"}) as server:
            assert server.lines[0][1] == "recovering: 7 frames"
            # Lines are noted to the millisecond.
            assert server.lines[0][0] <= server.ready_seconds + 0.001
            server.kill()
