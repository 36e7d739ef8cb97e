"""Benches: seconds and bytes of what kvloom does, beside transformers' own way and the bound of the arithmetic."""
