"""Draws boxes and names into pictures, and embeds pictures in pages."""

import base64
import html
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

# Distinct on light and dark photographs, and with most colour blindness (Okabe and Ito
# 2008).
_COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")


# Boxes, float[n, 4], are ymin, xmin, ymax, xmax as fractions of the image.
def draw_boxes(
    image: np.ndarray, boxes: np.ndarray, labels: Sequence[int], texts: Sequence[str]
) -> bytes:
    """Returns a PNG of an image, uint8[H, W, 3], with boxes."""
    picture = Image.fromarray(image)
    draw = ImageDraw.Draw(picture)
    height, width = image.shape[:2]
    thick = max(2, round(min(height, width) / 200))
    font = ImageFont.load_default(max(10, round(min(height, width) / 40)))
    sides = np.array([height, width, height, width])
    # The last drawn box is on top: the one with the highest score.
    for index in reversed(range(len(boxes))):
        top, left, bottom, right = np.round(boxes[index] * sides).astype(int).tolist()
        colour = _COLOURS[labels[index] % len(_COLOURS)]
        draw.rectangle((left, top, right, bottom), outline=colour, width=thick)
        box = draw.textbbox((0, 0), texts[index], font=font)
        text_width, text_height = box[2] + 2 * thick, box[3] + 2 * thick
        # Above the box, or inside it where the space above is too small.
        x = max(0, min(left, int(width - text_width)))
        y = top - text_height if top >= text_height else top
        draw.rectangle((x, y, x + text_width, y + text_height), fill=colour)
        draw.text((x + thick, y + thick), texts[index], fill="black", font=font)
    return png_of(np.asarray(picture))


def png_of(image: np.ndarray) -> bytes:
    """Returns a PNG of an image, uint8[H, W, 3]."""
    data = io.BytesIO()
    Image.fromarray(image).save(data, format="PNG")
    return data.getvalue()


def embedded(png: bytes, width: int, said: str) -> str:
    """Returns HTML that embeds a picture, `width` pixels wide, with a caption."""
    text = base64.b64encode(png).decode()
    return (
        f'<figure style="display: inline-block; vertical-align: top; width: {width}px; '
        'max-width: 100%; margin: 4px">'
        f'<img alt="{html.escape(said)}" width="{width}" style="max-width: 100%; '
        f'image-rendering: pixelated" src="data:image/png;base64,{text}">'
        f"<figcaption>{html.escape(said)}</figcaption></figure>"
    )
