"""State what converters of GGUF files made of each family: names, changed values, metadata, and undo it.

A file here holds families that are alike; `family.py` says what each states, `table.py` lists them by a file's
`general.architecture`. Source: llama.cpp's `conversion/*.py`.
"""
