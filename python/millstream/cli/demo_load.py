"""The load of the demo: a shop with visitors, orders and a stock, and a chat service that streams tokens.

Where it sits: started by `demo`, in threads, through the public Python client.

Invariants:
- I-DML-1  Content comes from a seed; only the interleaving of threads differs between runs.
- I-DML-2  A burst first, as fast as it goes; then a steady trickle until it is stopped, bounded on a slow
           machine too; then, if asked for, a last wave. Pauses end at once when it is stopped.
"""

from __future__ import annotations

import datetime
import itertools
import random
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Self

from millstream.client.sync.client import Client, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ORDERS: Final = "shop/orders"
STOCK: Final = "shop/stock"
CLICKS: Final = "shop/clicks"
CLICKS_IN_ALL: Final = 6_000
CLICKS_BEGIN: Final = datetime.datetime(2026, 3, 1, 8, tzinfo=datetime.UTC)
ORDERS_PER_CHANGE: Final = 5
"""So many orders for each change of the stock."""
ORDERS_IN_BURST: Final = 60_000
ORDERS_PER_SECOND: Final = 1_500
ORDERS_AFTER_BURST: Final = 30_000
CHATS_IN_BURST: Final = 120
CHATS_PER_SECOND: Final = 6
CHATS_AFTER_BURST: Final = 120
CHAT_THREADS: Final = 2
ORDERS_IN_LAST_WAVE: Final = 20_000
CHATS_IN_LAST_WAVE: Final = 20
END_SECONDS: Final = 30.0
TICK_SECONDS: Final = 0.1

PRODUCTS: Final = (
    ("espresso beans", 14.9),
    ("filter paper", 3.5),
    ("hand grinder", 89.0),
    ("kettle", 59.0),
    ("mug", 11.0),
    ("scale", 39.5),
)
STATUSES: Final = ("paid", "paid", "paid", "paid", "shipped", "shipped", "refunded")
CITIES: Final = ("Aarhus", "Bergen", "Delft", "Ghent", "Lyon", "Porto", "Turku")
MODELS: Final = ("small", "small", "large")
TEXT: Final = (
    "the stream keeps every token in order and a reader that comes back goes on where it was "
    "so nothing is lost and nothing is said twice even if the line breaks in the middle of a "
    "sentence because an offset names the place and the server remembers"
)
WORDS: Final = tuple(TEXT.split(" "))


class Load:
    """Orders and chats, appended until it is stopped."""

    def __init__(self, url: str, *, seed: int = 7) -> None:
        self._url = url
        self._seed = seed
        self._stop = threading.Event()
        self._burst = threading.Barrier(CHAT_THREADS + 2)
        self._failure: BaseException | None = None
        self._order_events = order_events(random.Random(seed))
        self._stock_changes = stock_changes(random.Random(seed - 2))
        self._chat_numbers = itertools.count()
        self._threads = [threading.Thread(target=self._work, args=(self._orders,), daemon=True)]
        for number in range(CHAT_THREADS):
            self._threads.append(
                threading.Thread(target=self._work, args=(self._chats, number), daemon=True)
            )

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait_for_burst(self, seconds: float) -> None:
        """Until the burst is in the streams."""
        try:
            self._burst.wait(seconds)
        except threading.BrokenBarrierError:
            self._raise()
            raise TimeoutError(f"the burst took longer than {seconds:.0f} s") from None

    def stop(self) -> None:
        """Everything that was begun is finished and acknowledged when this returns."""
        self._end()
        self._raise()

    def _end(self) -> None:
        self._stop.set()
        self._burst.abort()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(END_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self, work: Callable[..., None], *arguments: int) -> None:
        try:
            with connect(self._url) as client:
                work(client, *arguments)
        except threading.BrokenBarrierError:
            pass  # stopped during the burst
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits for the load
            self._failure = error
            self._burst.abort()

    def last_wave(self) -> None:
        """More of the same after `stop`: as fast as it goes, and acknowledged when this returns."""
        chance = random.Random(self._seed - 1)
        with connect(self._url) as client:
            with client.stream(ORDERS).producer("shop") as producer:
                producer.append_many(itertools.islice(self._order_events, ORDERS_IN_LAST_WAVE))
            with client.stream(STOCK).producer("shop") as producer:
                count = ORDERS_IN_LAST_WAVE // ORDERS_PER_CHANGE
                producer.append_many(itertools.islice(self._stock_changes, count))
            for _ in range(CHATS_IN_LAST_WAVE):
                self._chat(client, chance)

    def _orders(self, client: Client) -> None:
        clicks = client.create(CLICKS, content_type="application/json")
        with clicks.producer("shop") as producer:
            producer.append_many(visitor_clicks(random.Random(self._seed - 3)))
        orders, stock = (
            client.create(name, content_type="application/json") for name in (ORDERS, STOCK)
        )
        with orders.producer("shop") as sales, stock.producer("shop") as counts:

            def order(number: int) -> None:
                sales.append(next(self._order_events))
                if number % ORDERS_PER_CHANGE == 0:
                    counts.append(next(self._stock_changes))

            for number in range(ORDERS_IN_BURST):
                if self._stop.is_set():
                    return
                order(number)
            sales.flush()
            counts.flush()
            self._burst.wait()
            for count in self._ticks(ORDERS_PER_SECOND, ORDERS_AFTER_BURST):
                for number in range(count):
                    order(number)

    def _chats(self, client: Client, number: int) -> None:
        chance = random.Random(self._seed + 1 + number)
        for _ in range(CHATS_IN_BURST // CHAT_THREADS):
            if self._stop.is_set():
                return
            self._chat(client, chance)
        self._burst.wait()
        for count in self._ticks(
            CHATS_PER_SECOND / CHAT_THREADS, CHATS_AFTER_BURST // CHAT_THREADS
        ):
            for _ in range(count):
                self._chat(client, chance)

    def _chat(self, client: Client, chance: random.Random) -> None:
        """One answer: a stream of its own, a record per token, closed at the end."""
        serial = next(self._chat_numbers)
        path = f"chat/{serial:05d}"
        stream = client.create(path, content_type="application/json")
        with stream.producer(f"model-{serial}") as producer:
            for event in chat_tokens(chance, serial):
                producer.append(event)
            producer.close_stream()

    def _ticks(self, per_second: float, most: int) -> Iterator[int]:
        """How many are due, ten times a second, until the load is stopped or `most` are done."""
        began = time.monotonic()
        done = 0
        while done < most and not self._stop.wait(TICK_SECONDS):
            due = min(most, int((time.monotonic() - began) * per_second)) - done
            done += due
            yield due


def order_events(chance: random.Random) -> Iterator[dict[str, Any]]:
    number = 0
    while True:
        number += 1
        product, price = chance.choice(PRODUCTS)
        quantity = 1 + int(chance.expovariate(1.2))
        yield {
            "order": number,
            "customer": f"c{chance.randrange(5000):04d}",
            "city": chance.choice(CITIES),
            "product": product,
            "quantity": quantity,
            "total": round(price * quantity, 2),
            "status": chance.choice(STATUSES),
        }


def visitor_clicks(chance: random.Random) -> Iterator[dict[str, Any]]:
    """A day of clicks, in the order of their times."""
    for number in range(CLICKS_IN_ALL):
        at = CLICKS_BEGIN + datetime.timedelta(seconds=number * 10 + chance.randrange(10))
        page = chance.choice(PRODUCTS)[0]
        yield {"visitor": f"v{chance.randrange(80):02d}", "at": at.isoformat(), "page": page}


def stock_changes(chance: random.Random) -> Iterator[dict[str, Any]]:
    """Changes of the state protocol: what is left of a product in a city; what is sold out is gone."""
    left = {f"{product} in {city}": 0 for product, _ in PRODUCTS for city in CITIES}
    while True:
        key = chance.choice(list(left))
        sold_out = left[key] > 0 and chance.random() < 0.2
        operation = "delete" if sold_out else "update" if left[key] else "insert"
        left[key] = 0 if sold_out else chance.randrange(1, 500)
        yield {
            "type": "stock",
            "key": key,
            **({} if sold_out else {"value": {"left": left[key]}}),
            "headers": {"operation": operation},
        }


def chat_tokens(chance: random.Random, serial: int) -> Iterator[dict[str, Any]]:
    model = chance.choice(MODELS)
    length = 40 + int(chance.expovariate(1 / 60))
    for index in range(min(length, 400)):
        yield {"chat": serial, "model": model, "index": index, "token": chance.choice(WORDS)}
