"""The pipeline of docs/guides/spark-pipelines.md, run by Spark's own command as the page shows it, twice."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from millstream.client.sync.client import Client
from support.server import ROOT, Server
from support.spark import SPARK_HOME, environment, kill_session

pytestmark = pytest.mark.long
GUIDE = ROOT / "docs" / "guides" / "spark-pipelines.md"
DEADLINE_S = 280.0


def block(language: str) -> str:
    (found,) = re.findall(
        rf"^```{language}\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL
    )
    return str(found)


def run(project: Path) -> None:
    """The command of the page, in the directory of the project."""
    command = GUIDE.read_text().partition("## Run it")[2].split("```sh\n")[1].split("\n")[0].split()
    assert command[0] == "spark-pipelines"
    with (project / "pipeline.log").open("wb") as log:
        process = subprocess.Popen(
            [SPARK_HOME / "bin" / command[0], *command[1:]],
            cwd=project,
            env=environment(project),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        code = process.wait(DEADLINE_S)
    finally:
        kill_session(process)
    assert code == 0, (project / "pipeline.log").read_text()[-10_000:]


def rows(project: Path, table: str) -> list[dict[str, object]]:
    files = sorted((project / "spark-warehouse" / table).glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def order(number: int) -> dict[str, object]:
    return {"id": number, "product": "mug" if number % 2 else "kettle", "total": number * 10.0}


@pytest.mark.timeout(600)  # two starts of a command with a deadline each
def test_the_pipeline_reads_and_writes_streams(
    server: Server, client: Client, tmp_path: Path
) -> None:
    orders = client.create("orders", content_type="application/json")
    (tmp_path / "transformations").mkdir()
    spec = block("yaml").replace("/data/shop", str(tmp_path))
    (tmp_path / "spark-pipeline.yml").write_text(spec)
    code = block("python").replace("http://127.0.0.1:4437", server.url)
    (tmp_path / "transformations" / "shop.py").write_text(code)
    for first, behind in ((0, 20), (20, 25)):
        orders.append_many([order(number) for number in range(first, behind)])
        run(tmp_path)
        sent = [order(number) for number in range(behind)]
        found = sorted(rows(tmp_path, "orders"), key=lambda row: str(row["offset"]).zfill(9))
        assert [{name: row[name] for name in ("id", "product", "total")} for row in found] == sent
        large = [record.value for record in client.stream("large-orders").read()]
        assert large == [one for one in sent if float(str(one["total"])) >= 100]
        revenue = {str(row["product"]): row["revenue"] for row in rows(tmp_path, "revenue")}
        assert sum(float(str(value)) for value in revenue.values()) == sum(
            float(str(one["total"])) for one in sent
        )
        assert revenue.keys() == {"mug", "kettle"}
