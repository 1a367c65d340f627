"""Two processes of pytest for the tests with Spark: which test runs where.

Where it sits: `tests/conftest.py` hands the scheduler to xdist; `tests/spark/conftest.py` checks the table and the order. Those
that start a cluster, a Connect server or a command run first, all in one process, so that each of these things is started
once. The others need a session only: file by file they go to the process that has time.
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
"""Fixtures that tests of a session do without."""


def half_of(nodeid: str) -> str:
    file, _, test = nodeid.partition("::")
    starts_processes = file.rpartition("/")[2] in FILES or test.partition("[")[0] in TESTS
    return "processes" if starts_processes else "session"


class Balanced(LoadScopeScheduling):
    """What starts processes as one, everything else by files, in the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        half = half_of(nodeid)
        return nodeid.partition("::")[0] if half == "session" else half


def scheduler(config: Any, log: Any) -> Balanced:
    config.option.loadscopereorder = False
    return Balanced(config, log)
