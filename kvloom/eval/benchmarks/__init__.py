"""Evaluation sets: one file per set, registered by being here."""
