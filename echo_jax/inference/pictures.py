"""Pictures for people: with boxes and names drawn into them, and in pages."""

import base64
import html
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

__all__ = ["draw_boxes", "embedded", "png_of"]

# Told apart on photographs, light and dark, and by most who see few colours (Okabe and
# Ito 2008).
_COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")


def draw_boxes(
    image: np.ndarray,
    boxes: np.ndarray,
    labels: Sequence[int],
    texts: Sequence[str],
) -> bytes:
    """Returns a PNG of an image with boxes in it.

    Args:
      image: ``uint8[height, width, 3]``.
      boxes: ``float[n, 4]``: ymin, xmin, ymax, xmax as fractions of the image.
      labels: The class of each, which chooses its colour.
      texts: What is written beside each.
    """
    picture = Image.fromarray(image)
    draw = ImageDraw.Draw(picture)
    height, width = image.shape[:2]
    thick = max(2, round(min(height, width) / 200))
    font = ImageFont.load_default(max(10, round(min(height, width) / 40)))
    sides = np.array([height, width, height, width])
    # The last one lies on top: that of the highest score.
    for index in reversed(range(len(boxes))):
        top, left, bottom, right = np.round(boxes[index] * sides).astype(int).tolist()
        colour = _COLOURS[labels[index] % len(_COLOURS)]
        draw.rectangle((left, top, right, bottom), outline=colour, width=thick)
        box = draw.textbbox((0, 0), texts[index], font=font)
        text_width, text_height = box[2] + 2 * thick, box[3] + 2 * thick
        # Above the box, or where that is outside of the picture, in it.
        x = max(0, min(left, int(width - text_width)))
        y = top - text_height if top >= text_height else top
        draw.rectangle((x, y, x + text_width, y + text_height), fill=colour)
        draw.text((x + thick, y + thick), texts[index], fill="black", font=font)
    return _saved(picture)


def png_of(image: np.ndarray) -> bytes:
    """Returns a PNG of an image.

    Args:
      image: ``uint8[height, width, 3]``.
    """
    return _saved(Image.fromarray(image))


def embedded(png: bytes, width: int, said: str) -> str:
    """Returns HTML that shows a picture, and needs no other file.

    Args:
      png: The picture.
      width: In a page, in pixels.
      said: Text below it.
    """
    text = base64.b64encode(png).decode()
    return (
        f'<figure style="display: inline-block; vertical-align: top; width: {width}px; '
        'max-width: 100%; margin: 4px">'
        f'<img alt="{html.escape(said)}" width="{width}" style="max-width: 100%; '
        f'image-rendering: pixelated" src="data:image/png;base64,{text}">'
        f"<figcaption>{html.escape(said)}</figcaption></figure>"
    )


def _saved(picture: Image.Image) -> bytes:
    data = io.BytesIO()
    picture.save(data, format="PNG")
    return data.getvalue()
