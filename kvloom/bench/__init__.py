"""Benches: seconds and bytes of what kvloom does, beside transformers and the bound of the arithmetic."""
