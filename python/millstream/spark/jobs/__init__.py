"""Jobs: what `millstream pipeline run JOB` can run, locally or submitted to a cluster.

    from millstream.spark import jobs
    query = jobs.land(spark, ["orders"], "lake", table="delta")

Reading order: `job` (what a job is and what a run is asked for), the jobs, each a module of its name, `run/driver` (one
run from the lock to the last batch); `shared/streams` and `lake` are the sinks; `run/batch` is for jobs that answer once, `audits` what
`audit` does.

Invariant I-JOB-1: listing the jobs imports neither pyspark nor pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.errors import InvalidArgument
from millstream.spark.jobs.audit import Audit
from millstream.spark.jobs.compact import Compact
from millstream.spark.jobs.copy import Copy
from millstream.spark.jobs.decode import Decode
from millstream.spark.jobs.deduplicate import Deduplicate
from millstream.spark.jobs.enrich import Enrich
from millstream.spark.jobs.land import Land
from millstream.spark.jobs.materialise import Materialise
from millstream.spark.jobs.metrics import Metrics
from millstream.spark.jobs.redrive import Redrive
from millstream.spark.jobs.replay import Replay
from millstream.spark.jobs.sessionise import Sessionise

if TYPE_CHECKING:
    from millstream.spark.jobs.job import Job

# From here on the name of a job is the job; its module is in `sys.modules` all the same.
land = Land()
copy = Copy()
replay = Replay()
decode = Decode()
redrive = Redrive()
deduplicate = Deduplicate()
materialise = Materialise()
enrich = Enrich()
sessionise = Sessionise()
metrics = Metrics()
compact = Compact()
audit = Audit()

JOBS: dict[str, Job] = {
    job.name: job
    for job in (
        land,
        copy,
        replay,
        decode,
        redrive,
        deduplicate,
        materialise,
        enrich,
        sessionise,
        metrics,
        compact,
        audit,
    )
}


def find(name: str) -> Job:
    job = JOBS.get(name)
    if job is None:
        raise InvalidArgument(
            f"there is no job `{name}`",
            hint="`millstream pipeline list` shows the jobs: " + ", ".join(JOBS),
        )
    return job
