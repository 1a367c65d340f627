"""Looking up the names of webhook receivers, with a resolver that the test holds back."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from millstream.control.limits import LOOKUPS_MAX
from millstream.control.subscriptions import address, delivery, lookups
from millstream.control.subscriptions.delivery import DeliveryFailed
from millstream.control.subscriptions.lookups import Lookups

DEADLINE_S = 10.0
DEAD = 3 * LOOKUPS_MAX
FOUND = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 443))]


class Names:
    """The machine's resolver: names that begin with `dead` are answered when the test ends, all others at once."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()
        self._end = threading.Event()

    def getaddrinfo(self, host: str, _port: int, **_: Any) -> list[Any]:
        with self._lock:
            self.asked[host] += 1
            self._now += 1
            self.most = max(self.most, self._now)
        if host.startswith("dead"):
            self._end.wait(DEADLINE_S)
        with self._lock:
            self._now -= 1
        return FOUND

    def end(self) -> None:
        self._end.set()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    names = Names()
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    monkeypatch.setattr(lookups, "RESOLVE_TIMEOUT_S", 0.3)
    yield names
    names.end()


class Counted:
    def __init__(self) -> None:
        self.now = self.most = 0

    def count(self, change: int) -> None:
        self.now += change
        self.most = max(self.most, self.now)


async def ask(lookups: Lookups, name: str) -> str:
    try:
        return ", ".join(await lookups.resolve(name, 443))
    except OSError as error:
        return str(error)


async def ask_all(lookups: Lookups, names: list[str]) -> list[str]:
    return await asyncio.gather(*(ask(lookups, name) for name in names))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - a thread has no event for its end
            await asyncio.sleep(0.01)


def test_so_many_at_once_and_who_gets_no_turn_fails_in_time(names: Names) -> None:
    counted = Counted()

    async def work() -> None:
        looking = Lookups(counted.count)
        began = asyncio.get_running_loop().time()
        told = await ask_all(looking, [f"dead{number}" for number in range(DEAD)])
        assert asyncio.get_running_loop().time() - began < DEADLINE_S / 2
        assert all("within" in text for text in told), set(told)
        # Nobody waits for them any more, but they are not over.
        assert counted.now == counted.most == names.most <= LOOKUPS_MAX
        names.end()
        await until(lambda: counted.now == 0)
        assert await ask(looking, "dead0") == "192.0.2.1"

    asyncio.run(work())


def test_names_that_are_never_answered_leave_turns_to_others(names: Names) -> None:
    """New ones, too; who was answered the last time needs no luck."""

    async def work() -> None:
        looking = Lookups(lambda _: None)
        assert await ask(looking, "known") == "192.0.2.1"
        dead = [f"dead{number}" for number in range(DEAD)]
        first = asyncio.create_task(ask_all(looking, dead))
        await until(lambda: bool(names.asked["dead0"]))
        assert await ask(looking, "known") == "192.0.2.1"
        await first
        again = asyncio.create_task(ask_all(looking, dead))
        for _ in range(5):
            assert await ask(looking, "known") == "192.0.2.1"
        await again

    asyncio.run(work())


def test_those_that_wait_have_their_turn_in_order(names: Names) -> None:
    async def work() -> None:
        looking = Lookups(lambda _: None)
        found = await ask_all(looking, [f"name{number}" for number in range(DEAD)])
        assert set(found) == {"192.0.2.1"}
        assert list(names.asked) == [f"name{number}" for number in range(DEAD)]

    asyncio.run(work())


def test_who_gives_up_gives_its_turn_back(names: Names) -> None:
    counted = Counted()

    async def work() -> None:
        looking = Lookups(counted.count)
        for _ in range(3):
            asking = [asyncio.create_task(ask(looking, f"name{number}")) for number in range(DEAD)]
            await asyncio.sleep(0)
            for task in asking[::2]:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        await until(lambda: counted.now == 0)
        assert await ask(looking, "name") == "192.0.2.1"

    asyncio.run(work())


def test_an_address_is_no_name(names: Names) -> None:
    async def work() -> None:
        looking = Lookups(lambda _: None)
        assert await looking.resolve("192.0.2.7", 443) == ["192.0.2.7"]
        assert await looking.resolve("2001:db8::7", 443) == ["2001:db8::7"]

    asyncio.run(work())
    assert not names.asked


def test_without_a_thread_for_it_a_delivery_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    counted = Counted()
    target = address.parse("https://hooks.example.com/x")

    async def work() -> None:
        looking = Lookups(counted.count)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            for _ in range(2 * LOOKUPS_MAX):
                with pytest.raises(DeliveryFailed, match="can't start new thread"):
                    await delivery.post(target, b"", {}, 5.0, looking.resolve)
        assert counted.now == 0

    asyncio.run(work())
