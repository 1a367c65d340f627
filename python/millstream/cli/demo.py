"""`millstream demo`: a server, a load, a lake and what to look at, in one command and no questions.

Where it sits: puts together what users have: a server process (`processes`), the Python client
(`demo_load`), jobs (`land` here, the others in `demo_jobs`), plots (`plot`).

Invariants:
- I-DEM-1  Everything is in one directory, which goes at the end unless `--keep` is given.
- I-DEM-2  When it has ended, also by Ctrl-C, no process of it is left.
- I-DEM-3  It checks itself: the lake must hold what the server says the streams hold, else it fails.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from millstream.cli import demo_jobs
from millstream.cli.context import EXIT_OK, App
from millstream.cli.demo_load import CLICKS, ORDERS, STOCK, Load
from millstream.cli.interrupts import Interrupts
from millstream.cli.plot import Series, columns, svg
from millstream.cli.processes import none_left, own_server
from millstream.errors import MillstreamError

if TYPE_CHECKING:
    from millstream.client.sync.client import Client
    from millstream.spark.jobs.job import Request
    from millstream.spark.jobs.run.driver import Step

BURST_SECONDS: Final = 60.0
ROWS_PER_BATCH: Final = 15_000
STREAMS: Final = (ORDERS, STOCK, CLICKS, "chat/*")
CONF: Final = {
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
    # A JVM that lives for a minute never gets back what its second compiler and its parallel collector cost.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}
QUERIES: Final = {
    "orders by product": """
        SELECT get_json_object(text, '$.product') AS product, count(*) AS orders,
               round(sum(cast(get_json_object(text, '$.total') AS double)), 2) AS revenue
        FROM lake WHERE stream = 'shop/orders' GROUP BY product ORDER BY revenue DESC""",
    "chats by model": """
        SELECT get_json_object(text, '$.model') AS model, count(DISTINCT stream) AS chats,
               count(*) AS tokens
        FROM lake WHERE stream LIKE 'chat/%' GROUP BY model ORDER BY model""",
    "the stock that is low": """
        SELECT key AS product, cast(get_json_object(value, '$.left') AS int) AS left
        FROM stock ORDER BY left LIMIT 5""",
}

EPILOG: Final = """\b
What it does, in less than two minutes:
  1. starts a server in a temporary directory
  2. appends orders, changes of the stock and clicks of visitors (a stream each), and chat answers
     (a stream for each of them, a record per token)
  3. lands all of it as Parquet files with Spark, twice: the second run takes only what is new
  4. in the same session makes the stock of now out of its changes, and visits out of clicks
  5. compares all of it with the streams, and shows tables and plots of throughput and lag
\b
Needs the extra [spark] and Java 17 or newer (pip install 'millstream[spark,java]').
With --keep everything stays: data, lake, logs and the plots as demo.svg.
"""


@click.command(epilog=EPILOG)
@click.option("--keep", is_flag=True, help="Keep the directory and say how to look around in it.")
@click.pass_obj
def demo(app: App, keep: bool) -> int:
    """Show the whole of Millstream on this machine: server, load, lake."""
    from millstream.spark.deploy.required_versions import require_spark
    from millstream.spark.java import ensure_java

    require_spark()
    ensure_java()
    directory = Path(tempfile.mkdtemp(prefix="millstream-demo-"))
    interrupts = Interrupts()
    shown = Shown(app, interrupts)
    try:
        with interrupts.taken(), none_left():
            result = _play(directory, shown)
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)
    app.result({**result, "directory": str(directory) if keep else None})
    if keep:
        shown.say(_look_around(directory))
    return EXIT_OK


@dataclass(frozen=True, slots=True)
class Landed:
    """One batch: when it was done, what it took, what was still behind it."""

    at_seconds: float
    rows: int
    seconds: float
    behind: int


class Shown:
    """Prints the story; silent when the result is wanted as JSON."""

    def __init__(self, app: App, interrupts: Interrupts) -> None:
        self.interrupts = interrupts
        self._silent = app.json
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def step(self, text: str) -> None:
        self.interrupts.check()
        self.say(f"[{self.seconds:5.1f} s] {text}")

    def say(self, text: str) -> None:
        if not self._silent:
            click.echo(text)
            sys.stdout.flush()


def _play(directory: Path, shown: Shown) -> dict[str, Any]:
    from millstream.client.sync.client import connect
    from millstream.spark.jobs.run import driver
    from millstream.spark.session import build_session

    with ExitStack() as stack:
        (directory / "data").mkdir()
        url = stack.enter_context(own_server(directory / "data", directory / "server.log"))
        shown.step(f"server on {url}, everything in {directory}")
        load = stack.enter_context(Load(url))
        load.start()
        shown.step("appending orders and chat answers; starting Spark meanwhile ...")
        session = build_session(
            "millstream demo", master="local[2]", conf=CONF, log_file=directory / "spark.log"
        )
        stack.enter_context(driver.closing(session))
        stack.enter_context(shown.interrupts.noted())
        load.wait_for_burst(BURST_SECONDS)
        client = stack.enter_context(connect(url))
        total = sum(_records(client).values())
        shown.step(f"{total:,} records are in, more are coming; landing them ...")
        steps: list[Landed] = []
        _land(session, client, directory, shown, steps)
        load.stop()
        load.last_wave()
        shown.step("more records have come; landing what is new ...")
        _land(session, client, directory, shown, steps)
        counts = _compare(directory / "lake", _records(client))
        shown.step(
            f"{counts['records']:,} records of {counts['streams']:,} streams landed in "
            f"{counts['files']} files: the lake and the streams agree"
        )
        shown.step("making the stock of now out of its changes ...")
        stock = demo_jobs.materialise(session, client, directory, shown.interrupts.check)
        shown.step(str(stock))
        shown.step("making visits out of the clicks ...")
        visits = demo_jobs.sessionise(session, client, directory, shown.interrupts.check)
        shown.step(str(visits))
        tables = _tables(session, directory / "lake", stock.files)
    for title, text in tables.items():
        shown.say(f"\n{title}\n{text}")
    plots = _plots(steps)
    (directory / "demo.svg").write_text(svg("millstream demo: landing streams", plots))
    for plot in plots:
        shown.say("\n" + columns(plot))
    shown.say("")
    shown.step("done")
    return {
        **counts,
        "batches": len(steps),
        "stock": {"rows": stock.keys, "changes": stock.changes},
        "visits": {"closed": visits.closed, "open": visits.open},
        "seconds": round(shown.seconds, 1),
    }


def _records(client: Client) -> dict[str, int]:
    """What the server counts, by stream."""
    return {info.path: info.records or 0 for info in client.list()}


def _request(url: str, directory: Path) -> Request:
    from millstream.spark.jobs.job import Request, Target

    return Request(
        url=url,
        streams=STREAMS,
        target=Target.parse(str(directory / "lake")),
        rows_per_batch=ROWS_PER_BATCH,
    )


def _land(session: Any, client: Client, directory: Path, shown: Shown, steps: list[Landed]) -> None:
    """One run of `land`; adds its batches to `steps`."""
    from millstream.spark import jobs
    from millstream.spark.jobs.run import driver

    job, request = jobs.find("land"), _request(client.url, directory)
    driver.check(job, request)

    def note(step: Step) -> None:
        if step.rows == 0:
            return
        # A run that ends takes what was there when it began; the lag is to what is there now.
        landed = step.rows + sum(before.rows for before in steps)
        behind = max(0, sum(_records(client).values()) - landed)
        steps.append(Landed(shown.seconds, step.rows, step.seconds, behind))
        shown.step(
            f"  batch {step.batch}: {step.rows:,} records in {step.seconds:.1f} s, "
            f"{behind:,} behind the tail"
        )

    with driver.hold(job, request):
        query = job.begin(request, session, None)
        with driver.running(query):
            driver.watch(query, note, shown.interrupts.check)


def _compare(lake: Path, wanted: dict[str, int]) -> dict[str, int]:
    """The lake as pyarrow reads the plain directory, against what the server counts."""
    import pyarrow.compute as pc
    import pyarrow.dataset as dataset

    found = dataset.dataset(lake, format="parquet", partitioning="hive")
    table = found.to_table(columns=["stream"])
    counted = pc.value_counts(table.column("stream"))
    landed = {str(row["values"]): int(row["counts"]) for row in counted.to_pylist()}
    if landed != wanted:
        differing = sorted(
            name
            for name in landed.keys() | wanted.keys()
            if landed.get(name, 0) != wanted.get(name, 0)
        )
        raise MillstreamError(
            f"the lake and the streams differ in {len(differing)} streams, first `{differing[0]}`: "
            f"{landed.get(differing[0], 0)} landed, {wanted.get(differing[0], 0)} appended",
            code="demo_failed",
        )
    return {"records": table.num_rows, "streams": len(landed), "files": len(found.files)}


def _tables(session: Any, lake: Path, stock: Path) -> dict[str, str]:
    from millstream.spark.jobs.run.batch import text_table

    session.read.parquet(str(stock)).createOrReplaceTempView("stock")
    rows = session.read.parquet(str(lake))
    rows.selectExpr("stream", "cast(value as string) as text").createOrReplaceTempView("lake")
    tables = {}
    for title, query in QUERIES.items():
        found = session.sql(query)
        lines = text_table(found.columns, [tuple(row) for row in found.collect()])
        tables[title] = "\n".join(f"  {line}" for line in lines)
    return tables


def _plots(steps: list[Landed]) -> list[Series]:
    first = steps[0].at_seconds - steps[0].seconds if steps else 0.0
    rate = tuple((one.at_seconds - first, one.rows / max(one.seconds, 0.001)) for one in steps)
    behind = tuple((one.at_seconds - first, float(one.behind)) for one in steps)
    return [Series("throughput", "records/s", rate), Series("lag", "records", behind)]


def _look_around(directory: Path) -> str:
    return f"""
Everything is in {directory}:
  demo.svg       the plots
  lake/          Parquet files, by day
  stock/         the stock as a table in versions
  data/          the server's data directory
  server.log, spark.log

Look around:
  millstream serve --data-dir {directory / "data"}
  millstream tail {ORDERS} -n 5
  python -c "import pyarrow.dataset as d; print(d.dataset('{directory / "lake"}').count_rows())"
  rm -r {directory}"""
