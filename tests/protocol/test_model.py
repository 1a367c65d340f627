"""Random histories of one server against the model of `support.model`, restarts and kills included.

Hypothesis chooses the operations and shrinks a failing history to its shortest form; the blob that it
prints replays it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

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

        @rule(name=NAMES, body=st.one_of(st.just(b""), BODIES))
        def create(self, name: str, body: bytes) -> None:
            answer = self.api.put(self.path(name), body)
            known = self.streams.get(name)
            if known is None:
                assert answer.status == 201
                stream = ModelStream(appends=[body] if body else [])
                stream.offsets = [answer.offset] * len(stream.appends)
                self.streams[name] = stream
            else:
                assert answer.status == (409 if known.closed else 200)

        @rule(name=NAMES, request=APPENDS)
        def append(self, name: str, request: Append) -> None:
            headers: dict[str, str] = producer(*request.producer) if request.producer else {}
            if request.stream_seq is not None:
                headers["Stream-Seq"] = request.stream_seq
            if request.close:
                headers["Stream-Closed"] = "true"
            answer = self.api.post(self.path(name), request.body, request.content_type, headers)
            stream = self.streams.get(name)
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
            whole = self.api.get(self.path(name))
            if stream is None:
                assert whole.status == 404
                return
            assert (whole.status, whole.body) == (200, stream.content)
            assert (whole.get("stream-closed") == "true") == stream.closed
            if stream.offsets:
                index = place % len(stream.offsets)
                part = self.api.get(self.path(name), offset=stream.offsets[index])
                assert part.body == stream.content_after(index + 1)

        @precondition(lambda self: self.restarts_left > 0)
        @rule(kill=st.booleans())
        def restart(self, kill: bool) -> None:
            self.restarts_left -= 1
            (server.kill if kill else server.stop)()
            server.restart()

        def teardown(self) -> None:
            for name, stream in self.streams.items():
                assert self.api.get(self.path(name)).body == stream.content

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
            max_examples=600 if full else 40,
            stateful_step_count=40,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
