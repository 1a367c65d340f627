"""The commands that README.md shows are run as typed, in order, against a real server.

Shell blocks are run line by line, Python blocks as scripts. The default address is replaced by the one
of the test's server; commands of `make` are checked to exist instead of being run. A command that
follows a stream does not end by itself: it has to print something, and is ended then.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from support.readme import README, Block, blocks
from support.server import ROOT, Server

DEFAULT_ADDRESS = re.compile(r"(?:127\.0\.0\.1|localhost):4437")
COMMAND_DEADLINE_S = 30.0
SPARK_DEADLINE_S = 240.0
FOLLOWS = re.compile(r"\b(?:tail|follow)\b|live=")


def commands(block: Block) -> list[str]:
    """One command per line; a backslash or an open quote joins lines; prompts and comments go."""
    joined = block.text.replace("\\\n", " ")
    result: list[str] = []
    for line in joined.splitlines():
        text = re.sub(r"(?:^|\s)#\s.*$", "", line).removeprefix("$ ").strip()
        if not text:
            continue
        if result and result[-1].count("'") % 2:
            result[-1] += "\n" + text
        else:
            result.append(text)
    return result


def run_as_typed(
    command: list[str],
    environment: dict[str, str],
    follows: bool,
    *,
    folder: Path = ROOT,
    deadline_s: float = COMMAND_DEADLINE_S,
) -> str:
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # What counts of one that follows is data, not the progress that curl shows.
        stderr=subprocess.DEVNULL if follows else subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        late = threading.Timer(deadline_s, os.killpg, (process.pid, signal.SIGKILL))
        late.start()
        try:
            if follows:
                output = process.stdout.readline()
                os.killpg(process.pid, signal.SIGKILL)
                assert output.strip(), f"follows, but printed nothing: {command}"
                return output
            output = process.stdout.read()
            code = process.wait(deadline_s)
        finally:
            late.cancel()
    assert code != -signal.SIGKILL, f"did not end: {command}\n{output}"
    assert code == 0, f"{command} exited {code}\n{output}"
    return output


def test_readme_opens_with_the_two_commands() -> None:
    screen = "\n".join(README.read_text().splitlines()[:45])
    for wanted in (
        "make run",
        "make test",
        "curl",
        ".venv/bin/millstream append",
        ".venv/bin/millstream tail",
    ):
        assert wanted in screen, f"`{wanted}` is not on the first screen"


def test_every_make_task_that_is_shown_exists() -> None:
    tasks = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    documents = [README, ROOT / "CONTRIBUTING.md"]
    shown = {
        task
        for document in documents
        for task in re.findall(r"(?:^|`)make ([a-z-]+)", document.read_text(), re.MULTILINE)
    }
    assert shown
    assert shown <= tasks, shown - tasks


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_readme_commands_run_as_typed(server: Server, tmp_path: Path, full: bool) -> None:
    address = server.url.removeprefix("http://")
    environment = {**os.environ, "MILLSTREAM_URL": server.url, "NO_COLOR": "1"}
    ran = 0
    for block in blocks():
        text = DEFAULT_ADDRESS.sub(address, block.text)
        if block.uses_spark and not full:
            continue  # tests/spark/test_readme.py runs it in a session that is there
        if block.language == "python":
            script = tmp_path / f"block{ran}.py"
            script.write_text(text)
            python = str(ROOT / ".venv/bin/python")
            run_as_typed(
                [python, "-u", str(script)],
                environment,
                bool(FOLLOWS.search(text)),
                folder=tmp_path,
                deadline_s=SPARK_DEADLINE_S if block.uses_spark else COMMAND_DEADLINE_S,
            )
            ran += 1
        elif block.language in ("sh", "bash", "console"):
            for command in commands(Block(block.language, text)):
                if command.startswith(("make", "git clone", "cd ")) or " serve" in command:
                    continue
                run_as_typed(["bash", "-c", command], environment, bool(FOLLOWS.search(command)))
                ran += 1
    assert ran >= 4, "the README shows hardly any command"


def test_import_is_light() -> None:
    """`import millstream` must not pull in the server, the native module or anything of Spark."""
    check = (
        "import sys, millstream\n"
        "heavy = ['starlette', 'uvicorn', 'cryptography', 'rich', 'pyspark', 'click', 'millstream._engine']\n"
        "print(','.join(name for name in heavy if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == ""


def test_local_links_in_documents_lead_somewhere() -> None:
    documents = [
        README,
        ROOT / "CONTRIBUTING.md",
        ROOT / "ARCHITECTURE.md",
        *ROOT.glob("docs/**/*.md"),
    ]
    broken = []
    for document in documents:
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text()):
            if "://" not in link and not (document.parent / link).exists():
                broken.append(f"{document.name}: {link}")
    assert broken == []
