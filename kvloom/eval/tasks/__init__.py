"""Sets of tasks. One file per set, one registration in it."""
