"""Read tool calls as models write them: one file a kind of format, and a table of all formats."""
