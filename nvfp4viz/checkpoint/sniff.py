"""Say what a file is that is not safetensors.  Looks at the first bytes only; nothing is ever unpickled."""

from __future__ import annotations

# How many leading bytes `looks_like` wants to see.
PEEK = 512

# (first bytes, what it is): the last part of the text key ``container.not-safetensors.<kind>``.
_MAGIC = (
    (b"version https://git-lfs", "lfs-pointer"),
    (b"PK\x03\x04", "zip"),
    (b"PK\x05\x06", "zip"),
    (b"\x1f\x8b", "compressed"),
    (b"\x28\xb5\x2f\xfd", "compressed"),
    (b"\xfd7zXZ", "compressed"),
    (b"BZh", "compressed"),
    (b"7z\xbc\xaf", "compressed"),
    (b"GGUF", "gguf"),
    (b"\x93NUMPY", "numpy"),
    (b"\x89HDF", "hdf5"),
)
_HTML = (b"<!doctype html", b"<html", b"<head", b"<body", b"<?xml", b"<error", b"<!--")


def looks_like(head: bytes) -> str | None:
    """Kind of a file by its first bytes, or None where they say nothing.

    Parameters
    ----------
    head
        The file's first bytes (`PEEK` of them where it has so many).

    >>> looks_like(b"version https://git-lfs.github.com/spec/v1"), looks_like(b"<!DOCTYPE html>")
    ('lfs-pointer', 'html')
    """
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    # Protocols 2 to 5 of pickle: the PROTO opcode, its version, an opcode that starts a value.
    if head[:1] == b"\x80" and len(head) > 2 and 2 <= head[1] <= 5 and head[2] in b"}](c)XCNKMJG\x8c\x95":
        return "pickle"
    # A safetensors length has zero bytes near its end, so a damaged file must not pass for a text here.
    if b"\0" in head[2:8]:
        return None
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.lower().startswith(_HTML):
        return "html"
    if text[:1] in (b"{", b"["):
        return "json"
    if len(head) >= 8 and all(9 <= byte <= 13 or 32 <= byte < 127 for byte in head):
        return "text"
    return None
