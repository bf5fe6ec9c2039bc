"""Modules that ports share: MTP heads, layers with state rollback, and kernel sites."""
