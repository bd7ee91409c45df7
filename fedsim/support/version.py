"""fedsim's version, where also code finds it that runs without the package's metadata."""

__version__ = "0.1.0"
