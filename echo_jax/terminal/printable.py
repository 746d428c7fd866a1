"""Text from files, made fit to be printed: nothing in it steers a terminal."""

__all__ = ["printable"]


def printable(text: object) -> str:
    r"""Writes characters that are not to be seen as their escapes.

    The name of a file, a class or a run may hold any character: an escape sequence
    that colours, moves or answers in a terminal, a line break that begins a line of its
    own, marks that turn the direction of writing, and halves of characters, which
    cannot be encoded.

    Args:
      text: What is to be printed.

    Returns:
      It, on one line.

    Example:
      >>> printable("runs/\x1b[2J\nnew — αβγ")
      'runs/\\x1b[2J\\nnew — αβγ'
    """
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in str(text)
    )
