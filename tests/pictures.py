"""Small pictures of random pixels, and prompts with them."""

from io import BytesIO

import numpy as np
from PIL import Image


def picture(seed: int, width: int = 40, height: int = 30, kind: str = "PNG") -> bytes:
    """An encoded image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer := BytesIO(), kind)
    return buffer.getvalue()


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# One image, two of different sizes, none, and one again.
PROMPTS = [user("a cat?"), user("Which of the two?"), user("Only text."), user("Hm")]
PICTURES = [[picture(1)], [picture(2), picture(3, 30, 60)], [], [picture(4, kind="JPEG")]]
