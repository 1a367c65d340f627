"""What is wrong with a command is one clear error, for every job: one sentence and a hint, before a JVM, and nothing is written.

A new job gets a line in `GOOD` or `ONCE`; what may be wrong in every job is tried with it then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millstream.cli.main import main
from millstream.spark.jobs import JOBS
from support.http import Api
from support.lakes import Lake
from support.reverse_proxy import ReverseProxy
from support.server import Server

pytestmark = pytest.mark.one_server(emptied=True)

TO_STREAM = ("--to", "stream:out", "--checkpoint", "checkpoint")
LETTERS = ("--schema", "id BIGINT", "--dead-letters", "dead")
GOOD: dict[str, tuple[str, ...]] = {
    "land": ("--to", "lake"),
    "copy": TO_STREAM,
    "replay": (*TO_STREAM, "--end-offset", "5"),
    "decode": (*TO_STREAM, *LETTERS),
    "redrive": (*TO_STREAM, *LETTERS),
    "deduplicate": (*TO_STREAM, "--key", "id", "--within", "1h"),
    "materialise": TO_STREAM,
    "sessionise": (*TO_STREAM, "--key", "id", "--gap", "30m"),
    "metrics": TO_STREAM,
    "enrich": (
        *TO_STREAM,
        "--lookup",
        "table",
        "--key",
        "id",
        "--lookup-key",
        "id",
        "--add",
        "name",
    ),
}
"""For each job that follows streams a command line that is right, but for what a test adds."""
ONCE: dict[str, tuple[str, ...]] = {"audit": ("--to", "old"), "compact": ("--to", "new")}
"""The same for each batch job."""
TOKENS = {**GOOD, "audit": ONCE["audit"]}
"""The jobs that talk to a server."""
Told = dict[str, Any]
Run = Callable[..., tuple[int, Told]]


@pytest.fixture
def run(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Run a job that must fail: its exit code and the one error that it printed. It wrote nothing."""
    monkeypatch.setenv("MILLSTREAM_URL", server.url)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("millstream.spark.session.build_session", _no_spark)
    (tmp_path / "table").mkdir()
    pq.write_table(pa.table({"id": ["1"], "name": ["one"]}), tmp_path / "table" / "part.parquet")

    def fail(job: str, *flags: str, way: str = "run") -> tuple[int, Told]:
        before = sorted(tmp_path.rglob("*"))
        source = "old" if job == "compact" else "in"
        code = main(["--json", "pipeline", way, job, "--from", source, *flags])
        shown = capsys.readouterr()
        assert shown.out == ""
        (line,) = shown.err.splitlines()
        error: Told = json.loads(line)["error"]
        assert error["message"], error
        assert error["hint"], error
        assert "Traceback" not in line
        assert sorted(tmp_path.rglob("*")) == before, "something was written"
        return code, error

    return fail


def _no_spark(*_: object, **__: object) -> None:
    raise AssertionError("Spark was started")


def test_every_job_is_tried() -> None:
    for table, runs_once in ((GOOD, False), (ONCE, True)):
        assert table.keys() == {name for name, job in JOBS.items() if job.runs_once == runs_once}


@pytest.mark.parametrize("job", GOOD)
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--nope", "x"), "no such option '--nope'"),
        (("--option", "nope=x"), "there is no option `nope`"),
        (("--option", "connectTimeout=soon"), "option `connectTimeout` is `soon`"),
        (("--option", "stream=x"), "option `stream` means nothing for"),
        (("--option", "nope"), "`nope` is not NAME=VALUE"),
        (("--max-rows", "0"), "0 is not in the range"),
        (("--every", "soon"), "`soon` is not a duration"),
        (("--once", "--every", "5s"), "choose --once or --every"),
        (("--master", "local[1]", "--remote", "sc://h"), "choose --master or --remote"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_a_wrong_flag(run: Run, job: str, flags: tuple[str, ...], said: str) -> None:
    code, error = run(job, *GOOD[job], *flags)
    assert code == 2
    assert said in error["message"]


@pytest.fixture
def lake(tmp_path: Path) -> None:
    """What a batch job is about."""
    row = {"stream": ["in"], "offset": [0], "timestamp": [datetime.now(UTC)], "value": [b"1"]}
    Lake(tmp_path / "old").add([pa.record_batch(row)])


@pytest.mark.usefixtures("lake")
@pytest.mark.parametrize("job", ONCE)
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--nope", "x"), "no such option '--nope'"),
        (("--option", "nope=x"), "there is no option `nope`|reads no stream"),
        (("--option", "nope"), "`nope` is not NAME=VALUE"),
        (("--to", "stream:s"), "needs its checkpoint|writes files, not `stream:s`"),
        (("--max-rows", "5"), "--max-rows means nothing"),
        (("--every", "5s"), "--every means nothing"),
        (("--master", "local[1]", "--remote", "sc://h"), "choose --master or --remote"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_a_wrong_flag_of_a_batch_job(run: Run, job: str, flags: tuple[str, ...], said: str) -> None:
    code, error = run(job, *ONCE[job], *flags)
    assert code == 2
    assert re.search(said, error["message"])


@pytest.mark.parametrize("job", ONCE)
def test_a_lake_that_is_missing(run: Run, job: str) -> None:
    code, error = run(job, *ONCE[job])
    assert (code, "there is no lake at" in error["message"]) == (2, True), error


def test_a_table_to_look_up_in_that_is_missing(run: Run) -> None:
    code, error = run("enrich", *GOOD["enrich"], "--lookup", "none")
    assert (code, error["code"]) == (2, "table_missing")
    assert "there is no table at `none`" in error["message"]


def test_a_replay_that_begins_behind_the_tail(run: Run, api: Api) -> None:
    assert api.put("in", b"[1,2,3]", "application/json").status == 201
    assert api.put("out", b"", "application/json").status == 201
    for offset in ("99", '{"in":99}'):
        code, error = run("replay", *TO_STREAM, "--start-offset", offset)
        assert code == 2
        said = "--start-offset is record 99, but stream `in` has 3"
        assert said in error["message"]


def test_the_list_says_what_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "pipeline", "list"]) == 0
    jobs = {job["name"]: job for job in map(json.loads, capsys.readouterr().out.splitlines())}
    required = [one["name"] for one in jobs["deduplicate"]["options"] if one["required"]]
    assert required == ["key", "within"]


@pytest.mark.parametrize(
    ("job", "option"),
    [(name, option.name) for name in GOOD for option in JOBS[name].options if option.required],
)
def test_a_flag_that_is_missing(run: Run, job: str, option: str) -> None:
    """Left out, and there without a value."""
    flags = list(GOOD[job])
    at = flags.index(f"--{option}")
    code, error = run(job, *flags[:at], *flags[at + 2 :])
    assert (code, error["message"]) == (2, f"missing option '--{option}'")
    code, error = run(job, *flags[: at + 1], "", *flags[at + 2 :])
    assert (code, error["message"]) == (2, f"job `{job}` needs the option `{option}`")


@pytest.mark.parametrize("job", GOOD)
def test_a_target_or_a_checkpoint_that_is_missing(run: Run, job: str) -> None:
    flags = list(GOOD[job])
    code, error = run(job, *flags[2:])
    assert (code, error["message"]) == (2, "missing option '--to'")
    if "--checkpoint" in flags:
        code, error = run(job, *flags[:2], *flags[4:])
        assert code == 2
        assert "needs a checkpoint" in error["message"]
        assert "--checkpoint" in error["hint"] or "directory" in error["hint"]


@pytest.mark.parametrize("job", GOOD)
def test_a_stream_that_is_missing(run: Run, job: str) -> None:
    code, error = run(job, *GOOD[job])
    assert (code, error["code"]) == (3, "stream_not_found")
    assert "`in` does not exist" in error["message"]


@pytest.mark.parametrize("job", [job for job, flags in GOOD.items() if "stream:out" in flags])
def test_a_target_stream_that_is_missing(run: Run, api: Api, job: str) -> None:
    assert api.put("in", b"", "application/json").status == 201
    code, error = run(job, *GOOD[job])
    assert (code, error["code"]) == (3, "stream_not_found")
    assert "`out` does not exist" in error["message"]
    assert "--create" in error["hint"]


@pytest.mark.usefixtures("lake")
@pytest.mark.parametrize("job", TOKENS)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("tokenEnv=NO_TOKEN", "the environment variable `NO_TOKEN` (option `tokenEnv`) is not set"),
        ("tokenEnv=EMPTY_TOKEN", "variable `EMPTY_TOKEN` (option `tokenEnv`) is not set"),
        ("tokenFile=no-file", "the file `no-file` (option `tokenFile`) cannot be read here"),
    ],
)
def test_a_token_that_is_not_where_it_is_said_to_be(
    run: Run, monkeypatch: pytest.MonkeyPatch, job: str, given: str, said: str
) -> None:
    monkeypatch.delenv("NO_TOKEN", raising=False)
    monkeypatch.setenv("EMPTY_TOKEN", " ")
    code, error = run(job, *TOKENS[job], "--option", given)
    assert (code, error["code"]) == (2, "option_invalid")
    assert said in error["message"]


@pytest.mark.usefixtures("lake")
def test_a_token_that_nobody_has_given(
    run: Run, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ReverseProxy(server.port, "a-token") as proxy:
        monkeypatch.setenv("MILLSTREAM_URL", proxy.url)
        for job, flags in TOKENS.items():
            code, error = run(job, *flags)
            assert (code, error["code"]) == (1, "unauthorized")
            assert "--option tokenEnv=NAME" in error["hint"]


@pytest.mark.parametrize("job", ["decode", "redrive"])
@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("id", "`id` is not a name and a type"),
        ("id BIGNIT", "`BIGNIT` is not a type"),
        ("id BIGINT,", "`` is not a name and a type"),
        ("user STRUCT<name: STRING", "it ends inside `>`"),
        ('{"type":', "not the JSON of a schema"),
    ],
)
def test_a_schema_that_is_none(run: Run, job: str, schema: str, said: str) -> None:
    flags = ("--schema", schema, "--dead-letters", "dead")
    code, error = run(job, *TO_STREAM, *flags)
    assert (code, error["code"]) == (2, "option_invalid")
    assert error["message"].startswith(f"option `schema` is `{schema}`: ")
    assert said in error["message"]


@pytest.mark.parametrize("job", ["land", "copy", "replay"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("valueFormat=json",), "`valueFormat=json` without `valueSchema`"),
        (("valueSchema=id INT",), "`valueSchema` means nothing for raw values"),
        (("valueFormat=json", "valueSchema=id BIGNIT"), "`BIGNIT` is not a type"),
        (("columns=value,nope",), "option `columns` names `nope`"),
        (("columns=value,key",), "column `key` without `keyPath`"),
    ],
)
def test_a_schema_of_the_source_that_is_none(
    run: Run, job: str, given: tuple[str, ...], said: str
) -> None:
    flags = [part for pair in given for part in ("--option", pair)]
    code, error = run(job, *GOOD[job], *flags)
    assert (code, error["code"]) == (2, "option_invalid")
    assert said in error["message"]


@pytest.mark.parametrize("path", ["a..b", ".a", "a.", "it's", "a[0]", "$.a"])
@pytest.mark.parametrize("option", ["key", "event-time"])
@pytest.mark.parametrize("job", ["deduplicate", "sessionise"])
def test_a_field_that_cannot_be_one(run: Run, job: str, option: str, path: str) -> None:
    code, error = run(job, *GOOD[job], f"--{option}", path)  # the last one counts
    assert code == 2
    assert f"option `{option}` is `{path}`" in error["message"]


@pytest.mark.parametrize(
    ("job", "option"), [("deduplicate", "within"), ("sessionise", "gap"), ("metrics", "window")]
)
def test_a_time_that_is_nothing(run: Run, job: str, option: str) -> None:
    code, error = run(job, *GOOD[job], f"--{option}", "0s")
    assert (code, error["message"]) == (2, f"`{option}` is 0")


@pytest.mark.parametrize("job", ["land", "decode", "deduplicate", "materialise"])
def test_a_directory_that_is_something_else(run: Run, tmp_path: Path, job: str) -> None:
    """A table in versions is no lake, and no lake is a table in versions: readers would find both in one."""
    flags = list(GOOD[job])
    at = flags.index("--to")
    hidden = tmp_path / "there" / "_millstream"
    hidden.mkdir(parents=True)
    if job == "materialise":
        (tmp_path / "there" / "_delta_log").mkdir()
        said = "holds a lake, not a table in versions"
    else:
        (hidden / "owner").write_text("somebody\n")
        said = "holds a table in versions"
    code, error = run(job, *flags[:at], "--to", "there", *flags[at + 2 :])
    assert code == 2
    assert said in error["message"]


@pytest.mark.parametrize("job", GOOD)
def test_submit_refuses_the_same_before_anything_is_submitted(run: Run, job: str) -> None:
    code, error = run(
        job, *GOOD[job], "--master", "spark://h:1", "--option", "nope=x", way="submit"
    )
    assert (code, error["message"]) == (2, "there is no option `nope`")
