"""Evaluation: sets of questions with documents and answers, metrics, and what the numbers can bear."""
