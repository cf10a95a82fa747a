"""vLLM 0.32's path of FlexibleArgumentParser."""

from quire.utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
