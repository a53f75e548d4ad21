"""`python -m seethrough` is `seethrough`."""

from __future__ import annotations

import sys

from seethrough.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
