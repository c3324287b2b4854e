"""QR code of a text as rows of modules, which the page draws."""


def build_qr_matrix(text: str) -> list[str]:
    """Return the rows of a text's QR code: `1` for a dark module, `0` for a light one.

    Raise `ValueError` if the text is too long.
    """
    import segno  # imported here, because only the page needs it

    return ["".join("1" if dark else "0" for dark in row) for row in segno.make(text, micro=False).matrix]
