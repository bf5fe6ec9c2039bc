"""Describe how GGUF converters changed each family (names, values, metadata), and undo it.

A file here contains similar families; `family.py` defines the description of one, `table.py` lists them by a file's
`general.architecture`. Source: llama.cpp's `conversion/*.py`.
"""
