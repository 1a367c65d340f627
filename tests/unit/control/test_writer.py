"""The writer of the journal: a rewrite goes on beside what is decided, and keeps nobody waiting for its end."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from millstream.control.limits import JOURNAL_LINKS_PER_EVENT
from millstream.control.subscriptions import events as e
from millstream.control.subscriptions.journal import Journal, lasting
from millstream.control.subscriptions.snapshot import Snapshot
from millstream.control.subscriptions.writer import Writer
from unit.control.machine_support import at, create, in_order, new_machine, picture, replayed

STREAMS = 20 * JOURNAL_LINKS_PER_EVENT


class Steps:
    """A journal that keeps what it is told, and wants to be rewritten once."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.history: list[e.Event] = []
        self.longest = 0

    def needs_rewrite(self) -> bool:
        return "end" not in self.calls

    def append(self, transactions: list[list[e.Event]]) -> None:
        self.calls.append("append")
        if "end" in self.calls:
            for events in transactions:
                self.history += events

    def begin_rewrite(self) -> None:
        self.calls.append("begin")

    def extend_rewrite(self, history: list[e.Event], *, ends: bool) -> None:
        self.calls.append("end" if ends else "step")
        self.history += history
        if not ends:
            rows = [len(event.links) for event in history if isinstance(event, e.Linked)]
            self.longest = max(self.longest, sum(rows))


def test_decisions_are_synced_between_the_steps_of_a_rewrite() -> None:
    machine = new_machine()
    create(machine, tails={f"events/{number}": at(1) for number in range(STREAMS)})
    journal = Steps()

    async def recover(error: BaseException) -> None:
        raise AssertionError from error

    async def work() -> None:
        with ThreadPoolExecutor(1) as disk:
            writer = Writer(cast(Any, journal), disk, lambda: Snapshot(machine.state), recover)
            running = asyncio.create_task(writer.run())
            for number in range(5):
                writer.put(create(machine, f"t{number}", pattern=f"x{number}").events)
                writer.put(machine.add_streams("s", [f"new/{number}"], {}).events)
                await writer.synced()
                assert "end" not in journal.calls
            writer.put(machine.delete("t1").events)
            async with asyncio.timeout(20):
                while "end" not in journal.calls:  # noqa: ASYNC110 - the writer tells nobody
                    await asyncio.sleep(0.001)
            writer.put(machine.delete("t2").events)
            await writer.synced()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(work())
    assert journal.calls.count("step") >= STREAMS / JOURNAL_LINKS_PER_EVENT
    assert journal.longest < 2 * JOURNAL_LINKS_PER_EVENT
    state = replayed([e.encode(event) for event in journal.history])
    assert in_order(picture(state)) == in_order(picture(machine.state))


def test_a_rewrite_in_parts_counts_when_it_is_whole(engine: Any) -> None:
    def named(number: int) -> e.Event:
        return e.Rebased("s", f"http://{number}")

    journal = Journal(engine)
    journal.load()
    journal.append([[named(1)]])
    journal.begin_rewrite()
    journal.extend_rewrite([named(1)], ends=False)
    journal.append([[named(2)]])
    assert Journal(engine).load() == [named(1), named(2)]
    journal.begin_rewrite()
    journal.extend_rewrite([named(1)], ends=False)
    journal.append([[named(3)]])
    journal.extend_rewrite([named(2), named(3)], ends=True)
    journal.append([[named(4)]])
    assert Journal(engine).load() == [named(number) for number in (1, 2, 3, 4)]


def test_what_was_deleted_later_is_not_replayed() -> None:
    def made(name: str) -> list[e.Event]:
        return [
            e.Created(name, "u", {"streams": [], "pattern": None}, "http://h", 1),
            e.Linked(name, (("a", "-1", True),)),
        ]

    history = [*made("a"), *made("b"), e.Deleted("a"), *made("a"), e.Deleted("b")]
    assert lasting(history) == made("a")
