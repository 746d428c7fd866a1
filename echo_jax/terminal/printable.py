"""Escapes text from files so that it cannot control a terminal."""


# The name of a file, a class or a run may contain escape sequences, line breaks, marks
# of writing direction, and half characters that cannot be encoded.
def printable(text: object) -> str:
    """Returns the text on one line, with unprintable characters as escapes."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in str(text)
    )
