"""vLLM 0.32's server flags that are no settings here."""

from __future__ import annotations

from quire.compat.engine_flags import NO_CODE, OWN_REPLICAS, TEXT_ONLY
from quire.compat.foreign import Foreign, accepted, refused

SERVER_FLAGS: tuple[Foreign, ...] = (
    *refused(
        "the format is read from the template", "Leave it out", off=("auto",), values="chat_template_content_format"
    ),
    *refused(
        "a template from a request is a program from a stranger, and is never run",
        "Use --chat-template",
        switches="trust_request_chat_template",
    ),
    *refused("the server runs no tools", "Run them in the client", values="tool_server"),
    *refused(NO_CODE, values="tool_parser_plugin", lists="middleware"),
    *refused("logs have a level and a form", "Use --log-level and --log-format", values="log_config_file"),
    *accepted(
        "requests and answers are counted in /metrics, not logged",
        values="max_log_len",
        switches="enable_log_outputs enable_log_deltas",
        off=(False, True),
    ),
    *accepted("errors of ours are always logged with their stack", switches="log_error_stack"),
    *accepted("usage always has its details", switches="enable_prompt_tokens_details"),
    *accepted("/metrics has the running and waiting requests", switches="enable_server_load_tracking"),
    *refused(
        "the routes do not depend on it",
        "Use --skip-tokenizer-init for token ids in and out",
        switches="tokens_only",
    ),
    *refused("the engine is not split over servers in this version", switches="enable_scale_out"),
    *accepted("system_fingerprint names the version", values="fingerprint_mode fingerprint_value", off=("full",)),
    *refused(
        "the server sends no comments in quiet streams",
        "Raise the proxy's idle timeout",
        off=(0,),
        values="sse_keep_alive_interval",
    ),
    *accepted("there is no Cohere route", switches="cohere_is_reasoning_model", values="cohere_format"),
    *accepted(
        OWN_REPLICAS,
        values="""
            data_parallel_supervisor_port dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s
            dp_supervisor_probe_failure_threshold
        """,
    ),
    *accepted("there is no access log", values="disable_access_log_for_endpoints"),
    *accepted("every answer has x-request-id", switches="enable_request_id_headers"),
    *accepted("no page is loaded from elsewhere", switches="disable_fastapi_docs enable_offline_docs"),
    *accepted(
        "requests are parsed by httptools, with its own limits",
        values="h11_max_incomplete_event_size h11_max_header_count",
    ),
    *accepted(TEXT_ONLY, switches="enable_flash_late_interaction", off=(True, False)),
    *accepted("one API process carries thousands of streams", off=(1,), values="api_server_count"),
    *refused("there is no gRPC server", switches="grpc"),
    *refused("models here read and write text only", switches="omni"),
)
