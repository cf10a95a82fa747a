"""The OpenAPI document as one page for people: only text, without scripts and without other files."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #8886 } code, pre { font-family: ui-monospace, monospace }
table { border-collapse: collapse; width: 100%; font-size: .9rem } td, th { text-align: left; vertical-align: top;
padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #8883 } .method { font-weight: 700 }
pre { overflow-x: auto; padding: .75rem; border: 1px solid #8886; border-radius: .4rem }
"""


_BOUNDS = {
    **{"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "pattern": "of the form"},
    **{"minLength": "of at least", "maxLength": "of at most"},
    **{"minItems": "of at least", "maxItems": "of at most", "maxProperties": "of at most"},
}


def render(document: dict[str, Any]) -> str:
    """The document as one HTML page without scripts."""
    operations = [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Quire API</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>',
        f"<h1>Quire {escape(document['info']['version'])}</h1><p>{escape(document['info']['description'])}</p>",
        '<p>For programs: <a href="openapi.json">/openapi.json</a>. To try it: <a href=".">the chat page</a>.</p>',
        "<nav><table><tbody>",
        *(
            f'<tr><td class="method">{method.upper()}</td><td><a href="#{_anchor(path, method)}"><code>{escape(path)}'
            f"</code></a></td><td>{escape(operation['summary'])}</td></tr>"
            for path, method, operation in operations
        ),
        "</tbody></table></nav><main><h2>Routes</h2>",
        *(_section(path, method, operation) for path, method, operation in operations),
        "<h2>Bodies</h2>",
        *(_schema(name, schema) for name, schema in document["components"]["schemas"].items()),
        "</main></body></html>",
    ]
    return "\n".join(parts)


def _anchor(path: str, method: str) -> str:
    return escape(method + path.replace("/", "-").replace("{", "").replace("}", ""))


def _section(path: str, method: str, operation: dict[str, Any]) -> str:
    queries = [parameter for parameter in operation.get("parameters", ()) if parameter["in"] == "query"]
    rows = [(f"?{query['name']}=", _type(query["schema"]) + _default(query["schema"])) for query in queries]
    if "requestBody" in operation:
        rows.append(("body", _kinds(operation["requestBody"]["content"])))
    for status, response in operation["responses"].items():
        rows.append((status, _kinds(response["content"])))
    access = "needs the key, if there is one" if operation["security"] else "needs no key"
    return (
        f'<h3 id="{_anchor(path, method)}"><span class="method">{method.upper()}</span> '
        f"<code>{escape(path)}</code></h3>"
        f"<p>{escape(operation['summary'])}; {access}.</p>{_table(rows)}"
    )


def _kinds(content: dict[str, Any]) -> str:
    parts = []
    for media_type, body in content.items():
        parts.append(f"{_type(body['schema'])} as <code>{escape(media_type)}</code>")
        if "x-event-schema" in body:
            parts[-1] = f"events of {_type(body['x-event-schema'])} as <code>{escape(media_type)}</code>"
        if "x-line-schema" in body:
            parts[-1] = f"lines of {_type(body['x-line-schema'])} as <code>{escape(media_type)}</code>"
    return ", or ".join(parts)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td><code>{escape(name)}</code></td><td>{text}</td></tr>" for name, text in rows)
    return f"<table><tbody>{cells}</tbody></table>"


def _schema(name: str, schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = [
        (field, _type(kind) + (", required" if field in required else "") + _default(kind) + _about(kind))
        for field, kind in schema.get("properties", {}).items()
    ]
    about = f"<p>{escape(schema.get('description', ''))}</p>" if "description" in schema else ""
    rules = "".join(f"<li>{escape(rule['description'])}</li>" for rule in schema.get("allOf", ()))
    about += f"<ul>{rules}</ul>" if rules else ""
    return f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3>{about}{_table(rows)}'


def _default(schema: dict[str, Any]) -> str:
    return f", default {escape(repr(schema['default']))}" if schema.get("default") is not None else ""


def _about(schema: dict[str, Any]) -> str:
    return f": {escape(schema['description'])}" if "description" in schema else ""


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words, with links to schemas that have a section."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(kind) for kind in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in schema["enum"])
    if "const" in schema:
        return f"<code>{escape(repr(schema['const']))}</code>"
    kind = schema.get("type", "anything")
    bounds = "".join(f" {words} {schema[key]}" for key, words in _BOUNDS.items() if key in schema)
    if kind == "array":
        return f"list{bounds} of {_type(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object{bounds} of {_type(schema['additionalProperties'])}"
    return escape(f"{kind}{bounds}")
