"""vLLM's path of EngineArgs and AsyncEngineArgs."""

from quire.cli.engine_args import EngineArgs

AsyncEngineArgs = EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
