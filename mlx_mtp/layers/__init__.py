"""Modules that several ports share."""
