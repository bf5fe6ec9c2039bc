"""Check that drafting does not change what a model says on this machine: texts with and without drafts, compared."""
