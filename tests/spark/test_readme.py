"""The Spark code of README.md, in the shared session; in a process of its own, as typed, it runs at the full counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millstream.client.sync.client import Client
from support.readme import README, blocks
from support.server import Server

SOURCE = 'format("millstream")'
CHECKPOINT = "shop-checkpoint"


def test_what_the_readme_shows(
    spark: Any, server: Server, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Address and checkpoint are those of the test: the workers of a shared session know no other environment."""
    orders = client.create("shop/orders", content_type="application/json")
    orders.append_many([{"id": number} for number in range(10)])
    shown = [block for block in blocks() if block.uses_spark]
    assert shown
    for block in shown:
        assert SOURCE in block.text
        text = block.text.replace(SOURCE, f'{SOURCE}.option("url", "{server.url}")')
        text = text.replace(CHECKPOINT, str(tmp_path / "checkpoint"))
        exec(compile(text, str(README), "exec"), {})
    assert [record.value["id"] for record in client.stream("shop/copy").read()] == list(range(10))
    assert "only showing top 3 rows" in capsys.readouterr().out
