"""Published advisories on servers like this one -> the tests that keep Quire free of the same fault.

A row is here if it concerns something that exists: not images, URLs in requests, models of other kinds.
"""

from __future__ import annotations

import re

import pytest

from tests.architecture.named_tests import check_test
from tests.server.test_poison import POISON

# (what was wrong, where it was found, the tests)
ADVISORIES: list[tuple[str, str, str]] = [
    (
        "pickle between processes, or from the network",
        "CVE-2024-9052 CVE-2024-9053 CVE-2024-11041 CVE-2025-30165 CVE-2025-29783 CVE-2025-32444 CVE-2025-47277 "
        "CVE-2024-50050 CVE-2026-3060 CVE-2026-15969 CVE-2026-86793 CVE-2026-115912",
        """
        architecture/test_imports.py::test_forbidden_calls
        frontend/test_engine_link.py::test_sockets_are_unix_sockets
        frontend/test_client.py::test_unreadable_messages_end_the_engine_not_the_process
        """,
    ),
    (
        "weights that are pickles",
        "CVE-2025-24357",
        "loader/test_load.py::test_pickled_weights_are_refused architecture/test_imports.py::test_forbidden_calls",
    ),
    (
        "code from a model's repository, also against the setting",
        "CVE-2025-66448 CVE-2026-22807 CVE-2026-27893 CVE-2026-114053",
        """
        models/test_transformers_backend.py::test_code_and_kernels_named_by_a_checkpoint_are_never_used
        architecture/test_public_names.py::test_illegal_engine_argument_names_itself
        server/test_fields.py::test_unknown_fields_are_refused_with_the_nearest
        """,
    ),
    (
        "eval of what a model wrote",
        "CVE-2025-9141 CVE-2026-61539",
        """
        architecture/test_imports.py::test_forbidden_calls
        server/text/test_parsers.py::test_finished_calls_have_valid_arguments_and_no_text_is_lost
        """,
    ),
    ("a check that `python -O` leaves out", "CVE-2026-41523", "server/test_isolation.py::test_no_check_is_an_assert"),
    (
        "a template of a model that runs code",
        "CVE-2024-34359",
        """
        frontend/test_chat_template.py::test_hostile_templates_only_fail_the_request
        server/test_render.py::test_hostile_templates_end_their_own_request
        """,
    ),
    (
        "routes that start jobs, names that reach a shell",
        "CVE-2023-48022 CVE-2023-6019 CVE-2025-62593 CVE-2025-23316",
        """
        server/test_openapi.py::test_routes_are_those_of_the_app
        server/test_poison.py::test_poison_in_paths
        loader/test_hub.py::test_an_illegal_name_never_reaches_the_hub
        """,
    ),
    (
        "logprobs from memory that was never written",
        "CVE-2026-116180",
        """
        engine/test_poisoned_memory.py::test_unwritten_memory_changes_nothing
        engine/test_sameness.py::test_a_row_without_numbers_fails_alone
        """,
    ),
    (
        "numbers out of range",
        "CVE-2026-105775 CVE-2026-21869",
        """
        server/test_poison.py::test_poison_in_bodies
        sampling/test_sampling_params.py::test_poison_is_accepted_or_refused_by_name
        """,
    ),
    (
        "the header of a safetensors file",
        "safetensors-header-bloat",
        """
        loader/test_safetensors.py::test_a_broken_file_is_refused
        loader/test_safetensors.py::test_truncation_at_every_byte_is_found
        """,
    ),
    (
        "addresses, paths and tracebacks in errors",
        "CVE-2026-22778 CVE-2025-23320",
        """
        server/test_isolation.py::test_the_search_for_internals_finds_them
        server/test_errors.py::test_unexpected_exception
        server/test_guard.py::test_what_is_no_http
        """,
    ),
    (
        "a value in a field that stops the engine",
        "CVE-2026-54235 CVE-2026-44223 CVE-2026-105922 CVE-2026-114051 CVE-2026-105756 CVE-2024-8768",
        """
        server/test_poison.py::test_poison_in_bodies
        sampling/test_sampling_params.py::test_any_json_is_accepted_or_refused
        engine/test_core.py::test_a_row_that_makes_every_step_fail_is_found_and_ends_alone
        """,
    ),
    (
        "a dead engine that is called healthy",
        "CVE-2026-114051",
        "e2e/test_recovery.py::test_recovery server/test_errors.py::test_dead_engine",
    ),
    (
        "one request that is many",
        "CVE-2024-8939 CVE-2026-34756 CVE-2026-73559 CVE-2026-71486",
        "server/test_guard.py::test_fan_out_limits server/test_event_loop.py::test_lag_is_measured",
    ),
    (
        "large headers, slow clients",
        "CVE-2025-48956 CVE-2026-9540",
        """
        server/test_guard.py::test_large_headers
        server/test_guard.py::test_slowloris
        server/test_guard.py::test_slow_reader_frees_everything
        """,
    ),
    (
        "chat templates: from the request, without end, with reserved names",
        "CVE-2025-61620 CVE-2025-62426 CVE-2026-115911 PYSEC-2026-4349",
        """
        server/test_fields.py::test_every_refused_field_is_refused_with_a_way_out
        frontend/test_chat_template.py::test_reserved_kwargs_are_refused
        server/test_render.py::test_more_endless_templates_than_processes
        """,
    ),
    (
        "regular expressions and schemas that explode, and errors of constraints that escape",
        "CVE-2025-48942 CVE-2025-48943 CVE-2025-48944 CVE-2026-55574 PYSEC-2026-3933 CVE-2026-105757 "
        "GHSA-7rgv-gqhr-fxg3",
        """
        grammar/test_text.py::test_refused
        grammar/test_schemas.py::test_what_is_no_schema_is_refused
        grammar/test_generate.py::test_what_a_constraint_does_is_the_fault_of_its_request
        frontend/test_grammar_pool.py::test_a_slow_constraint_ends_alone
        frontend/test_grammar_pool.py::test_a_defect_is_answered_as_one
        server/test_poison_inside.py::test_poison_in_tools_schemas_and_histories
        """,
    ),
    (
        "grammars that are kept without a bound",
        "CVE-2025-29770 GHSA-hf3c-wxg2-49q9",
        """
        grammar/test_text.py::test_what_is_kept_is_bounded
        grammar/test_generate.py::test_what_is_compiled_for_a_request_is_kept_until_it_ends
        frontend/test_grammar_pool.py::test_what_was_asked_for_last_is_kept_and_no_more
        """,
    ),
    (
        "parsers of answers that take quadratic time",
        "CVE-2025-48887",
        "server/text/test_parsers.py::test_work_is_linear_in_the_text",
    ),
    (
        "GGUF files that say more than they hold",
        "CVE-2024-21802 CVE-2025-53630 CVE-2026-27940 CVE-2026-33298 CVE-2026-7482 CVE-2024-12886 CVE-2025-0315",
        """
        gguf/test_file.py::test_hostile_file
        gguf/test_file.py::test_truncated_at_every_byte
        gguf/test_file.py::test_flipped_bytes
        """,
    ),
    (
        "metric labels made by clients",
        "PYSEC-2026-4325",
        """
        server/test_http_metrics.py::test_ten_thousand_random_methods_and_paths_make_no_series
        server/test_metrics.py::test_the_number_of_series_is_constant
        """,
    ),
    (
        "ports nobody asked for, and on all interfaces",
        "CVE-2025-30202",
        "e2e/test_listen.py::test_only_the_http_port_is_open_and_only_on_loopback e2e/test_listen.py::test_unix_socket",
    ),
    (
        "access decided on another path than the route",
        "CVE-2026-48710 CVE-2026-48746 CVE-2026-49468",
        """
        server/test_auth.py::test_path_and_host_tricks
        server/test_auth.py::test_allowed_hosts
        server/test_root_path.py::test_the_key_guards_every_spelling
        """,
    ),
    (
        "routes without the key",
        "vllm-routes-without-auth",
        """
        server/test_auth.py::test_every_route_needs_the_key_but_the_probes
        server/test_auth.py::test_no_route_exists_for_the_unauthorized
        """,
    ),
    (
        "the key: by timing, in what is shown",
        "CVE-2025-59425",
        "server/test_auth.py::test_keys_do_not_show server/test_config_api.py::test_no_secret_and_no_path",
    ),
    (
        "prefixes shared by mistake: guessed, by a weak hash, across salts",
        "CVE-2025-46570 CVE-2025-25183 CVE-2026-10813",
        """
        scheduler/test_prefix_cache.py::test_salt_and_adapter_isolate
        scheduler/test_tenants.py::test_with_salts_the_work_does_not_depend_on_what_the_other_tenant_says
        scheduler/test_tenants.py::test_a_guess_of_a_prompt_shows_without_salts_only
        scheduler/test_block_pool.py::test_hash_chain_by_its_definition
        scheduler/test_block_pool.py::test_adapter_and_salt_separate
        """,
    ),
    (
        "pages that rebind their name to loopback; other origins",
        "CVE-2024-28224 GO-2025-4251",
        """
        server/test_auth.py::test_allowed_hosts
        server/test_guard.py::test_no_cors_by_default
        server/test_errors.py::test_content_type
        """,
    ),
    (
        "paths in names",
        "CVE-2024-37032 CVE-2026-32981",
        """
        server/test_poison.py::test_poison_in_paths
        loader/test_safetensors.py::test_a_broken_folder_is_refused
        loader/test_hub.py::test_an_illegal_name_never_reaches_the_hub
        """,
    ),
    ("data of one client with another", "tenants", "server/test_isolation.py::test_canaries"),
    (
        "lines of the log made by clients",
        "log-injection",
        """
        server/test_isolation.py::test_log_lines_cannot_be_forged
        server/test_isolation.py::test_names_of_requests_are_harmless
        """,
    ),
]


@pytest.mark.parametrize(("what", "found", "tests"), ADVISORIES, ids=[row[0] for row in ADVISORIES])
def test_its_tests_exist(what: str, found: str, tests: str) -> None:
    assert found
    assert tests.split()
    for test in tests.split():
        path, _, name = test.partition("::")
        check_test(f"tests/{path}", name)


def test_names_are_written_right() -> None:
    for what, found, _ in ADVISORIES:
        for name in found.split():
            assert re.fullmatch(r"CVE-\d{4}-\d{4,6}|(PYSEC|GO)-\d{4}-\d{4}|GHSA(-[a-z0-9]{4}){3}|[a-z-]+", name), (
                what,
                name,
            )


def test_every_kind_of_illegal_integer_is_tried() -> None:
    """In every field of every route: test_poison_in_bodies."""
    numbers = {str(-(2**63)), "-1", "0", "1", str(2**31), str(2**63 - 1), str(2**63), "1e400"}
    assert numbers | {"true", '"1"', "1.5", "null", "NaN", "Infinity"} <= set(POISON)
