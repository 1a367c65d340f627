"""`python -m millstream.cli`: the command line without the installed script."""

from __future__ import annotations

import sys

from millstream.cli.main import main

sys.exit(main())
