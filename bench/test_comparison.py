"""Tests of the judging parts: `.venv/bin/pytest bench`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import pytest

import compare
from comparison import bounds, cells, checkpoints, machine, report, servers


def run(
    server: str, repetition: int, figure: float, *, ok: bool = True, cell: str = "catchup"
) -> dict[str, Any]:
    return {"cell": cell, "server": server, "repetition": repetition, "figure": figure, "ok": ok}


class RatioTest(unittest.TestCase):
    bound = bounds.RatioBound("catchup", "rust", 2.0, at_least=True)

    def judge(self, *records: dict[str, Any]) -> bounds.Verdict:
        return bounds.judge_ratio(self.bound, records, "catch-up")

    def test_median_of_ratios_of_the_same_repetition(self) -> None:
        pairs = [(30.0, 10.0), (10.0, 10.0), (25.0, 10.0)]
        records = [
            run(name, index, value)
            for index, pair in enumerate(pairs)
            for name, value in zip(("millstream", "rust"), pair, strict=True)
        ]
        verdict = self.judge(*records)
        assert (verdict.middle, verdict.passed) == (2.5, True)
        assert report.spread(verdict.values) == "2.50 (1.00 to 3.00)"

    def test_below_the_limit_fails(self) -> None:
        assert self.judge(run("millstream", 0, 19.0), run("rust", 0, 10.0)).passed is False

    def test_an_unverified_run_fails_however_fast(self) -> None:
        verdict = self.judge(run("millstream", 0, 900.0, ok=False), run("rust", 0, 10.0))
        assert verdict.passed is False

    def test_a_run_without_a_figure_fails(self) -> None:
        broken = {
            "cell": "catchup",
            "server": "millstream",
            "repetition": 0,
            "ok": False,
            "error": "x",
        }
        assert self.judge(broken, run("rust", 0, 10.0)).passed is False

    def test_without_a_peer_nothing_is_judged(self) -> None:
        assert self.judge(run("millstream", 0, 19.0)).passed is None

    def test_upper_limits(self) -> None:
        bound = bounds.RatioBound("sse", "rust", 1.2, at_least=False)
        for own, passed in ((11.9, True), (12.1, False)):
            records = [run("millstream", 0, own, cell="sse"), run("rust", 0, 10.0, cell="sse")]
            assert bounds.judge_ratio(bound, records, "SSE").passed is passed


class BaselineTest(unittest.TestCase):
    """Another build of Millstream in the same run."""

    def verdicts(self, cell: str, *pairs: tuple[float, float]) -> list[bounds.Verdict]:
        records = [
            run(name, index, value, cell=cell)
            for index, pair in enumerate(pairs)
            for name, value in zip(("millstream", "baseline"), pair, strict=True)
        ]
        judged = bounds.judge(records, cells.CELLS)
        return [verdict for verdict in judged if "against baseline" in verdict.text]

    def test_every_cell_that_has_it_is_judged_by_its_paired_ratios(self) -> None:
        (verdict,) = self.verdicts("catchup_4k", (98.0, 100.0), (90.0, 100.0), (99.0, 100.0))
        assert (verdict.wanted, verdict.middle, verdict.passed) == ("≥ 0.97x", 0.98, True)
        assert report.spread(verdict.values) == "0.98 (0.90 to 0.99)"
        (verdict,) = self.verdicts("creates", (96.0, 100.0))
        assert verdict.passed is False
        assert self.verdicts("idle", (1.0, 2.0)) == []

    def test_latencies_are_judged_the_other_way_round(self) -> None:
        for cell in ("sse", "append_open_loop"):
            (slower,) = self.verdicts(cell, (104.0, 100.0))
            (faster,) = self.verdicts(cell, (50.0, 100.0))
            assert (slower.wanted, slower.passed, faster.passed) == ("≤ 1.03x", False, True)

    def test_it_is_measured_wherever_millstream_is(self) -> None:
        for cell in cells.CELLS:
            assert bounds.names(cell.name, "baseline") == bounds.names(cell.name, "millstream")

    def test_the_two_take_turns_at_being_first(self) -> None:
        for chosen in ("millstream", "millstream,npm,rust"):
            order = compare.parse(["--servers", chosen, "--baseline", "."]).servers
            turns = [order[turn:] + order[:turn] for turn in range(len(order))]
            first = [turn.index("millstream") < turn.index("baseline") for turn in turns]
            assert first.count(True) == first.count(False)

    def test_the_two_take_turns_where_results_can_be_added(self) -> None:
        kinds = [self.kind(name) for name in ("npm", "millstream", "rust", "baseline")]
        names = [[kind.name for kind in group] for group in compare.groups(kinds, in_turns=True)]
        assert names == [["millstream", "baseline"], ["npm"], ["rust"]]
        assert len(compare.groups(kinds, in_turns=False)) == 4
        assert len(compare.groups(kinds[:3], in_turns=True)) == 3
        alone = [cell.name for cell in cells.CELLS if not cell.fits_in_turns]
        assert alone == ["sse"]
        assert cells.TURNS % 2 == 0

    def kind(self, name: str) -> servers.Kind:
        return servers.Kind(
            name=name,
            durability="",
            command=lambda _data, _port: [],
            version=str,
            install=lambda: None,
            picks_port=True,
        )

    def test_turns_add_up_to_one_record(self) -> None:
        def turn(rate: float, buckets: list[list[float]], *, ok: bool = True) -> cells.Turn:
            usage = machine.Usage(at=0.0, busy=0.0, steal=0.0, server=0.0, children=0.0)
            later = machine.Usage(at=2.0, busy=3.0, steal=0.0, server=1.0, children=1.0)
            result = {"per_second": rate, "ok": ok, "latency_us": {"p99": 1.0}}
            slices = {"width_ms": 100.0, "started_unix_ms": 0, "slices": [buckets]}
            return cells.Turn(result, usage, later, [], slices, int(rate))

        cell = cells.CELLS[0]
        record = cells._record(cell, [turn(10.0, [[5.0, 98]]), turn(30.0, [[900.0, 2]])])
        assert (record["figure"], record["ok"], record["turns"]) == (20.0, True, [10.0, 30.0])
        assert record["result"]["latency_us"]["p99"] == 900.0, "of all answers, not the mean"
        assert record["result"]["latency_us"]["p50"] == 5.0
        assert (record["machine"]["server_cores"], record["rss_bytes"]) == (0.5, 30)
        assert cells._record(cell, [turn(1.0, []), turn(1.0, [], ok=False)])["ok"] is False
        assert cells._record(cell, [turn(7.0, [])])["result"]["latency_us"] == {"p99": 1.0}

    def test_a_checkout_that_is_not_built_is_an_error(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            with pytest.raises(servers.BenchError, match="baseline is not built"):
                servers.millstream_of(Path(folder), "baseline").install()


class AbsoluteTest(unittest.TestCase):
    def judge(self, name: str, record: dict[str, Any]) -> bounds.Verdict:
        bound = next(one for one in bounds.ABSOLUTES if one.cell == name)
        return bounds.judge_absolute(bound, [record])

    def test_memory_is_the_highest_of_all_moments(self) -> None:
        record = run("millstream", 0, 0.0, cell="creates")
        record |= {"rss_bytes": 150e6, "rss_restarted_bytes": 90e6, "rss_read_bytes": 201e6}
        assert self.judge("creates_rss", record).passed is False
        record["rss_read_bytes"] = 199e6
        assert self.judge("creates_rss", record).passed is True

    def test_a_failed_read_back_fails_the_rate(self) -> None:
        record = run("millstream", 0, 0.0, cell="creates", ok=False)
        record["result"] = {"per_second": 50_000.0}
        assert self.judge("creates", record).passed is False
        assert self.judge("creates", record | {"ok": True}).passed is True


class CheckpointTest(unittest.TestCase):
    def test_slices_are_split_by_when_checkpoints_ran(self) -> None:
        samples = [
            checkpoints.Sample(1000, 4, 0),
            checkpoints.Sample(1200, 4, 0),
            checkpoints.Sample(1400, 5, 50_000),
            checkpoints.Sample(1600, 5, 50_000),
        ]
        assert checkpoints.intervals(samples) == [(1150.0, 1400)]
        slices = {
            "width_ms": 100.0,
            "started_unix_ms": 1000,
            "slices": [[[1000.0, 99]], [[4000.0, 10]], [], [], [], [[1000.0, 99], [2000.0, 1]]],
        }
        found = checkpoints.summary([(samples, slices)])
        assert found["completed"] == 1
        assert (found["p99_during_ms"], found["p99_outside_ms"]) == (4.0, 1.0)
        assert found["ratio"] == 4.0

    def test_without_checkpoints_there_is_no_ratio(self) -> None:
        slices = {"width_ms": 100.0, "started_unix_ms": 0, "slices": [[[5.0, 1]]]}
        assert checkpoints.effect([(slices, [])])["ratio"] is None


class MetricTest(unittest.TestCase):
    def test_samples_are_summed_over_labels_and_names_match_whole(self) -> None:
        text = (
            '# HELP a_total x\na_total{shard="0"} 3\na_total{shard="1"} 4\na_total_other 9\nb 1e3\n'
        )
        found = servers.metric_sums(text, ("a_total", "b", "c"))
        assert found == {"a_total": 7.0, "b": 1000.0, "c": None}


class MachineTest(unittest.TestCase):
    def test_a_group_is_measured_whole(self) -> None:
        with subprocess.Popen(
            ["sh", "-c", "sleep 60 & sleep 60"], start_new_session=True, stdout=subprocess.PIPE
        ) as shell:
            try:
                while len(machine.group_processes(shell.pid)) < 3:
                    assert shell.poll() is None
                single = machine.group_rss_bytes(os.getpgid(shell.pid))
                assert single > 3 * 100000
            finally:
                os.killpg(shell.pid, 9)


class ServerTest(unittest.TestCase):
    def test_a_server_that_ends_at_once_is_an_error_with_its_words(self) -> None:
        kind = servers.Kind(
            name="broken",
            durability="",
            command=lambda _data, _port: ["sh", "-c", "echo cannot start; exit 3"],
            version=str,
            install=lambda: None,
            picks_port=True,
        )
        with tempfile.TemporaryDirectory() as folder:
            with pytest.raises(servers.BenchError, match="ended with 3: cannot start"):
                servers.Server(kind, servers.fresh_directory(Path(folder), "data"))
            (record,) = cells.run_cell(cells.CELLS[0], [kind], Path(folder), 1.0, 0.0, 0.0)
        assert record["ok"] is False
        assert "cannot start" in record["error"]


if __name__ == "__main__":
    unittest.main()
