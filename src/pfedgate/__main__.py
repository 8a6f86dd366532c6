"""`python -m pfedgate`: the command line, also where the command itself is not on the path."""

from __future__ import annotations

from pfedgate.cli import main

if __name__ == "__main__":
    main()
