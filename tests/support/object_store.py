"""A real object store for the tests of lakes: SeaweedFS with its S3 gateway, in a process of its own.

Invariants: all ports are free ones of loopback; it is up when the constructor returns; `close` ends this process by its id, and
what it stored goes with its folder.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import pyarrow.fs as pafs

BUCKET: Final = "lakes"
KEY: Final = "tester"
SECRET: Final = "not-a-secret"
DEADLINE_S: Final = 60.0


class ObjectStore:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "weed.log"
        ports = _free_ports(8)
        self.url = f"http://127.0.0.1:{ports[6]}"
        identity = {
            "name": KEY,
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        names = ("master", "volume", "filer", "s3")
        flags = [
            f"-{name}.{kind}={port}"
            for (name, kind), port in zip(
                ((name, kind) for name in names for kind in ("port", "port.grpc")),
                ports,
                strict=True,
            )
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    Path(sys.executable).with_name("weed"), "server", f"-dir={folder}", "-ip=127.0.0.1",
                    "-ip.bind=127.0.0.1", *flags, "-filer", "-s3", f"-s3.config={folder / 's3.json'}",
                    "-s3.port.iceberg=0", "-s3.port.lance=0",
                    "-volume.max=8", "-master.volumeSizeLimitMB=64",
                ],
                cwd=folder, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.files: Any = pafs.S3FileSystem(
            access_key=KEY,
            secret_key=SECRET,
            region="us-east-1",
            endpoint_override=self.url,
            allow_bucket_creation=True,
        )
        self._await()

    def _await(self) -> None:
        until = time.monotonic() + DEADLINE_S
        while True:
            try:
                self.files.create_dir(BUCKET)
                with self.files.open_output_stream(f"{BUCKET}/up") as stream:
                    stream.write(b"up")
                return
            except OSError:
                if time.monotonic() > until or self._process.poll() is not None:
                    text = self._log.read_text(errors="replace")
                    self.close()
                    raise AssertionError(f"no object store: {text[-3000:]}") from None
                time.sleep(0.1)  # it offers no event: the question is repeated until the deadline

    def environment(self) -> dict[str, str]:
        """How a lake reaches it."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.url,
        }

    def names(self, prefix: str) -> list[str]:
        """All objects below a prefix of the bucket."""
        chosen = pafs.FileSelector(f"{BUCKET}/{prefix}", recursive=True, allow_not_found=True)
        found = [info for info in self.files.get_file_info(chosen) if info.is_file]
        return sorted(info.path for info in found)

    def close(self) -> None:
        self._process.kill()  # an orderly end takes it half a minute, and nothing of it is kept
        self._process.wait(DEADLINE_S)


def _free_ports(count: int) -> list[int]:
    """Below those that the kernel gives to clients: between this look and the start, no connection of anybody takes one."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    for port in random.sample(range(lowest // 2, lowest), lowest // 4):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")


def catalog_environment(name: str, folder: Path) -> dict[str, str]:
    """A catalog of the user's own, as pyiceberg is told about it."""
    prefix = f"PYICEBERG_CATALOG__{name.upper()}__"
    return {f"{prefix}TYPE": "sql", f"{prefix}URI": f"sqlite:///{folder / 'own.db'}"}
