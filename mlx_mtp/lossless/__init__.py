"""Check on this machine that drafting does not change a model's output: compare it with and without drafts."""
