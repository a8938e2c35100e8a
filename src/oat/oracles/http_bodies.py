"""Decodes the body of a reply that a proxy or a service has compressed although it was not asked to."""

import zlib

from oat.errors import ClosedError

_GZIP = b"\x1f\x8b"
_CODINGS = ("gzip", "x-gzip", "deflate")


def decoded(body: bytes, coding: str, most: int, status: int) -> bytes:
    """Return a body without its compression.

    The body tells whether it is gzip, since proxies also send gzip without the header, and the header without
    gzip. `deflate` is read with and without the header of zlib (RFC 9110, section 8.4.1.2).

    Args:
        coding: the header `Content-Encoding`; "" if there is none.
        most: largest number of bytes of the result.
        status: the reply's status.

    Raises:
        ClosedError: the coding is none of gzip and deflate. Every further reply would have it.
        ValueError: the body is cut or damaged, or the result is too large.
    """
    names = [name.strip().casefold() for name in coding.split(",")]
    for name in reversed([name for name in names if name not in ("", "identity")]):
        if name not in _CODINGS:
            raise ClosedError(
                f"a reply is compressed ({name[:40]}) although this was not asked for, and only gzip and "
                "deflate can be read; let the service, or the proxy before it, send plain replies, and run "
                "the same command again: what is unanswered is asked again",
                status,
                "",
            )
        if name == "deflate" and body and not _is_json(body):
            has_header = body[0] & 15 == 8 and int.from_bytes(body[:2]) % 31 == 0
            body = _inflated(body, 15 if has_header else -15, most)
        elif name != "deflate" and body.startswith(_GZIP):
            body = _inflated(body, 31, most)
    return _inflated(body, 31, most) if body.startswith(_GZIP) else body


def _inflated(body: bytes, wbits: int, most: int) -> bytes:
    """Return what zlib makes of a body. A body may have several members."""
    found = b""
    while body:
        stream = zlib.decompressobj(wbits)
        try:
            found += stream.decompress(body, most + 1 - len(found))
        except zlib.error as error:
            raise ValueError(f"a compressed reply that is damaged ({error})") from None
        if len(found) > most:
            raise ValueError(f"a reply of more than {most} bytes")
        if not stream.eof:
            raise ValueError("a compressed reply that was cut")
        body = stream.unused_data if stream.unused_data.startswith(_GZIP) else b""
    return found


def _is_json(body: bytes) -> bool:
    return body.lstrip()[:1] in (b"{", b"[")
