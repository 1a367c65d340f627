"""Random histories of one server against the model of `support.model`: classes, restarts and kills included.

Hypothesis chooses the operations and shrinks a failing history to its shortest form; the blob that it
prints replays it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from support.classes import CLASSES, as_class, read_through, set_class
from support.http import Api, producer
from support.model import Append, ModelStream
from support.server import Server

NAMES = st.sampled_from(["a", "b", "c"])
BODIES = st.binary(min_size=1, max_size=40)
PRODUCERS = st.tuples(st.sampled_from(["p", "q"]), st.integers(0, 2), st.integers(0, 4))
APPENDS = st.builds(
    Append,
    body=st.one_of(BODIES, st.just(b"")),
    content_type=st.sampled_from(["text/plain", "text/plain", "text/plain", "text/html", None]),
    producer=st.one_of(st.none(), PRODUCERS),
    stream_seq=st.one_of(st.none(), st.sampled_from(["1", "2", "10", "a", "B"])),
    close=st.sampled_from([False, False, False, False, True]),
)


def machine_for(server: Server, serial: list[int]) -> type[RuleBasedStateMachine]:
    class Histories(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            serial[0] += 1
            self.prefix = f"model/{serial[0]}"
            self.api = Api(server)
            self.streams: dict[str, ModelStream] = {}
            self.restarts_left = 2
            if server.process.poll() is not None:
                server.restart()  # the last history ended the server: let Hypothesis shrink it

        def path(self, name: str) -> str:
            return f"{self.prefix}/{name}"

        @rule(
            name=NAMES,
            body=st.one_of(st.just(b""), BODIES),
            durability=st.one_of(st.none(), st.sampled_from(CLASSES)),
        )
        def create(self, name: str, body: bytes, durability: str | None) -> None:
            headers = as_class(durability) if durability else {}
            answer = self.api.put(self.path(name), body, headers=headers)
            known = self.streams.get(name)
            if known is None:
                assert answer.status == 201
                stream = ModelStream(appends=[body] if body else [])
                stream.durability = durability or "fsync"
                stream.offsets = [answer.offset] * len(stream.appends)
                stream.safe = 0 if stream.is_weak else len(stream.appends)
                self.streams[name] = stream
            else:
                same = durability in (None, known.durability) and not known.closed
                assert answer.status == (200 if same else 409)

        @precondition(lambda self: self.streams)
        @rule(data=st.data(), durability=st.sampled_from(CLASSES))
        def change_class(self, data: st.DataObject, durability: str) -> None:
            name = data.draw(st.sampled_from(sorted(self.streams)))
            set_class(self.api, self.path(name), durability)
            self.streams[name].set_durability(durability)

        @rule(name=NAMES, request=APPENDS)
        def append(self, name: str, request: Append) -> None:
            stream = self.streams.get(name)
            if stream is not None and stream.lossy:
                request = replace(request, producer=None, stream_seq=None)
            headers: dict[str, str] = producer(*request.producer) if request.producer else {}
            if request.stream_seq is not None:
                headers["Stream-Seq"] = request.stream_seq
            if request.close:
                headers["Stream-Closed"] = "true"
            answer = self.api.post(self.path(name), request.body, request.content_type, headers)
            if stream is None:
                assert answer.status == 404
                return
            before = len(stream.appends)
            status, code = stream.apply(request)
            assert answer.status == status, (request, code)
            assert code is None or answer.code == code
            if len(stream.appends) > before:
                stream.offsets.append(answer.offset)
            assert stream.offsets == sorted(set(stream.offsets))
            if status < 400 or code == "stream_closed":
                assert (answer.get("stream-closed") == "true") == stream.closed

        @rule(name=NAMES)
        def delete(self, name: str) -> None:
            expected = 404 if self.streams.pop(name, None) is None else 204
            assert self.api.delete(self.path(name)).status == expected

        @rule(name=NAMES, place=st.integers(0, 30))
        def read(self, name: str, place: int) -> None:
            stream = self.streams.get(name)
            head = self.api.head(self.path(name))
            if stream is None:
                assert head.status == 404
                return
            assert head["stream-durability"] == stream.durability
            assert (head.get("stream-closed") == "true") == stream.closed
            self.check_content(name, stream)
            if stream.offsets:
                index = place % len(stream.offsets)
                body, gaps = read_through(self.api, self.path(name), stream.offsets[index])
                assert body == stream.content_after(index + 1)
                assert not gaps or stream.lossy
            if stream.lost_offsets:
                offset, kept = stream.lost_offsets[place % len(stream.lost_offsets)]
                body, gaps = read_through(self.api, self.path(name), offset)
                assert body == stream.content_after(kept)
                assert (gaps[0].begin, gaps[0].certain) == (offset, True)

        def check_content(self, name: str, stream: ModelStream) -> None:
            body, gaps = read_through(self.api, self.path(name))
            assert body == stream.content
            assert not gaps or stream.lossy

        @precondition(lambda self: self.restarts_left > 0)
        @rule(kill=st.booleans())
        def restart(self, kill: bool) -> None:
            self.restarts_left -= 1
            (server.kill if kill else server.stop)()
            server.restart()
            for name, stream in self.streams.items():
                if stream.loses(kill=kill):
                    stream.lose(read_through(self.api, self.path(name))[0])

        def teardown(self) -> None:
            for name, stream in self.streams.items():
                self.check_content(name, stream)

    return Histories


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_random_histories_agree_with_the_model(
    start_server: Callable[..., Server], full: bool
) -> None:
    server = start_server()
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine_for(server, [0]),
        settings=settings(
            max_examples=600 if full else 25,
            stateful_step_count=40,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
