"""See an NVFP4 mixture-of-experts model compute, break it on purpose, and check a real checkpoint."""

__version__ = "0.1.0"
