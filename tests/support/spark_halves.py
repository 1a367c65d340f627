"""Two processes of pytest for the tests with Spark: which test belongs to which.

Where it sits: `tests/conftest.py` hands the scheduler to xdist; `tests/spark/conftest.py` checks the table. The tests of
the shared session are one half; those that start a cluster, a Connect server or a command are the other one. So each of
these things is started once, and one half computes while the other one waits.
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling

FILES = {
    "test_cluster_jobs.py", "test_demo.py", "test_doctor_workers.py", "test_extras.py", "test_kills.py", "test_packaging.py",
    "test_pipelines.py",
}  # fmt: skip
TESTS = {
    "test_failing_tasks",
    "test_an_executor_is_killed_while_it_writes",
    "test_the_driver_is_killed",
    "test_speculation",
    "test_the_same_errors_in_a_connect_session",
    "test_connect",
    "test_local_cluster",
    "test_an_error_in_a_driver_reaches_the_test",
    "test_standalone",
    "test_land_runs_on_a_connect_server",
}
SHARED = {"local_clusters", "standalone", "standalone_driver", "connect_server", "connect"}
"""Fixtures that the first half does without."""


def half_of(nodeid: str) -> str:
    file, _, test = nodeid.partition("::")
    starts_processes = file.rpartition("/")[2] in FILES or test.partition("[")[0] in TESTS
    return "processes" if starts_processes else "session"


class Halves(LoadScopeScheduling):
    """Each half to a process of its own, in its order."""

    def _split_scope(self, nodeid: str) -> str:
        return half_of(nodeid)


def scheduler(config: Any, log: Any) -> Halves:
    return Halves(config, log)
