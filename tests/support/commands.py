"""A PATH without some commands, for tests of what happens where they are not installed."""

from __future__ import annotations

import os
import re
from pathlib import Path


def path_without(pattern: str, folder: Path) -> str:
    """A new PATH value: every command of this one, except those whose name matches."""
    folder.mkdir(parents=True)
    unwanted = re.compile(pattern)
    for place in os.environ["PATH"].split(os.pathsep):
        if not Path(place).is_dir():
            continue
        for command in Path(place).iterdir():
            link = folder / command.name
            if not unwanted.fullmatch(command.name) and not os.path.lexists(link):
                link.symlink_to(command)
    return str(folder)
