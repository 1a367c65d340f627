"""The list of a backup's files: read as it was written, refused when it is anything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.server.backup_manifest import Damaged, FileRecord, NotABackup, files, read_mark

WHOLE = """{
"format": "millstream 1",
"files": [
{"path": "catalog.redb", "bytes": 7, "crc32c": "0a1b2c3d"},
{"path": "segments/0a/0000018bcfe5680a-00000000.seg", "bytes": 0, "crc32c": "00000000"}
],
"commit_number": 9
}
"""


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "backup.json").write_text(WHOLE)
    assert list(files(tmp_path)) == [
        FileRecord("catalog.redb", 7, 0x0A1B2C3D),
        FileRecord("segments/0a/0000018bcfe5680a-00000000.seg", 0, 0),
    ]


@pytest.mark.parametrize(
    "damaged",
    [
        WHOLE[: WHOLE.index("],")],
        WHOLE.replace('"bytes": 7', '"bytes": 07'),
        WHOLE.replace("crc32c", "crc32"),
        WHOLE.replace("catalog.redb", "../catalog.redb"),
        WHOLE.replace("catalog.redb", "/catalog.redb"),
        WHOLE.replace("catalog.redb", "x" * 5000),
        WHOLE.replace("\n", "\r\n"),
        WHOLE.replace('"files"', '"file"'),
        "",
    ],
)
def test_a_cut_or_changed_list_is_refused(tmp_path: Path, damaged: str) -> None:
    (tmp_path / "backup.json").write_bytes(damaged.encode())
    with pytest.raises(Damaged, match="not in the form"):
        list(files(tmp_path))


def test_a_list_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "backup.json").write_bytes(WHOLE.encode().replace(b"catalog", b"\xff\xfe"))
    with pytest.raises(Damaged, match="not in the form"):
        list(files(tmp_path))


@pytest.mark.parametrize(
    ("mark", "part"),
    [
        (None, "not finished"),
        (b"millstream 99\nbackup.json 1 00000000\n", "millstream 99"),
        (b"millstream 1\nbackup.json one 00000000\n", "damaged"),
        (b"millstream 1\nbackup.json 1 0000000g\n", "damaged"),
        (b"millstream 1\nbackup.json 1 00000000\nmore", "damaged"),
        (b"millstream 1\n", "damaged"),
        (b"", "says"),
    ],
)
def test_a_mark_says_what_is_wrong_with_it(tmp_path: Path, mark: bytes | None, part: str) -> None:
    if mark is not None:
        (tmp_path / "format.backup").write_bytes(mark)
    with pytest.raises(NotABackup, match=part):
        read_mark(tmp_path)


def test_a_name_that_leads_nowhere_is_no_backup(tmp_path: Path) -> None:
    with pytest.raises(NotABackup, match="no such directory"):
        read_mark(tmp_path / "mistyped")
