"""``python -m kvloom`` is ``kvloom``."""

from kvloom.cli import main

main()
