"""Does drafting change what this model says on this machine? Texts with and without drafts, compared and judged."""
