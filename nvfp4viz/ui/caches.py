"""Bounded caches around pure library functions, keyed by content.  Arrays that sessions share are read-only."""

from __future__ import annotations
