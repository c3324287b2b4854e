"""Bytes of single tokens, exact for byte-level vocabularies."""

from typing import Final

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer, TokenizerWrapper


def _build_byte_signs() -> dict[str, bytes]:
    """Return the byte of each character of a byte-level vocabulary (the table of GPT-2's encoder). A printable byte has
    the character of the same code point. All other bytes have the characters from code point 256 on, in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    signs = {chr(byte): bytes([byte]) for byte in printable}
    return signs | {chr(256 + at): bytes([byte]) for at, byte in enumerate(others)}


BYTES: Final = _build_byte_signs()
"""Byte that each character of a byte-level vocabulary represents."""


class TokenBytes:
    """Bytes of the tokens of one tokenizer. `size` is the highest id plus one."""

    def __init__(self, wrapper: TokenizerWrapper, size: int) -> None:
        self._wrapper = wrapper
        self._size = size
        self._detokenizer = wrapper.detokenizer
        self._added = {token: text for text, token in wrapper.get_added_vocab().items()}

    def get_bytes(self, token: int) -> bytes:
        """Return the bytes of a token: exact for byte-level and SentencePiece vocabularies, otherwise the UTF-8 text of
        the token alone. Return empty bytes for an id out of range."""
        if not 0 <= token < self._size:
            return b""
        if token in self._added:
            return self._added[token].encode()
        if isinstance(self._detokenizer, BPEStreamingDetokenizer):
            return b"".join(BYTES.get(sign) or sign.encode() for sign in self._detokenizer.tokenmap[token] or "")
        if isinstance(self._detokenizer, SPMStreamingDetokenizer):
            return self._detokenizer.tokenmap[token].replace("\u2581".encode(), b" ")
        return self._wrapper.decode([token]).encode()
