"""The process behind `support.spark.Driver`: one session, then one call after the other.

Requests are lines of JSON on stdin (`file`, `function`, `arguments`), answers lines of JSON on the descriptor given as the
only argument. It ends when stdin does. Needs pyspark beside the standard library; Millstream only where a test has it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def start_session(told: dict[str, Any]) -> Any:
    if not told["start_session"]:
        return None
    from millstream.spark.session import build_session

    log_file = None if told["remote"] else Path(told["log_file"])
    return build_session(
        "millstream-test",
        master=told["master"],
        remote=told["remote"],
        conf=told["conf"],
        log_file=log_file,
    )


def load(file: str) -> ModuleType:
    """Import a file under a name of its own; its functions are sent to executors by value."""
    name = f"called_{Path(file).stem}_{hashlib.sha256(file.encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(module)
    return module


def find(module: ModuleType, name: str) -> Callable[..., Any]:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def answer(compute: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"result": compute()}
    except Exception as error:  # noqa: BLE001 - whatever it is, the test is told
        return {
            "error": {
                "kind": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
            }
        }


def main() -> None:
    told = json.loads(os.environ["MILLSTREAM_TEST_DRIVER"])
    session: Any = None

    def begin() -> str:
        nonlocal session
        session = start_session(told)
        return "ready"

    with os.fdopen(int(sys.argv[1]), "w") as answers:

        def send(document: dict[str, Any]) -> bool:
            answers.write(json.dumps(document) + "\n")
            answers.flush()
            return "error" not in document

        if not send(answer(begin)):
            sys.exit(1)
        for line in sys.stdin:
            request = json.loads(line)

            def run(request: dict[str, Any] = request) -> Any:
                function = find(load(request["file"]), request["function"])
                return function(session, **request["arguments"])

            send(answer(run))
        if session is not None:
            session.stop()


if __name__ == "__main__":
    main()
