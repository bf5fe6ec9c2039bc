"""Decode with drafts: read the prompt, then draft, verify, accept and commit, cycle by cycle."""
