"""Pictures of a prompt: checked and decoded images, their tokens and positions, and stored features."""
