"""Read config.json into the fields that a family has, and apply of it what a family leaves out."""
