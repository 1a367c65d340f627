"""Jobs: what `millstream pipeline run JOB` can run, locally or submitted to a cluster.

Reading order: `job` (what a job is and what a run is asked for), `land` and `copy` (the jobs),
`driver` (one run from the lock to the last batch); `lake_*` is the sink behind `land`.

Invariant I-JOB-1: listing the jobs imports neither pyspark nor pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.errors import InvalidArgument
from millstream.spark.jobs.copy import Copy
from millstream.spark.jobs.land import Land

if TYPE_CHECKING:
    from millstream.spark.jobs.job import Job

JOBS: dict[str, Job] = {job.name: job for job in (Land(), Copy())}


def find(name: str) -> Job:
    job = JOBS.get(name)
    if job is None:
        raise InvalidArgument(
            f"there is no job `{name}`",
            hint="`millstream pipeline list` shows the jobs: " + ", ".join(JOBS),
        )
    return job
