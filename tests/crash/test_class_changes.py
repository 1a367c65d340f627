"""kill -9 while streams change their class under load.

Checked after each kill: the class is the last acknowledged one or the one that was being set; what is
left is a prefix of what was sent; a stream that only moved between durable classes lost nothing that was
acknowledged; whatever was acknowledged before the last acknowledged change to a durable class is there.
A failing round is replayed by its seed: MILLSTREAM_TEST_SEED=<seed>.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable

import pytest

from support.classes import CLASSES, SURVIVES_KILL, as_class, change, read_through
from support.http import Api
from support.load import LOST_CONNECTION, Writer
from support.server import Server

ROUNDS_SHORT, ROUNDS_FULL = 4, 60


class Changer:
    """Gives one stream one class after the other until the server dies."""

    def __init__(self, writer: Writer, choices: tuple[str, ...], seed: int) -> None:
        self.writer = writer
        self.choices = choices
        self.chance = random.Random(seed)
        self.acknowledged = choices[0]
        self.wanted = choices[0]
        self.changes = 0
        self.safe = 0
        """Appends that were acknowledged before a change to a durable class was."""
        self.faults: list[str] = []

    def run(self, api: Api, start: threading.Barrier) -> None:
        start.wait(30)
        try:
            while True:
                self.wanted = self.chance.choice(self.choices)
                before = self.writer.acknowledged
                answer = change(api, self.writer.stream, self.wanted)
                if answer.status != 200:
                    self.faults.append(f"{self.wanted}: {answer.status} {answer.text}")
                    return
                # Strengthened by this change, or safe before it and left so.
                if self.wanted in SURVIVES_KILL or self.acknowledged in SURVIVES_KILL:
                    self.safe = before
                self.acknowledged = self.wanted
                self.changes += 1
        except LOST_CONNECTION:
            return

    def check(self, api: Api) -> None:
        stream = self.writer.stream
        found = api.head(stream)["stream-durability"]
        assert found in (self.acknowledged, self.wanted), (stream, found)
        body, _ = read_through(api, stream)
        sent = b"".join(self.writer.record(number) for number in range(self.writer.sent))
        assert sent.startswith(body), f"{stream}: not a prefix of what was sent"
        promised = self.safe
        if {self.acknowledged, self.wanted} <= set(SURVIVES_KILL):
            promised = self.writer.acknowledged
        least = sum(len(self.writer.record(number)) for number in range(promised))
        assert len(body) >= least, f"{stream}: {len(body)} of {least} promised bytes"


def one_round(server: Server, number: int, chance: random.Random) -> int:
    api = Api(server, deadline_s=20.0)
    changers = []
    for index, choices in enumerate([SURVIVES_KILL, SURVIVES_KILL, CLASSES, CLASSES, CLASSES]):
        writer = Writer(
            name=f"w{index}",
            stream=f"change{number}/{index}",
            depth=chance.choice([1, 8]),
            with_producer=index % 2 == 0,
        )
        assert api.put(writer.stream, headers=as_class(choices[0])).status == 201
        changers.append(Changer(writer, choices, chance.randrange(1 << 32)))
    start = threading.Barrier(2 * len(changers) + 1)
    threads = [
        threading.Thread(target=worker.run, args=(api, start))
        for changer in changers
        for worker in (changer, changer.writer)
    ]
    for thread in threads:
        thread.start()
    start.wait(30)
    time.sleep(chance.uniform(0.1, 1.0))
    server.kill()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    server.restart(checkpoint_bytes=chance.choice(["4MiB", "64MiB"]))
    for changer in changers:
        assert changer.faults + changer.writer.faults == []
        changer.check(api)
    return sum(changer.changes for changer in changers)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_changes_of_class_keep_their_promises_through_kill_9(
    start_server: Callable[..., Server], full: bool
) -> None:
    seed = int(os.environ.get("MILLSTREAM_TEST_SEED") or random.randrange(1 << 32))
    print(f"seed {seed}")
    chance = random.Random(seed)
    server = start_server(settings={"checkpoint_bytes": "4MiB"})
    changes = sum(
        one_round(server, number, chance) for number in range(ROUNDS_FULL if full else ROUNDS_SHORT)
    )
    assert changes > 0, "no change was ever acknowledged"
    print(f"{changes} changes")
    server.check_log()
