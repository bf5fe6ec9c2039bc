"""Store keys, values and recurrent states of sequences, roll them back, and save them in files."""
