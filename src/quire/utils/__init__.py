"""vLLM's path of what its scripts take from there: no place for helpers of ours."""

from quire.cli.flags import Parser as FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
