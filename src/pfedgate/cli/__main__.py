"""`python -m pfedgate.cli` is the command `pfedgate`."""

from pfedgate.cli import main

main()
