"""Things that only one place may do, read from the syntax trees of the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from quire.families import FAMILIES
from quire.request import Request

PACKAGE = Path(__file__).parents[2] / "src" / "quire"
COUNTS = {
    name for name in Request.__dataclass_fields__ if name.startswith("num_in_flight") or name == "num_forced_tokens"
}
COUNTS |= {"num_computed_tokens", "num_settled_tokens"}
# They turn the names of checkpoints into layers and tokens.
READERS = ("families/", "hf_config/", "gguf/", "frontend/gguf_tokenizer.py")


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """Every node of every module, with the module's path in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        yield from ((name, node) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def test_progress_alone_moves_the_counts_of_a_request() -> None:
    """Other modules may fill a request that they make, by arguments."""
    targets = (
        (name, node.attr)
        for name, node in nodes()
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    )
    places = {name for name, attribute in targets if attribute in COUNTS}
    assert places == {"scheduler/progress.py"}


def test_the_attention_backend_of_the_environment_is_read_once() -> None:
    reads = [name for name, node in nodes() if isinstance(node, ast.Attribute) and node.attr == "ATTENTION_BACKEND"]
    assert reads == ["execution_choices.py"]


def test_no_shared_code_asks_for_a_family() -> None:
    """Layers are built from specs: behind the readers of checkpoints, no comparison names a model type."""
    names = {name for family in FAMILIES.values() for name in (family.model_type, *family.architectures)}
    asking = []
    for name, node in nodes():
        if name.startswith(READERS) or not isinstance(node, ast.Compare | ast.match_case):
            continue
        compared = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
        if compared & names:
            asking.append(f"{name}: {compared & names}")
    assert not asking
