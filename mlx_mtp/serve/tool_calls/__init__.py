"""Read tool calls as models write them: one file for each kind of format, and a table of all formats."""
