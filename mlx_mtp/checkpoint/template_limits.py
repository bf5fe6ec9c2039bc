"""Define the limits of one rendering of a chat template in a process of its own, and the error for breaking one."""

DEADLINE = 10.0  # seconds
MOST_MEMORY = 256 * 2**20  # bytes
MOST_TEXT = 20_000_000  # characters of the rendered text
MOST_MESSAGE = 1000  # characters of an error message
TOO_SLOW = f"took longer than {DEADLINE:g} seconds"
TOO_MUCH_MEMORY = f"needed more than {MOST_MEMORY // 2**20} MB of memory"
TOO_LONG = f"rendered more than {MOST_TEXT:,} characters"


class TemplateStopped(RuntimeError):
    """Raised if a chat template broke a limit and was stopped.

    No ValueError: where a refusing template is tried with other forms of a conversation, this one is not.
    """
