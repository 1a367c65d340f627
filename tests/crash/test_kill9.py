"""kill -9 in the middle of load, again and again over one data directory, in all classes at once.

Each round starts writers of every kind, kills the server at a random moment (in some rounds while it
stands still under SIGSTOP), starts it again and holds every class to its promise: in `disk` and `fsync` what was
acknowledged is there once and in order, producers recognise their duplicates, and what was not
acknowledged is absent or whole; in `memory` and `ephemeral` what survives is a prefix and the rest is told
as a gap. Creates, closes, deletes, forks and class changes hold in every class, no offset names two
records, and older rounds still read the same bytes.
A failing round is replayed by its seed: MILLSTREAM_TEST_SEED=<seed>.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

from support.crash import (
    CLASSES,
    STRONG,
    ClassChanger,
    ControlWriter,
    ForkWriter,
    LastingWriter,
    Loss,
    check_weak,
    send_patiently,
)
from support.http import Api, producer, request_bytes
from support.load import Writer, check_survivors, weak_writers_for, writers_for
from support.report import Report
from support.server import Server

ROUNDS_SHORT, ROUNDS_FULL = 20, 200
KEPT_DIGESTS = 6
FROZEN_SHARE = 0.2
FROZEN_S = 0.5


def check_producers(api: Api, writers: list[Writer], survived: dict[str, int]) -> None:
    """Everything that is stored is a duplicate; the next sequence number is not."""
    for writer in writers:
        if not writer.with_producer:
            continue
        count = survived[writer.name]
        with api.connect() as connection:
            for number in range(max(0, count - 3), count):
                connection.send(writer.request(number))
                answer = connection.read_response()
                assert answer.status == 204, (writer.name, number, answer.status)
                assert answer["producer-seq"] == str(count - 1)
            answer = send_patiently(connection, writer.request(count))
            assert answer.status == 200, (writer.name, count, answer)
            headers = {"Content-Type": writer.content_type, **producer(writer.name, 0, count + 5)}
            connection.send(request_bytes("POST", Api.target(writer.stream), headers, b"gap"))
            assert connection.read_response().status == 409
        writer.sent = max(writer.sent, count + 1)
        writer.acknowledged = writer.answered = count + 1


def digest(api: Api, stream: str) -> str:
    return hashlib.sha256(api.read_all(stream)).hexdigest()


class Worker(Protocol):
    def run(self, api: Api, start: threading.Barrier) -> None: ...


class Round:
    """Everything that runs at once until the kill, and what must hold after it."""

    def __init__(self, number: int, chance: random.Random, lasting: list[LastingWriter]) -> None:
        self.prefix = f"round{number}"
        self.lasting = lasting
        self.chance = chance
        self.strong = {
            name: writers_for(f"{self.prefix}/{name}", chance, name, many=2) for name in STRONG
        }
        self.weak = [
            writer
            for name in CLASSES
            if name not in STRONG
            for writer in weak_writers_for(f"{self.prefix}/{name}", chance, name)
        ]
        self.controls = [ControlWriter(f"{self.prefix}/{name}", name) for name in CLASSES]
        self.forks = ForkWriter(self.prefix, chance)
        self.changer = ClassChanger(self.prefix, chance)

    @property
    def writers(self) -> list[Writer]:
        return [*(writer for mix in self.strong.values() for writer in mix), *self.weak]

    def create(self, api: Api) -> None:
        for stream, kind, durability in sorted(
            {(w.stream, w.content_type, w.durability) for w in self.writers}
        ):
            empty = b"[]" if "json" in kind else b""
            made = api.put(stream, empty, kind, {"Stream-Durability": durability})
            assert (made.status, made["stream-durability"]) == (201, durability)
        assert api.put(self.changer.stream).status == 201

    def load_and_kill(self, server: Server, api: Api) -> bool:
        """Runs the load and kills the server in it; whether it stood still when it died."""
        workers: list[Worker] = [
            *self.writers,
            *self.controls,
            self.forks,
            self.changer,
            *self.lasting,
        ]
        start = threading.Barrier(len(workers) + 1)
        failures: list[BaseException] = []

        def run(worker: Worker) -> None:
            try:
                worker.run(api, start)
            except BaseException as failure:  # noqa: BLE001 - raised again by the test itself
                failures.append(failure)

        threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        start.wait(30)
        frozen = self.chance.random() < FROZEN_SHARE
        time.sleep(self.chance.uniform(0.05, 0.8))
        if frozen:
            with server.frozen():
                time.sleep(FROZEN_S)
                server.kill()
        else:
            server.kill()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        if failures:
            raise failures[0]
        return frozen

    def check(self, api: Api) -> list[Loss]:
        assert [fault for writer in self.writers for fault in writer.faults] == []
        losses = []
        for name, mix in self.strong.items():
            acknowledged = sum(writer.acknowledged for writer in mix)
            survived = check_survivors(api, mix)
            check_producers(api, mix, survived)
            check_survivors(api, mix)
            losses.append(Loss(name, acknowledged, 0, 0))
        losses += [check_weak(api, writer) for writer in self.weak]
        losses += [lasting.check(api, self.chance) for lasting in self.lasting]
        losses.append(self.changer.check(api))
        for control in self.controls:
            control.check(api)
        self.forks.check(api)
        return losses


def run_round(server: Server, api: Api, one: Round, report: Report, number: int) -> None:
    one.create(api)
    frozen = one.load_and_kill(server, api)
    server.restart(checkpoint_bytes=one.chance.choice(["64KiB", "1MiB", "64MiB"]))
    losses = one.check(api)
    report.add_round(losses, frozen=frozen)
    total, lost = (sum(getattr(loss, name) for loss in losses) for name in ("acknowledged", "lost"))
    print(
        f"round {number}: {total} acknowledged, {lost} of weak classes lost and reported, "
        f"{one.forks.forked} forks, {len(one.changer.offsets)} while changing class, "
        f"ready again after {server.start_seconds:.2f} s{', frozen' if frozen else ''}"
    )
    assert total > 0


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_every_class_keeps_its_promise_at_kill_9(
    start_server: Callable[..., Server], full: bool, durability_report: Path | None
) -> None:
    seed = int(os.environ.get("MILLSTREAM_TEST_SEED") or random.randrange(1 << 32))
    print(f"seed {seed}")
    chance = random.Random(seed)
    rounds = ROUNDS_FULL if full else ROUNDS_SHORT
    soak_until = time.monotonic() + 60 * float(os.environ.get("MILLSTREAM_SOAK_MINUTES", "0"))
    server = start_server(settings={"checkpoint_bytes": "1MiB", "append_max_bytes": "256KiB"})
    api = Api(server, deadline_s=20.0)
    command = "pytest tests/crash --durability-report FILE" + (" --full" if full else "")
    report = Report("kill -9 under load", command, seed)
    lasting = [LastingWriter(name, f"lasting/{name}") for name in CLASSES]
    for writer in lasting:
        made = api.put(writer.stream, headers={"Stream-Durability": writer.durability})
        assert made.status == 201
    known: dict[str, str] = {}
    number = 0
    while number < rounds or time.monotonic() < soak_until:
        one = Round(number, chance, lasting)
        run_round(server, api, one, report, number)
        for stream, expected in known.items():
            assert digest(api, stream) == expected, f"{stream} changed after it was checked"
        kept = [w.stream for mix in one.strong.values() for w in mix if not w.json_mode]
        chosen = chance.choice(kept)
        known[chosen] = digest(api, chosen)
        while len(known) > KEPT_DIGESTS:
            known.pop(chance.choice(list(known)))
        number += 1
    server.check_log()
    for name in STRONG:
        assert report.classes[name].lost == 0
    assert report.classes["ephemeral"].lost > 0, "nothing was ever lost: the load did not bite"
    if durability_report is not None:
        report.write(durability_report)
