"""Decode one sequence: prefill, draft, verify, accept, repeat."""
