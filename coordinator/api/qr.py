"""A text as the squares of a QR code, for a screen that draws them itself."""

import segno


def squares(text: str) -> list[str]:
    """Give the rows of the code, `1` for a dark square. ValueError for a text that is too long for one."""
    return ["".join("1" if dark else "0" for dark in row) for row in segno.make(text, micro=False).matrix]
