"""Whether an image file is whole: found out by decoding it, within limits."""

import io

from PIL import Image

from echo_jax.data.prepare.errors import BadExampleError

__all__ = ["MAX_IMAGE_BYTES", "check_image"]

MAX_IMAGE_BYTES = 64 * 1024**2
_MAX_PIXELS = 64 * 1024**2

_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
_END_OF_IMAGE = b"\xff\xd9"
# The last chunk of a PNG is always the same: no data, its name, its checksum.
_END_OF_PNG = b"\0\0\0\0IEND\xaeB`\x82"
_START_OF_SCAN = 0xDA
# Start of frame: 0xC0 to 0xCF, but for three markers of tables.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def check_image(data: bytes) -> tuple[int, int]:
    """Decodes an image to see whether all of it is there.

    The size is read from the header first, so that a small file that claims to be
    huge is never decoded. A JPEG is decoded at an eighth of its size, which reads
    every byte of it at less than the price of all pixels. Decoders differ in what
    they accept: the end mark is looked for as well, because a decoder may be content
    with what is there.

    Args:
      data: A JPEG or PNG file.

    Returns:
      Height and width in pixels, as stored: before any rotation that the file asks
      for.

    Raises:
      BadExampleError: If it is empty, too large, cut off, damaged, or another format.
    """
    if not data:
        raise BadExampleError("empty file")
    if len(data) > MAX_IMAGE_BYTES:
        raise BadExampleError(f"file of more than {MAX_IMAGE_BYTES} bytes")
    if data.startswith(_JPEG):
        height, width, scan = _jpeg_header(data)
    elif data.startswith(_PNG):
        if len(data) < 24:
            raise BadExampleError("truncated")
        width, height = (int.from_bytes(data[i : i + 4]) for i in (16, 20))
        scan = None
        if _END_OF_PNG not in data:
            raise BadExampleError("truncated")
    else:
        raise BadExampleError("neither JPEG nor PNG")
    if not 0 < height * width <= _MAX_PIXELS:
        raise BadExampleError(f"not between 1 and {_MAX_PIXELS} pixels")
    if scan is not None and data.rfind(_END_OF_IMAGE) < scan:
        raise BadExampleError("truncated")
    try:
        with Image.open(io.BytesIO(data), formats=["JPEG", "PNG"]) as image:
            image.draft("L", (1, 1))
            image.load()
    # Decoders raise of everything on hostile input.
    except Exception as error:
        cut = "truncated" in str(error)
        raise BadExampleError("truncated" if cut else "corrupt") from error
    return height, width


def _jpeg_header(data: bytes) -> tuple[int, int, int]:
    """Returns height, width and where the first scan begins."""
    position, size = 2, None
    while position + 4 <= len(data):
        if data[position] != 0xFF:
            raise BadExampleError("corrupt")
        marker = data[position + 1]
        if marker == 0xFF:  # Markers may be preceded by fill bytes.
            position += 1
            continue
        if marker == _START_OF_SCAN and size:
            return *size, position
        if marker in _FRAMES:
            height, width = (
                int.from_bytes(data[position + i : position + i + 2]) for i in (5, 7)
            )
            size = height, width
        position += 2 + int.from_bytes(data[position + 2 : position + 4])
    raise BadExampleError("truncated")
